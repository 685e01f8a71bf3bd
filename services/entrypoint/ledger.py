"""Exactly one outcome per accepted request, and what can be explained about it afterwards.

Source: reliability-and-security.md, P-01, P-40; UR-19.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import Failure, Reason


class Outcome(enum.Enum):
    """How an accepted request ended; the label of the counter."""

    OK = "ok"
    CLIENT_CANCEL = "client_cancel"
    DEADLINE = "deadline"
    SHED = "shed"
    QUOTA = "quota"
    INVALID = "invalid"
    BACKEND_LOST = "backend_lost"
    INTERNAL = "internal"


def outcome_of(failure: Failure) -> Outcome:
    """Returns the label of a failure."""
    return _OUTCOMES.get(failure.reason.shown_as, Outcome.INVALID)


_OUTCOMES = {
    Reason.QUOTA: Outcome.QUOTA,
    Reason.OVERLOADED: Outcome.SHED,
    Reason.QUEUE_TIMEOUT: Outcome.SHED,
    Reason.DRAINING: Outcome.SHED,
    Reason.NO_INSTANCE: Outcome.BACKEND_LOST,
    Reason.BACKEND_LOST: Outcome.BACKEND_LOST,
    Reason.DEADLINE: Outcome.DEADLINE,
    Reason.CLIENT_CANCELLED: Outcome.CLIENT_CANCEL,
    Reason.INTERNAL: Outcome.INTERNAL,
}


@dataclass
class Entry:
    """What is known of one request. `outcome` is set once, by `Ledger.close`."""

    request_id: str
    tenant: str
    api: str
    started_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    replayed_tokens: int = 0
    ended_by: str = ""
    attempts: int = 0
    stages: list[tuple[str, float]] = field(default_factory=list)
    instances: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    first_token_s: float | None = None

    def reached(self, stage: str, now_s: float) -> None:
        """Notes when a stage was reached; at most 64 are kept."""
        if len(self.stages) < 64:
            self.stages.append((stage, 1000 * (now_s - self.started_s)))


class Ledger:
    """All requests in flight, and the last `max_kept` that ended."""

    def __init__(
        self, max_kept: int, on_close: Callable[[Entry, Outcome], None] | None = None
    ) -> None:
        self._max_kept = max_kept
        self._on_close = on_close
        self._open: dict[str, Entry] = {}
        self._kept: OrderedDict[str, Entry] = OrderedDict()
        self.num_accepted = 0
        self.num_outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)

    @property
    def num_open(self) -> int:
        """Returns the requests in flight; a row of the census."""
        return len(self._open)

    @property
    def num_kept(self) -> int:
        """Returns how many ended requests can be explained."""
        return len(self._kept)

    def has(self, request_id: str) -> bool:
        """Returns whether a request with this id is in flight."""
        return request_id in self._open

    def open(self, entry: Entry) -> Entry:
        """Accepts a request. Raises Failure(CONFLICT) when its id is in flight already."""
        if entry.request_id in self._open:
            raise Failure(Reason.CONFLICT, "a request with this id is in progress")
        self._open[entry.request_id] = entry
        self.num_accepted += 1
        return entry

    def close(self, entry: Entry, outcome: Outcome) -> None:
        """Ends a request. A second close is our mistake."""
        assert entry.outcome is None, "a request ends once"
        entry.outcome = outcome
        self._open.pop(entry.request_id, None)
        self.num_outcomes[outcome] += 1
        self._kept.pop(entry.request_id, None)
        self._kept[entry.request_id] = entry
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
        if self._on_close is not None:
            self._on_close(entry, outcome)

    def explain(self, request_id: str, tenant: str) -> Entry:
        """Returns what is known. Raises Failure(NOT_FOUND), also for another tenant's request."""
        entry = self._open.get(request_id) or self._kept.get(request_id)
        if entry is None or entry.tenant != tenant:
            raise Failure(Reason.NOT_FOUND, "no such request is known here")
        return entry
