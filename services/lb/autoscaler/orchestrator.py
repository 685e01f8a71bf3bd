"""Who really starts and stops instances: the interface, and one that only takes notes.

A cluster's operator implements `Orchestrator`, or watches the keys `as/<pool>/desired` and
`as/<pool>/inst/<id>` and acts on them. Both see the term and must refuse an older one (P-22).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from services.common.election import TermGuard
from services.lb.autoscaler.fleet import Step

log = logging.getLogger(__name__)


class Orchestrator(Protocol):
    """The platform under the cluster. Every call is idempotent per (pool, plan number)."""

    async def scale(self, pool: str, count: int, plan_number: int, term: int) -> None:
        """Takes a pool's new count. Raises Failure(STALE_EPOCH) for an old term."""
        ...

    async def carry_out(self, pool: str, step: Step, term: int) -> None:
        """Does one step to one instance. Raises Failure(STALE_EPOCH) for an old term."""
        ...

    async def can_restart(self, pool: str, instance_id: str) -> bool:
        """Returns whether enough healthy cards are left to start a failed instance again."""
        ...


@dataclass(frozen=True)
class Note:
    """One call of a RecordingOrchestrator."""

    pool: str
    what: str
    plan_number: int
    term: int


class RecordingOrchestrator:
    """Writes down what it is told and does nothing: the local stack has a launcher of its own."""

    def __init__(self, max_notes: int = 1_000) -> None:
        self.notes: deque[Note] = deque(maxlen=max_notes)
        self._guard = TermGuard()

    async def scale(self, pool: str, count: int, plan_number: int, term: int) -> None:
        """Notes a pool's new count."""
        self._note(pool, f"scale to {count}", plan_number, term)

    async def carry_out(self, pool: str, step: Step, term: int) -> None:
        """Notes one step."""
        what = f"{step.action.value} {step.instance_id}"
        self._note(pool, what, step.plan_number, term)

    async def can_restart(self, pool: str, instance_id: str) -> bool:
        """Knows of no cards: a lost instance is given up and replaced."""
        return False

    def _note(self, pool: str, what: str, plan_number: int, term: int) -> None:
        self._guard.accept(term)
        self.notes.append(Note(pool, what, plan_number, term))
        log.info("plan", extra={"pool": pool, "plan": what, "plan_number": plan_number})
