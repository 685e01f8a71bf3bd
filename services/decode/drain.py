"""Drain of a decode instance: serve on, then forward what is left, then stop.

    SERVING --drain--> DRAINING --grace over--> FORWARDING --all gone or hard deadline--> STOPPED

Events and the time go in, actions come out; the shell carries them out. An unlisted pair of state
and event raises `UnexpectedEvent`: an error in tests, logged and ignored in production.
Source: engine.md, section 2.8; reliability-and-security.md, section 2 ("Drain").
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace


class Phase(enum.Enum):
    SERVING = "serving"
    DRAINING = "draining"
    FORWARDING = "forwarding"
    STOPPED = "stopped"


class UnexpectedEvent(ValueError):
    """A pair of state and event that the table does not list."""


# Events.
@dataclass(frozen=True)
class Drain:
    grace_s: float = 60.0
    hard_s: float = 30.0
    migrate: bool = True  # False: everything left is handed back as resumable


@dataclass(frozen=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True)
class Started:
    """A request began to run: a reservation was committed."""

    key: str


@dataclass(frozen=True)
class Gone:
    """A request ended here: finished, aborted, or moved to another engine."""

    key: str


@dataclass(frozen=True)
class ExportFailed:
    """No target took the request, or the move broke."""

    key: str


Event = Drain | Tick | Started | Gone | ExportFailed


# Actions.
@dataclass(frozen=True)
class SetNotReady:
    """Health, load report and registration say so at once; new reservations are refused."""


@dataclass(frozen=True)
class Flush:
    """Stop scheduling and post-process everything in flight, so that CPU and device agree."""


@dataclass(frozen=True)
class Export:
    key: str


@dataclass(frozen=True)
class EndResumable:
    """End the request as PREEMPTED_RESUMABLE: its caller goes through prefill again."""

    key: str


@dataclass(frozen=True)
class Stopped:
    """Nothing runs here any more."""


Action = SetNotReady | Flush | Export | EndResumable | Stopped


@dataclass(frozen=True)
class State:
    phase: Phase = Phase.SERVING
    running: frozenset[str] = frozenset()
    grace_until_s: float = 0.0
    hard_s: float = 0.0
    hard_until_s: float = 0.0
    migrate: bool = True
    exporting: frozenset[str] = field(default_factory=frozenset)

    @property
    def accepts_reservations(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def accepts_commits(self) -> bool:
        """Reservations that are committed within the grace are honoured."""
        return self.phase in (Phase.SERVING, Phase.DRAINING)


def on_event(state: State, event: Event, now_s: float) -> tuple[State, list[Action]]:
    """Returns the next state and what the shell must do."""
    match state.phase, event:
        case Phase.SERVING, Drain():
            entered = replace(
                state,
                phase=Phase.DRAINING,
                grace_until_s=now_s + event.grace_s,
                hard_s=event.hard_s,
                migrate=event.migrate,
            )
            after, actions = _advance(entered, now_s)
            return after, [SetNotReady(), *actions]
        case ((Phase.DRAINING | Phase.FORWARDING | Phase.STOPPED), Drain()):
            return state, []  # idempotent; a second SIGTERM changes nothing
        case ((Phase.SERVING | Phase.DRAINING), Started()):
            return replace(state, running=state.running | {event.key}), []
        case _, Gone():
            left = replace(
                state,
                running=state.running - {event.key},
                exporting=state.exporting - {event.key},
            )
            return _advance(left, now_s)
        case Phase.FORWARDING, ExportFailed():
            if event.key not in state.exporting:
                return state, []
            return replace(state, exporting=state.exporting - {event.key}), [
                EndResumable(event.key)
            ]
        case _, Tick():
            return _advance(state, now_s)
    raise UnexpectedEvent(f"{type(event).__name__} in {state.phase.value}")


def _advance(state: State, now_s: float) -> tuple[State, list[Action]]:
    if state.phase is Phase.DRAINING:
        if not state.running and now_s < state.grace_until_s:
            # Reservations may still be committed until the grace ends; leave early only if the
            # shell says there are none, by a drain with no grace.
            return state, []
        if not state.running:
            return replace(state, phase=Phase.STOPPED), [Stopped()]
        if now_s >= state.grace_until_s:
            keys = sorted(state.running)
            forwarding = replace(
                state,
                phase=Phase.FORWARDING,
                hard_until_s=now_s + state.hard_s,
                exporting=state.running if state.migrate else frozenset(),
            )
            move: list[Action] = [
                Export(key) if state.migrate else EndResumable(key) for key in keys
            ]
            return forwarding, [Flush(), *move]
        return state, []
    if state.phase is Phase.FORWARDING:
        if not state.running:
            return replace(state, phase=Phase.STOPPED), [Stopped()]
        if now_s >= state.hard_until_s:
            late: list[Action] = [EndResumable(key) for key in sorted(state.exporting)]
            return replace(state, exporting=frozenset()), late
    return state, []
