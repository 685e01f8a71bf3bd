"""Takes instances that fail out of rotation, and lets them back through one probe.

A client's error never counts: an instance that refuses a bad request is healthy (UR-47). Only what
the reason's row blames on the instance does.
Source: reliability-and-security.md, section 2, "Health".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class OutlierConfig:
    """When to eject, for how long, and how much of a pool at most."""

    consecutive_failures: int = 5
    window: int = 20  # outcomes that the error rate is taken over
    min_outcomes: int = 10
    max_failure_share: float = 0.5  # above it, while the peers are below `peer_share`: ejected
    peer_share: float = 0.2
    base_ejection_s: float = 5.0  # doubles with each round
    max_ejection_s: float = 300.0
    max_ejected_share: float = 1 / 3  # but one of two or more may always go
    ramp_limit: int = 64  # requests in flight at which a returning instance counts as closed


class State(StrEnum):
    """The breaker's words."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    RAMPING = "ramping"


@dataclass
class _Record:
    state: State = State.CLOSED
    num_consecutive: int = 0
    num_rounds: int = 0
    open_until_s: float = 0.0
    num_allowed: int = 0  # in flight at most, while half open or ramping
    num_in_flight: int = 0
    outcomes: deque[bool] = field(default_factory=deque)  # True: failed


class OutlierTable:
    """The breakers of one pool. The caller passes the time."""

    def __init__(self, config: OutlierConfig | None = None) -> None:
        self._config = config or OutlierConfig()
        self._records: dict[str, _Record] = {}

    def keep_only(self, instance_ids: Iterable[str]) -> None:
        """Forgets instances that are no longer members."""
        alive = set(instance_ids)
        self._records = {k: v for k, v in self._records.items() if k in alive}

    def add(self, instance_id: str) -> None:
        """Adds a member, closed. A new boot is a new member: the past is forgotten."""
        self._records[instance_id] = _Record()

    def state(self, instance_id: str) -> State:
        """Returns the breaker's state as of the last call."""
        record = self._records.get(instance_id)
        return record.state if record else State.CLOSED

    def allows(self, instance_id: str, now_s: float) -> bool:
        """Returns whether the instance may get one more request now."""
        record = self._records.get(instance_id)
        if record is None or record.state is State.CLOSED:
            return True
        if record.state is State.OPEN:
            if now_s < record.open_until_s:
                return False
            record.state, record.num_allowed, record.num_in_flight = State.HALF_OPEN, 1, 0
        return record.num_in_flight < record.num_allowed

    def on_pick(self, instance_id: str) -> None:
        """Notes that the instance got a request."""
        self._record(instance_id).num_in_flight += 1

    def on_success(self, instance_id: str) -> None:
        """Notes that a request went well."""
        record = self._outcome(instance_id, failed=False)
        record.num_consecutive = 0
        if record.state in (State.HALF_OPEN, State.RAMPING):
            record.state = State.RAMPING
            record.num_allowed *= 2
            if record.num_allowed >= self._config.ramp_limit:
                record.state, record.num_rounds = State.CLOSED, 0

    def on_release(self, instance_id: str) -> None:
        """Notes that a request ended and says nothing about the instance: a client's error."""
        record = self._record(instance_id)
        record.num_in_flight = max(0, record.num_in_flight - 1)

    def on_failure(self, instance_id: str, now_s: float) -> None:
        """Notes that a request failed through the instance's fault."""
        record = self._outcome(instance_id, failed=True)
        record.num_consecutive += 1
        if record.state in (State.HALF_OPEN, State.RAMPING):
            self._open(record, now_s)  # a probe that fails needs no further proof, nor room
        elif record.state is State.CLOSED and self._is_outlier(instance_id, record):
            ejected = sum(r.state is not State.CLOSED for r in self._records.values())
            pool = len(self._records)
            if ejected < max(1 if pool > 1 else 0, int(pool * self._config.max_ejected_share)):
                self._open(record, now_s)

    def _is_outlier(self, instance_id: str, record: _Record) -> bool:
        if record.num_consecutive >= self._config.consecutive_failures:
            return True
        if len(record.outcomes) < self._config.min_outcomes:
            return False
        share = sum(record.outcomes) / len(record.outcomes)
        peers = [r.outcomes for k, r in self._records.items() if k != instance_id]
        num_peer_outcomes = sum(len(outcomes) for outcomes in peers)
        num_peer_failures = sum(sum(outcomes) for outcomes in peers)
        return (
            share > self._config.max_failure_share
            and num_peer_outcomes >= self._config.min_outcomes
            and num_peer_failures / num_peer_outcomes < self._config.peer_share
        )

    def _open(self, record: _Record, now_s: float) -> None:
        ejection_s = self._config.base_ejection_s * 2**record.num_rounds
        record.open_until_s = now_s + min(self._config.max_ejection_s, ejection_s)
        record.num_rounds = min(record.num_rounds + 1, 30)
        record.state, record.num_consecutive = State.OPEN, 0
        record.outcomes.clear()

    def _outcome(self, instance_id: str, failed: bool) -> _Record:
        record = self._record(instance_id)
        record.num_in_flight = max(0, record.num_in_flight - 1)
        record.outcomes.append(failed)
        if len(record.outcomes) > self._config.window:
            record.outcomes.popleft()
        return record

    def _record(self, instance_id: str) -> _Record:
        return self._records.setdefault(instance_id, _Record())
