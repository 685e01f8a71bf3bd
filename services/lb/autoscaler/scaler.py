"""All pools of a cluster: what was demanded, what is decided, what was written down.

A change is proposed, written by the shell under its term, and only then in force: a write that
fails leaves the pool as it was.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import Failure, Reason
from services.lb.autoscaler import policy
from services.lb.autoscaler.policy import Decision, DemandWindow, PoolConfig, PoolState

MAX_INSTANCES = 10_000


@dataclass(frozen=True)
class Change:
    """A new count for a pool, to be written down."""

    pool: str
    before: int
    after: int
    plan_number: int
    state: PoolState


@dataclass(frozen=True)
class PoolView:
    """What there is to say about a pool."""

    pool: str
    num_online: int
    decision: Decision
    plan_number: int
    config: PoolConfig


class Scaler:
    """The pools. The caller passes the time; nothing here waits."""

    def __init__(self, pools: Mapping[str, PoolConfig]) -> None:
        self._configs = dict(pools)
        self._states: dict[str, PoolState] = {}
        self._windows = {name: DemandWindow() for name in pools}
        self._views: dict[str, PoolView] = {}

    @property
    def pools(self) -> tuple[str, ...]:
        """Returns the names."""
        return tuple(sorted(self._configs))

    def config(self, pool: str) -> PoolConfig:
        """Returns a pool's rules. Raises Failure(INVALID_REQUEST) for an unknown pool."""
        if pool not in self._configs:
            known = ", ".join(self.pools)
            raise Failure(Reason.INVALID_REQUEST, f"unknown pool {pool[:40]!r}; there are {known}")
        return self._configs[pool]

    def forget(self) -> None:
        """Forgets what was decided: another term begins and reads what the last one wrote."""
        self._states.clear()
        self._views.clear()

    def restore(self, pool: str, desired: int | None, plan_number: int, num_online: int) -> None:
        """Starts a pool from what was written down, or else from what is online."""
        config = self.config(pool)
        if desired is None:
            desired = min(config.max_instances, max(config.min_instances, num_online))
        self._states[pool] = PoolState(desired=desired, plan_number=plan_number)

    def is_restored(self, pool: str) -> bool:
        """Returns whether decisions may be taken."""
        return pool in self._states

    def desired(self, pool: str) -> tuple[int, int]:
        """Returns (count, plan number) in force."""
        state = self._states[pool]
        return state.desired, state.plan_number

    def demand(self, pool: str, source: str, demand: float, now_s: float) -> None:
        """Takes one sample. Raises Failure(INVALID_REQUEST)."""
        self.config(pool)
        if not 0 <= demand < 1e15:
            raise Failure(Reason.INVALID_REQUEST, f"a demand of {demand} makes no sense")
        self._windows[pool].add(source, demand, now_s)

    def set_bounds(self, pool: str, minimum: int, maximum: int) -> None:
        """Changes a pool's bounds. Raises Failure(INVALID_REQUEST)."""
        config = self.config(pool)
        if not 1 <= minimum <= maximum <= MAX_INSTANCES:
            raise Failure(
                Reason.INVALID_REQUEST,
                f"bounds {minimum} to {maximum} are not within 1 to {MAX_INSTANCES}",
                {"min": str(minimum), "max": str(maximum)},
            )
        self._configs[pool] = dataclasses.replace(
            config, min_instances=minimum, max_instances=maximum
        )

    def look(self, pool: str, num_online: int, now_s: float) -> Change | None:
        """Looks at a pool; returns the change to write down, None when nothing changes."""
        config, state = self._configs[pool], self._states[pool]
        window = self._windows[pool]
        if not window.has_samples(now_s) and state.smoothed is not None:
            # Nobody reports although somebody did: no demand known is not no demand.
            decision = Decision(0, state.desired, state.desired, 0.0, "no_demand")
            self._views[pool] = PoolView(pool, num_online, decision, state.plan_number, config)
            return None
        if not window.has_samples(now_s):
            return None
        new, decision = policy.decide(state, window.mean(now_s), num_online, config, now_s)
        self._views[pool] = PoolView(pool, num_online, decision, new.plan_number, config)
        if new.desired == state.desired:
            self._states[pool] = new
            return None
        return Change(pool, state.desired, new.desired, new.plan_number, new)

    def commit(self, change: Change) -> None:
        """Puts a change into force once it is written."""
        self._states[change.pool] = change.state

    def view(self, pool: str, num_online: int) -> PoolView:
        """Returns the last look at a pool."""
        config = self.config(pool)
        seen = self._views.get(pool)
        if seen is not None:
            return dataclasses.replace(seen, config=config, num_online=num_online)
        state = self._states.get(pool, PoolState(desired=num_online))
        decision = Decision(0, state.desired, state.desired, 0.0, "")
        return PoolView(pool, num_online, decision, state.plan_number, config)


def desired_to_bytes(count: int, plan_number: int, term: int) -> bytes:
    """Returns the value of `as/<pool>/desired`."""
    return json.dumps({"count": count, "plan": plan_number, "term": term}).encode()


def parse_desired(value: bytes) -> tuple[int, int] | None:
    """Returns (count, plan number); None for a value that cannot be read."""
    try:
        document = json.loads(value)
        count, plan_number = int(document["count"]), int(document["plan"])
    except (ValueError, KeyError, TypeError):
        return None
    return (count, plan_number) if 0 <= count <= MAX_INSTANCES and plan_number >= 0 else None
