"""The life of an instance, as lists of events."""

import itertools

import pytest

from services.lb.autoscaler.lifecycle import (
    Action,
    Event,
    Instance,
    LifecycleConfig,
    State,
    on_event,
)

CONFIG = LifecycleConfig()


def live(events, state=State.READY):
    """Returns the states and actions after events of (second, event)."""
    instance = Instance("i1", "decode", state, 0.0)
    states, actions = [], []
    for now_s, event in events:
        instance, done = on_event(instance, event, now_s, 1, CONFIG)
        states.append(instance.state)
        actions += done
    return states, actions


def test_a_planned_life_from_reserve_to_reserve():
    states, actions = live(
        [
            (0, Event.START),
            (10, Event.REGISTERED),
            (90, Event.SERVING),
            (500, Event.DRAIN),
            (559, Event.TICK),
            (560, Event.TICK),
            (565, Event.EMPTY),
            (566, Event.LOST),
        ]
    )
    assert states == [
        State.STARTING,
        State.WARMING,
        State.ONLINE,
        State.DRAINING,
        State.DRAINING,
        State.HANDOFF,
        State.STOPPED,
        State.READY,
    ]
    assert actions == [
        Action.LAUNCH,
        Action.STOP_TRAFFIC,
        Action.MOVE_REQUESTS,
        Action.TERMINATE,
        Action.RELEASE,
    ]


def test_a_lost_card_restarts_the_instance_with_what_is_left():
    states, actions = live(
        [(0, Event.LOST), (1, Event.RESTART), (2, Event.LOST), (60, Event.SERVING)], State.ONLINE
    )
    assert states == [State.FAILED, State.RESIZING, State.STARTING, State.ONLINE]
    assert actions == [Action.ALARM, Action.COUNT_CARDS, Action.TERMINATE, Action.LAUNCH]


def test_too_few_cards_go_back_to_the_reserve():
    states, actions = live([(0, Event.LOST), (1, Event.GIVE_UP)], State.ONLINE)
    assert states[-1] is State.READY
    assert actions[-1] is Action.RELEASE


@pytest.mark.parametrize(("state", "limit_s"), [(State.STARTING, 600), (State.WARMING, 300)])
def test_a_start_that_takes_too_long_has_failed(state, limit_s):
    states, actions = live([(limit_s - 1, Event.TICK), (limit_s, Event.TICK)], state)
    assert states == [state, State.FAILED]
    assert Action.ALARM in actions


def test_a_handoff_that_takes_too_long_ends():
    states, actions = live([(29, Event.TICK), (30, Event.TICK)], State.HANDOFF)
    assert states == [State.HANDOFF, State.STOPPED]
    assert actions == [Action.TERMINATE]


def test_instances_on_their_way_count_so_that_nothing_starts_twice():
    counting = {s for s in State if Instance("i", "decode", s, 0.0).counts}
    assert counting == {State.STARTING, State.WARMING, State.ONLINE, State.RESIZING}


def test_a_plan_that_was_superseded_changes_nothing():
    instance = Instance("i1", "decode", State.ONLINE, 0.0, plan_number=7)
    assert on_event(instance, Event.DRAIN, 1.0, 6, CONFIG) == (instance, ())
    drained, _ = on_event(instance, Event.DRAIN, 1.0, 8, CONFIG)
    assert (drained.state, drained.plan_number) == (State.DRAINING, 8)


def test_every_event_is_repeatable_in_the_state_it_led_to():
    repeatable = (Event.START, Event.DRAIN, Event.EMPTY, Event.SERVING)
    for state, event in itertools.product(State, repeatable):
        instance = Instance("i1", "decode", state, 0.0)
        try:
            moved, _ = on_event(instance, event, 1.0, 1, CONFIG)
        except ValueError:
            continue
        again, actions = on_event(moved, event, 2.0, 1, CONFIG)
        assert (again.state, actions) == (moved.state, ())


def test_a_pair_that_cannot_happen_is_an_error():
    with pytest.raises(ValueError, match="cannot happen"):
        on_event(Instance("i1", "decode", State.ONLINE, 0.0), Event.RESTART, 0.0, 1, CONFIG)
