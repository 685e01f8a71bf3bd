"""Who may decide, while etcd is there and while it is away."""

import asyncio

import pytest

from services.common.clock import VirtualClock
from services.common.errors import Failure, Reason
from services.common.membership import Leader
from services.lb.leadership import Leadership


class StubElection:
    def __init__(self):
        self.term = 0
        self.callbacks = []

    @property
    def is_leader(self):
        return self.term > 0

    def subscribe(self, callback):
        self.callbacks.append(callback)

    def set(self, term):
        self.term = term
        for callback in self.callbacks:
            callback(bool(term))


class StubView:
    def __init__(self):
        self.is_healthy = True
        self.known = None
        self.callbacks = []

    def leader(self, service):
        return self.known

    def subscribe(self, callback):
        self.callbacks.append(callback)

    def set(self, healthy=True, leader=None):
        self.is_healthy = healthy
        if leader is not None:
            self.known = Leader("decode-lb", leader[0], f"{leader[0]}:1", leader[1])
        for callback in self.callbacks:
            callback()


@pytest.fixture
def bench():
    class Bench:
        def __init__(self):
            self.election, self.view, self.log = StubElection(), StubView(), []
            self.clock = VirtualClock()
            self.leadership = Leadership(
                self.election,
                self.view,
                "decode-lb",
                "me",
                lambda term: self.log.append(term),
                lambda: self.log.append("end"),
                self.clock,
            )

    return Bench()


def test_a_standby_names_the_leader(bench):
    bench.view.set(leader=("other", 3))
    with pytest.raises(Failure) as refused:
        bench.leadership.require()
    assert refused.value.reason is Reason.NO_INSTANCE
    assert refused.value.metadata["leader"] == "other:1"


def test_deciding_begins_with_the_election_and_ends_with_it(bench):
    bench.election.set(5)
    bench.view.set(leader=("me", 5))
    assert bench.leadership.require() == 5
    bench.election.set(0)
    assert bench.leadership.term == 0
    assert bench.log == [5, "end"]


def test_p_21_while_the_store_is_away_the_last_leader_goes_on(bench):
    bench.election.set(5)
    bench.view.set(leader=("me", 5))
    bench.view.set(healthy=False)
    bench.election.set(0)  # its lease has run out: nobody else can have won
    assert bench.leadership.require() == 5
    assert bench.log == [5]
    # The store is back, and the same one wins again: nothing was forgotten.
    bench.election.set(9)
    bench.view.set(healthy=True, leader=("me", 9))
    assert bench.leadership.require() == 9
    assert bench.log == [5]


def test_p_22_after_an_outage_another_leader_ends_ours(bench):
    bench.election.set(5)
    bench.view.set(leader=("me", 5))
    bench.view.set(healthy=False)
    bench.election.set(0)
    bench.view.set(healthy=True, leader=("other", 9))
    assert bench.leadership.term == 0
    assert bench.log == [5, "end"]


def test_a_newer_leader_in_the_view_ends_ours_before_our_lease_does(bench):
    bench.election.set(5)
    bench.view.set(leader=("me", 5))
    bench.view.set(leader=("other", 8))
    assert bench.election.is_leader
    assert bench.leadership.term == 0
    assert bench.log == [5, "end"]


async def test_p_22_a_leader_that_was_frozen_does_not_go_on_when_the_store_seems_away(bench):
    bench.election.set(5)
    bench.view.set(leader=("me", 5))
    bench.view.set(healthy=False)
    task = asyncio.create_task(bench.leadership.run())
    await bench.clock.advance(10.0)
    bench.election.set(0)
    assert bench.leadership.term == 5  # awake all the time
    task.cancel()
    await bench.clock.advance(3.1)  # its loops stand still
    assert bench.leadership.term == 0
    bench.leadership.reconcile()
    assert bench.log == [5, "end"]
