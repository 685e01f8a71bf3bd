"""Whether a request runs again after a failure. Pure.

The entrypoint chose to run the request, so it alone runs it again: on another engine, with the
output delivered so far appended to the prompt, at most `max_attempts` times. A budget keeps
retries from multiplying: each *incident* costs one unit. The loss of one instance with fifty
streams is one incident, a backend that fails every request is one each.
Source: reliability-and-security.md, P-02, P-03, P-11 and section 2; engine.md, section 7.6.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from services.common.errors import Failure, Reason

_MAX_REMEMBERED_INCIDENTS: Final = 1024
# Failures that another run may not have: the engine's, or its way to us.
_RESUMABLE: Final = frozenset(
    {
        Reason.BACKEND_LOST,
        Reason.DRAINING,
        Reason.ENGINE_FULL,
        Reason.NO_INSTANCE,
        Reason.NOT_FOUND,  # the engine does not know the request (any more)
        Reason.CONFLICT,
        Reason.BLOCK_CORRUPT,
        Reason.STALE_EPOCH,
        Reason.HANDOFF_MISMATCH,
        Reason.LAYOUT_MISMATCH,
        Reason.WRONG_ROLE,
        Reason.INTERNAL,
    }
)


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how fast."""

    max_attempts: int = 3
    first_wait_s: float = 0.05
    max_wait_s: float = 2.0
    budget_ratio: float = 0.1  # incidents paid for per accepted request
    budget_floor: float = 10.0  # what a process starts with and never exceeds when idle


class RetryBudget:
    """Counts what may still be spent; filled by requests, spent by incidents."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._level = policy.budget_floor
        self._order: deque[str] = deque()
        self._paid: set[str] = set()

    @property
    def level(self) -> float:
        """Returns how many incidents can be paid for now."""
        return self._level

    def on_request(self) -> None:
        """Earns the share of one accepted request."""
        limit = max(self._policy.budget_floor, 100.0)
        self._level = min(limit, self._level + self._policy.budget_ratio)

    def pay(self, incident: str) -> bool:
        """Returns whether a run again is paid for; an incident that was paid is free."""
        if incident in self._paid:
            return True
        if self._level < 1.0:
            return False
        self._level -= 1.0
        self._paid.add(incident)
        self._order.append(incident)
        if len(self._order) > _MAX_REMEMBERED_INCIDENTS:
            self._paid.discard(self._order.popleft())
        return True


@dataclass(frozen=True)
class RunAgain:
    """Run once more, after waiting."""

    wait_s: float


@dataclass(frozen=True)
class GiveUp:
    """Report this failure."""

    failure: Failure


def decide(
    failure: Failure,
    *,
    attempt: int,
    incident: str,
    remaining_s: float,
    policy: RetryPolicy,
    budget: RetryBudget,
    rng: random.Random,
) -> RunAgain | GiveUp:
    """Returns what to do after attempt number `attempt` (1 is the first) has failed."""
    if failure.reason not in _RESUMABLE:
        return GiveUp(failure)
    if failure.reason is Reason.INTERNAL and attempt > 1:
        return GiveUp(failure)  # a bug is tried once more, not thrice
    if attempt >= policy.max_attempts:
        return GiveUp(_as_final(failure))
    if not budget.pay(incident):
        return GiveUp(_as_final(failure))
    ceiling_s = min(policy.max_wait_s, policy.first_wait_s * 2 ** (attempt - 1))
    # The first run again after a lost engine is at once: waiting cannot help, others are there.
    wait_s = 0.0 if attempt == 1 and failure.reason is Reason.BACKEND_LOST else 1.0
    wait_s = max(failure.retry_after_s or 0.0, wait_s * rng.uniform(0.0, ceiling_s))
    if wait_s >= remaining_s:
        return GiveUp(Failure(Reason.DEADLINE, "the deadline leaves no time to try again"))
    return RunAgain(wait_s)


def _as_final(failure: Failure) -> Failure:
    if failure.reason is Reason.NOT_FOUND:
        # Not a model or response that is missing: an engine that forgot the request.
        return Failure(Reason.BACKEND_LOST, "the engine lost the request", failure.metadata)
    return failure
