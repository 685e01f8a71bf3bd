"""Decides how many instances a pool has. Demand in, count out; time is an argument.

There is always more online than demand needs, nothing is taken away while the pool is busy, and
what was wanted for a moment only is not acted upon. Source: kvcache-and-balancing.md, section 16;
reliability-and-security.md, P-24.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolConfig:
    """Rules and bounds of one pool. `capacity` is demand per instance, in the pool's unit."""

    capacity: float = 100.0
    target_utilization: float = 0.7
    spare: int = 1  # instances beyond the computed need
    min_instances: int = 1
    max_instances: int = 16
    up_step: int = 2
    down_step: int = 1
    up_every_s: float = 30.0
    down_every_s: float = 120.0
    down_stable_s: float = 300.0  # how long fewer must be wanted before one goes
    max_occupancy: float = 0.8  # above it nothing is taken away
    smoothing_s: float = 60.0  # 0: demand counts as it is
    demand_timeout_s: float = 5.0  # samples of one source older than this do not count


@dataclass(frozen=True)
class PoolState:
    """What a pool's decisions depend on besides the demand. A new leader starts from `desired`."""

    desired: int
    plan_number: int = 0
    smoothed: float | None = None
    updated_s: float | None = None
    fewer_wanted_since_s: float | None = None
    last_up_s: float | None = None
    last_down_s: float | None = None


@dataclass(frozen=True)
class Decision:
    """One look at a pool. `held_by` says why nothing changes although it is wanted."""

    need: int
    want: int
    desired: int
    occupancy: float
    held_by: str = ""


def need_of(demand: float, config: PoolConfig) -> int:
    """Returns how many instances carry this demand at the target utilization."""
    per_instance = config.capacity * config.target_utilization
    # A demand of exactly n instances needs n, float noise or not.
    return max(0, math.ceil(demand / per_instance - 1e-9))


def decide(
    state: PoolState, demand_5s: float, num_online: int, config: PoolConfig, now_s: float
) -> tuple[PoolState, Decision]:
    """Returns the state after this look, and the decision. Cases T-AS-1 to T-AS-3.

    `num_online` counts instances that serve; those still starting count in `state.desired`, so that
    nothing is started twice.
    """
    smoothed = _smooth(state, demand_5s, config, now_s)
    need = need_of(smoothed, config)
    want = min(config.max_instances, max(config.min_instances, need + config.spare))
    current = state.desired
    serving = max(1, min(num_online, current) if num_online else current)
    occupancy = demand_5s / (serving * config.capacity)
    fewer_since_s = None
    if want < current:
        fewer_since_s = now_s if state.fewer_wanted_since_s is None else state.fewer_wanted_since_s
    state = dataclasses.replace(
        state, smoothed=smoothed, updated_s=now_s, fewer_wanted_since_s=fewer_since_s
    )
    desired, held_by = _step(state, want, demand_5s, occupancy, config, now_s)
    if desired > current:
        state = dataclasses.replace(state, last_up_s=now_s)
    elif desired < current:
        state = dataclasses.replace(state, last_down_s=now_s)
    if desired != current:
        state = dataclasses.replace(state, desired=desired, plan_number=state.plan_number + 1)
    return state, Decision(need, want, desired, occupancy, held_by)


def _step(
    state: PoolState,
    want: int,
    demand_5s: float,
    occupancy: float,
    config: PoolConfig,
    now_s: float,
) -> tuple[int, str]:
    current = state.desired
    # Bounds that were changed hold at once, in either direction.
    if current < config.min_instances:
        return config.min_instances, ""
    if current > config.max_instances:
        return max(config.max_instances, current - config.down_step), ""
    if want > current:
        if state.last_up_s is not None and now_s - state.last_up_s < config.up_every_s:
            return current, "rate"
        return min(want, current + config.up_step, config.max_instances), ""
    if want == current:
        return current, ""
    if occupancy > config.max_occupancy:
        return current, "occupancy"
    if current <= 1 or demand_5s / ((current - 1) * config.capacity) > config.max_occupancy:
        # The rest would be too busy: without this, a pool flaps between two sizes.
        return current, "consolidation"
    since_s = state.fewer_wanted_since_s
    if since_s is None or now_s - since_s < config.down_stable_s:
        return current, "stability"
    # A pool that has just grown proves first that it was a mistake.
    last_s = max(state.last_down_s or -math.inf, state.last_up_s or -math.inf)
    if now_s - last_s < config.down_every_s:
        return current, "rate"
    return max(want, current - config.down_step, config.min_instances), ""


def _smooth(state: PoolState, demand: float, config: PoolConfig, now_s: float) -> float:
    if state.smoothed is None or state.updated_s is None or config.smoothing_s <= 0:
        return demand
    weight = -math.expm1(-max(0.0, now_s - state.updated_s) / config.smoothing_s)
    return state.smoothed + weight * (demand - state.smoothed)


class DemandWindow:
    """Mean demand of the last seconds: the sum over sources of each one's mean."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._samples: dict[str, deque[tuple[float, float]]] = {}

    def add(self, source: str, demand: float, now_s: float) -> None:
        """Takes one sample."""
        self._samples.setdefault(source, deque()).append((now_s, demand))
        self._drop_old(now_s)

    def mean(self, now_s: float) -> float:
        """Returns the demand of all sources that reported within the window."""
        self._drop_old(now_s)
        return math.fsum(
            math.fsum(demand for _, demand in samples) / len(samples)
            for samples in self._samples.values()
        )

    def has_samples(self, now_s: float) -> bool:
        """Returns whether anybody reported within the window. Nobody: nothing is decided."""
        self._drop_old(now_s)
        return bool(self._samples)

    def _drop_old(self, now_s: float) -> None:
        for source, samples in list(self._samples.items()):
            while samples and samples[0][0] <= now_s - self._window_s:
                samples.popleft()
            if not samples:
                del self._samples[source]


@dataclass(frozen=True)
class Candidate:
    """An instance that could be stopped."""

    instance_id: str
    failure_domain: str
    num_running: int
    started_s: float


def pick_victim(instances: list[Candidate]) -> str | None:
    """Returns whom to stop: fewest running requests, then the youngest.

    Never the last of its failure domain while another choice exists.
    """
    if not instances:
        return None
    domains: dict[str, int] = {}
    for instance in instances:
        domains[instance.failure_domain] = domains.get(instance.failure_domain, 0) + 1
    shared = [i for i in instances if domains[i.failure_domain] > 1]
    return min(
        shared or instances, key=lambda i: (i.num_running, -i.started_s, i.instance_id)
    ).instance_id
