import random

import pytest

from services.decode.drain import (
    Drain,
    EndResumable,
    Export,
    ExportFailed,
    Flush,
    Gone,
    Phase,
    SetNotReady,
    Started,
    State,
    Stopped,
    Tick,
    UnexpectedEvent,
    on_event,
)


def run(events, state=None):
    """Feeds (time, event) pairs; returns the final state and the actions of each."""
    state = state or State()
    out = []
    for now_s, event in events:
        state, actions = on_event(state, event, now_s)
        out.append(actions)
    return state, out


def test_a_drain_waits_out_its_grace_then_moves_what_is_left():
    state, actions = run(
        [
            (0, Started("a")),
            (0, Started("b")),
            (1, Drain(grace_s=60, hard_s=30)),
            (5, Started("late")),  # its reservation is committed within the grace
            (10, Gone("a")),
            (60, Tick()),
            (61, Tick()),
            (62, Gone("b")),
            (63, Gone("late")),
        ]
    )
    assert actions[2] == [SetNotReady()]
    assert actions[5] == []
    assert actions[6] == [Flush(), Export("b"), Export("late")]
    assert actions[8] == [Stopped()]
    assert state.phase is Phase.STOPPED


def test_a_request_without_a_target_ends_resumable_at_the_hard_deadline():
    state, actions = run(
        [
            (0, Started("a")),
            (0, Started("b")),
            (0, Drain(grace_s=0, hard_s=30)),
            (1, ExportFailed("a")),
            (31, Tick()),
            (31, Gone("a")),
            (31, Gone("b")),
        ]
    )
    assert actions[2] == [SetNotReady(), Flush(), Export("a"), Export("b")]
    assert actions[3] == [EndResumable("a")]
    assert actions[4] == [EndResumable("b")]
    assert state.phase is Phase.STOPPED


def test_without_migration_everything_is_handed_back_as_resumable():
    _, actions = run([(0, Started("a")), (0, Drain(grace_s=0, migrate=False))])
    assert actions[1] == [SetNotReady(), Flush(), EndResumable("a")]


def test_an_idle_instance_without_grace_stops_at_once():
    state, actions = run([(0, Drain(grace_s=0))])
    assert actions[0] == [SetNotReady(), Stopped()]
    assert state.phase is Phase.STOPPED


def test_a_second_drain_changes_nothing():
    state, _ = run([(0, Started("a")), (0, Drain(grace_s=60))])
    again, actions = on_event(state, Drain(grace_s=5), 2)
    assert (again, actions) == (state, [])


def test_what_may_enter_at_each_phase():
    state = State()
    assert state.accepts_reservations
    state, _ = on_event(state, Started("a"), 0)
    state, _ = on_event(state, Drain(grace_s=10), 0)
    assert not state.accepts_reservations
    assert state.accepts_commits
    state, _ = on_event(state, Tick(), 10)
    assert state.phase is Phase.FORWARDING
    assert not state.accepts_commits
    with pytest.raises(UnexpectedEvent):
        on_event(state, Started("b"), 11)


@pytest.mark.parametrize("seed", range(30))
def test_t20_under_random_events_every_request_is_moved_resumed_or_finished(seed):
    rng = random.Random(seed)
    state, now_s = State(), 0.0
    alive, moving, ended = set(), set(), {}

    def apply(event):
        nonlocal state
        state, actions = on_event(state, event, now_s)
        for action in actions:
            if isinstance(action, Export):
                moving.add(action.key)
            elif isinstance(action, EndResumable):
                moving.discard(action.key)
                end(action.key, "resumed")

    def end(key, how):
        assert key not in ended, "two ends for one request"
        alive.discard(key)
        ended[key] = how
        apply(Gone(key))

    for index in range(rng.randint(1, 12)):
        alive.add(str(index))
        apply(Started(str(index)))
    drained = rng.random() < 0.9
    if drained:
        apply(Drain(grace_s=rng.choice([0, 5, 60]), hard_s=rng.choice([1, 30])))
    while state.phase is not Phase.STOPPED and now_s < 200:
        now_s += rng.random() * 5
        choice = rng.random()
        if moving and choice < 0.3:
            key = rng.choice(sorted(moving))
            moving.discard(key)
            if rng.random() < 0.5:
                end(key, "moved")
            else:
                apply(ExportFailed(key))
        elif alive - moving and choice < 0.5:
            end(rng.choice(sorted(alive - moving)), "finished")
        else:
            apply(Tick())
    if drained:
        assert state.phase is Phase.STOPPED
        assert not alive
        assert not state.running
