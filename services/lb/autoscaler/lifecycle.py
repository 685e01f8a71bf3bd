"""The life of an instance for the autoscaler: a table of (state, event) -> (state, actions).

    READY -> STARTING -> WARMING -> ONLINE -> DRAINING -> HANDOFF -> STOPPED -> READY
    any   -> FAILED -> RESIZING -> STARTING

Source: kvcache-and-balancing.md, section 16.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where an instance is. READY machines belong to the pool's reserve."""

    READY = "ready"
    STARTING = "starting"
    WARMING = "warming"
    ONLINE = "online"
    DRAINING = "draining"
    HANDOFF = "handoff"
    STOPPED = "stopped"
    FAILED = "failed"
    RESIZING = "resizing"


class Event(StrEnum):
    """What happens to an instance."""

    START = "start"  # a plan wants it
    REGISTERED = "registered"  # its process is a member, not ready yet
    SERVING = "serving"  # its membership says ready
    DRAIN = "drain"  # a plan wants it gone
    EMPTY = "empty"  # nothing runs on it any more
    LOST = "lost"  # its membership ended, or a card failed
    RESTART = "restart"  # healthy cards are left to start with
    GIVE_UP = "give_up"  # too few cards are left: they go back to the reserve
    TICK = "tick"


class Action(StrEnum):
    """What must be done."""

    LAUNCH = "launch"
    STOP_TRAFFIC = "stop_traffic"
    MOVE_REQUESTS = "move_requests"  # all unfinished ones, with their KV, in one batch
    TERMINATE = "terminate"
    RELEASE = "release"  # the machine, or its healthy cards, return to the reserve
    COUNT_CARDS = "count_cards"
    ALARM = "alarm"


@dataclass(frozen=True)
class LifecycleConfig:
    """Time limits of the states."""

    starting_s: float = 600.0
    warming_s: float = 300.0
    grace_s: float = 60.0
    handoff_s: float = 30.0


@dataclass(frozen=True)
class Instance:
    """One instance. Every transition carries the number of the plan that asked for it."""

    instance_id: str
    pool: str
    state: State
    since_s: float
    plan_number: int = 0

    @property
    def counts(self) -> bool:
        """Returns whether it counts as capacity that exists or is on its way."""
        return self.state in (State.STARTING, State.WARMING, State.ONLINE, State.RESIZING)


_NEXT: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (State.READY, Event.START): (State.STARTING, (Action.LAUNCH,)),
    (State.STARTING, Event.REGISTERED): (State.WARMING, ()),
    (State.STARTING, Event.SERVING): (State.ONLINE, ()),
    (State.WARMING, Event.SERVING): (State.ONLINE, ()),
    (State.ONLINE, Event.DRAIN): (State.DRAINING, (Action.STOP_TRAFFIC,)),
    (State.STARTING, Event.DRAIN): (State.STOPPED, (Action.TERMINATE,)),
    (State.WARMING, Event.DRAIN): (State.STOPPED, (Action.TERMINATE,)),
    (State.DRAINING, Event.EMPTY): (State.STOPPED, (Action.TERMINATE,)),
    (State.HANDOFF, Event.EMPTY): (State.STOPPED, (Action.TERMINATE,)),
    # Whoever drains was asked to go: that it is gone is what was wanted.
    (State.DRAINING, Event.LOST): (State.STOPPED, ()),
    (State.HANDOFF, Event.LOST): (State.STOPPED, ()),
    (State.STOPPED, Event.LOST): (State.READY, (Action.RELEASE,)),
    (State.STARTING, Event.LOST): (State.FAILED, (Action.ALARM, Action.COUNT_CARDS)),
    (State.WARMING, Event.LOST): (State.FAILED, (Action.ALARM, Action.COUNT_CARDS)),
    (State.ONLINE, Event.LOST): (State.FAILED, (Action.ALARM, Action.COUNT_CARDS)),
    (State.FAILED, Event.RESTART): (State.RESIZING, (Action.TERMINATE,)),
    (State.RESIZING, Event.LOST): (State.STARTING, (Action.LAUNCH,)),
    (State.FAILED, Event.GIVE_UP): (State.READY, (Action.RELEASE,)),
}

# Events that say again what is known, or come too late to matter.
_IGNORED: dict[State, frozenset[Event]] = {
    State.READY: frozenset({Event.LOST, Event.DRAIN, Event.EMPTY}),
    State.STARTING: frozenset({Event.START, Event.EMPTY}),
    State.WARMING: frozenset({Event.START, Event.REGISTERED, Event.EMPTY}),
    State.ONLINE: frozenset({Event.START, Event.REGISTERED, Event.SERVING, Event.EMPTY}),
    State.DRAINING: frozenset({Event.DRAIN, Event.REGISTERED, Event.SERVING}),
    State.HANDOFF: frozenset({Event.DRAIN, Event.REGISTERED, Event.SERVING}),
    State.STOPPED: frozenset({Event.DRAIN, Event.EMPTY, Event.REGISTERED, Event.SERVING}),
    State.FAILED: frozenset({Event.LOST, Event.EMPTY, Event.REGISTERED, Event.SERVING}),
    State.RESIZING: frozenset({Event.RESTART, Event.EMPTY, Event.REGISTERED, Event.SERVING}),
}


def on_event(
    instance: Instance, event: Event, now_s: float, plan_number: int, config: LifecycleConfig
) -> tuple[Instance, tuple[Action, ...]]:
    """Returns the instance after the event, and what must be done.

    An event of an older plan than the instance's own changes nothing.
    Raises: ValueError for a pair that cannot happen.
    """
    if plan_number < instance.plan_number:
        return instance, ()
    if event is Event.TICK:
        return _on_tick(instance, now_s, config)
    step = _NEXT.get((instance.state, event))
    if step is None:
        if event in _IGNORED[instance.state]:
            return instance, ()
        raise ValueError(f"{event} cannot happen to an instance that is {instance.state}")
    state, actions = step
    return _moved(instance, state, now_s, plan_number), actions


def _on_tick(
    instance: Instance, now_s: float, config: LifecycleConfig
) -> tuple[Instance, tuple[Action, ...]]:
    age_s = now_s - instance.since_s
    limits = {
        State.STARTING: (config.starting_s, State.FAILED, (Action.ALARM, Action.COUNT_CARDS)),
        State.WARMING: (config.warming_s, State.FAILED, (Action.ALARM, Action.COUNT_CARDS)),
        State.DRAINING: (config.grace_s, State.HANDOFF, (Action.MOVE_REQUESTS,)),
        State.HANDOFF: (config.handoff_s, State.STOPPED, (Action.TERMINATE,)),
    }
    if instance.state not in limits:
        return instance, ()
    limit_s, state, actions = limits[instance.state]
    if age_s < limit_s:
        return instance, ()
    return _moved(instance, state, now_s, instance.plan_number), actions


def _moved(instance: Instance, state: State, now_s: float, plan_number: int) -> Instance:
    return dataclasses.replace(instance, state=state, since_s=now_s, plan_number=plan_number)
