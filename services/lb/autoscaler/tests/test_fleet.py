"""Bringing a pool to its count, against a membership that changes."""

from services.lb.autoscaler.fleet import Fleet, FleetMember
from services.lb.autoscaler.lifecycle import Action, LifecycleConfig, State


class Bench:
    def __init__(self):
        self.fleet = Fleet("decode", LifecycleConfig())
        self.members = {}
        self.now_s = 0.0

    def member(self, name, state="ready", domain="zone-1", running=0):
        self.members[name] = FleetMember(name, state, domain, running)

    def look(self, desired, plan_number=1, seconds=5.0):
        self.now_s += seconds
        return self.fleet.reconcile(self.members.values(), desired, plan_number, self.now_s)

    def states(self):
        return {k: i.state for k, i in self.fleet.instances.items()}


def actions(steps):
    return [step.action for step in steps]


def test_members_that_serve_are_taken_over_and_nothing_is_done():
    bench = Bench()
    bench.member("d1")
    bench.member("d2", "starting")
    assert bench.look(desired=2) == []
    assert bench.states() == {"d1": State.ONLINE, "d2": State.WARMING}


def test_missing_instances_are_launched_once_and_adopted_when_they_register():
    bench = Bench()
    bench.member("d1")
    steps = bench.look(desired=3, plan_number=7)
    assert actions(steps) == [Action.LAUNCH, Action.LAUNCH]
    assert {step.plan_number for step in steps} == {7}
    assert bench.look(desired=3, plan_number=7) == []  # no double start
    bench.member("d2", "starting")
    bench.member("d3", "ready")
    assert bench.look(desired=3, plan_number=7) == []
    assert bench.states() == {"d1": State.ONLINE, "d2": State.WARMING, "d3": State.ONLINE}


def test_a_surplus_is_drained_idle_ones_first_and_then_moved_in_one_batch():
    bench = Bench()
    bench.member("d1", running=9)
    bench.member("d2", running=1)
    bench.member("d3", running=5)
    bench.look(desired=3)
    (step,) = bench.look(desired=2, plan_number=2)
    assert (step.instance_id, step.action) == ("d2", Action.STOP_TRAFFIC)
    assert bench.look(desired=2, plan_number=2, seconds=59.0) == []
    (step,) = bench.look(desired=2, plan_number=2, seconds=1.0)
    assert step.action is Action.MOVE_REQUESTS
    (step,) = bench.look(desired=2, plan_number=2, seconds=30.0)
    assert step.action is Action.TERMINATE
    del bench.members["d2"]
    assert actions(bench.look(desired=2, plan_number=2)) == [Action.RELEASE]
    assert set(bench.states()) == {"d1", "d3"}


def test_a_lost_instance_alarms_and_is_replaced_when_it_is_given_up():
    bench = Bench()
    bench.member("d1")
    bench.member("d2")
    bench.look(desired=2)
    del bench.members["d2"]
    steps = bench.look(desired=2)
    assert actions(steps) == [Action.ALARM, Action.COUNT_CARDS, Action.LAUNCH]
    assert actions(bench.fleet.failed("d2", False, bench.now_s)) == [Action.RELEASE]
    assert bench.look(desired=2) == []
    assert len(bench.states()) == 2


def test_a_lost_instance_restarts_with_the_cards_that_are_left():
    bench = Bench()
    bench.member("d1")
    bench.look(desired=1)
    del bench.members["d1"]
    bench.look(desired=0)
    assert actions(bench.fleet.failed("d1", True, bench.now_s)) == [Action.TERMINATE]
    assert actions(bench.look(desired=1)) == [Action.LAUNCH]
    assert bench.look(desired=1) == []
    bench.member("d1-again")
    assert bench.look(desired=1) == []
    assert bench.states() == {"d1-again": State.ONLINE}


def test_what_does_not_serve_yet_is_the_first_to_go():
    bench = Bench()
    bench.member("d1")
    bench.look(desired=2)
    (step,) = bench.look(desired=1, plan_number=2)
    assert step.action is Action.TERMINATE
    assert bench.states() == {"d1": State.ONLINE}


def test_a_new_leader_continues_from_what_was_written():
    bench = Bench()
    bench.member("d1")
    bench.member("d2")
    bench.look(desired=2)
    bench.look(desired=1, plan_number=4)
    written = bench.fleet.to_documents()
    other = Bench()
    other.members = bench.members
    other.fleet.restore({**written, "broken": b"{"}, 0.0)
    assert other.look(desired=1, plan_number=4) == []
    assert sorted(other.states().values()) == [State.DRAINING, State.ONLINE]


def test_an_instance_that_somebody_else_drains_is_replaced():
    bench = Bench()
    bench.member("d1")
    bench.look(desired=1)
    bench.member("d1", "draining")
    assert actions(bench.look(desired=1)) == [Action.LAUNCH]
