"""Leadership: one at a time, fenced by its term."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.clock import VirtualClock
from services.common.election import LEASE_TTL_S, Election, TermGuard
from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.membership import ClusterView
from services.common.store import Compare, Put, StoreUnavailable
from services.common.store_memory import MemoryStore

KEYS = Keys("test")


class Candidate:
    """An election and its task, which can be paused like a stopped process."""

    def __init__(self, store: MemoryStore, clock: VirtualClock, name: str) -> None:
        self.clock = clock
        self.store = store
        self.election = Election(
            store, KEYS, "decode-lb", name, f"{name}:1", clock=clock, rng=random.Random(name)
        )
        self.task = asyncio.ensure_future(self.election.run())

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def candidates(
    count: int,
) -> AsyncIterator[tuple[VirtualClock, MemoryStore, list[Candidate]]]:
    clock = VirtualClock()
    store = MemoryStore(clock)
    found = [Candidate(store, clock, f"lb-{i}") for i in range(count)]
    await clock.advance(1)
    yield clock, store, found
    for candidate in found:
        await candidate.kill()
    await store.close()


def leaders(found: list[Candidate]) -> list[Candidate]:
    return [candidate for candidate in found if candidate.election.is_leader]


async def test_one_candidate_leads_and_the_view_names_it() -> None:
    async with candidates(3) as (clock, store, found):
        assert len(leaders(found)) == 1
        view = ClusterView(store, KEYS, clock=clock)
        task = asyncio.ensure_future(view.run())
        await clock.advance(1)
        leader = view.leader("decode-lb")
        assert leader is not None
        assert leader.term == leaders(found)[0].election.term > 0
        assert leader.address == f"{leader.instance_id}:1"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_leadership_lasts_as_long_as_the_leader() -> None:
    async with candidates(2) as (clock, _, found):
        first = leaders(found)[0]
        term = first.election.term
        for _ in range(200):
            await clock.advance(1)
            assert leaders(found) == [first]
        assert first.election.term == term


async def test_a_killed_leader_is_replaced_under_a_higher_term_within_12_s() -> None:
    async with candidates(3) as (clock, _, found):
        first = leaders(found)[0]
        term = first.election.term
        await first.kill()
        killed_s = clock.now_s()
        rest = [candidate for candidate in found if candidate is not first]
        while not leaders(rest):
            await clock.advance(0.1)
            assert clock.now_s() - killed_s < 12
        assert leaders(rest)[0].election.term > term


async def test_a_leader_that_resigns_is_replaced_at_once() -> None:
    async with candidates(2) as (clock, _, found):
        first = leaders(found)[0]
        await first.kill()
        await first.election.resign()
        assert not first.election.is_leader
        await clock.advance(0.5)
        assert leaders(found) == [candidate for candidate in found if candidate is not first]


async def test_p_22_a_leader_cut_off_stops_a_second_before_its_lease_can_end() -> None:
    async with candidates(1) as (clock, store, found):
        election = found[0].election

        async def cut_off(_: int) -> float:
            raise StoreUnavailable

        changes: list[bool] = []
        election.subscribe(changes.append)
        store.keep_alive = cut_off  # type: ignore[method-assign]
        key = KEYS.leader("decode-lb")
        while election.is_leader:
            await clock.advance(0.1)
        assert await store.get(key) is not None  # the store still held its lease by then
        assert election.term == 0
        await clock.advance(2)
        assert changes == [False]


async def test_p_22_two_never_lead_at_once_over_random_outages() -> None:
    rng = random.Random(5)
    async with candidates(3) as (clock, store, found):
        terms: set[int] = set()
        for _ in range(300):
            if rng.random() < 0.05:
                store.set_down(True)
                await clock.advance(rng.uniform(0.1, 25))
                store.set_down(False)
            if rng.random() < 0.05:
                held = await store.get(KEYS.leader("decode-lb"))
                if held is not None:
                    await store.revoke(held.lease_id)  # the lease lapses under the leader
                    for candidate in leaders(found):
                        # It cannot know yet, but none of its writes passes.
                        with pytest.raises(Failure) as caught:
                            await candidate.election.write([Put("/x", b"")])
                        assert caught.value.reason is Reason.STALE_EPOCH
            await clock.advance(rng.uniform(0, 2))
            assert len(leaders(found)) <= 1
            terms |= {candidate.election.term for candidate in leaders(found)}
        await clock.advance(2 * LEASE_TTL_S)
        assert len(leaders(found)) == 1
        assert len(terms) > 5


async def test_p_22_a_paused_leaders_write_is_refused() -> None:
    async with candidates(2) as (clock, store, found):
        old = leaders(found)[0]
        assert (await old.election.write([Put("/a", b"1")])).succeeded
        old_term = old.election.term
        # Stopped past its lease, then going on in the belief of the past.
        await old.kill()
        await clock.advance(LEASE_TTL_S + 2)
        new = leaders(found)[0]
        assert new is not old
        assert (await new.election.write([Put("/a", b"2")])).succeeded
        with pytest.raises(Failure) as caught:
            await old.election.write([Put("/a", b"old")])
        assert caught.value.reason is Reason.STALE_EPOCH
        fence = Compare(KEYS.leader("decode-lb"), create_revision=old_term)
        assert not (await store.txn([fence], [Put("/a", b"old")])).succeeded
        item = await store.get("/a")
        assert item is not None
        assert item.value == b"2"


async def test_a_lost_comparison_is_a_conflict_not_the_end_of_a_term() -> None:
    async with candidates(1) as (_, store, found):
        election = found[0].election
        await store.put("/a", b"1")
        with pytest.raises(Failure) as caught:
            await election.write([Put("/a", b"2")], [Compare("/a", create_revision=0)])
        assert caught.value.reason is Reason.CONFLICT
        assert election.is_leader


async def test_a_key_deleted_by_hand_ends_the_term() -> None:
    async with candidates(1) as (clock, store, found):
        term = found[0].election.term
        await store.delete(KEYS.leader("decode-lb"))
        await clock.advance(8)
        assert found[0].election.term > term


def test_p_22_a_receiver_refuses_a_lower_term() -> None:
    guard = TermGuard()
    for term in (3, 3, 7):
        guard.accept(term)
    with pytest.raises(Failure) as caught:
        guard.accept(6)
    assert caught.value.reason is Reason.STALE_EPOCH
    assert guard.highest == 7


def test_p_21_terms_begin_anew_with_a_store_that_lost_its_history() -> None:
    losses = 0
    guard = TermGuard(lambda: losses)
    guard.accept(5000)
    with pytest.raises(Failure):
        guard.accept(2)
    losses = 1
    guard.accept(2)
    with pytest.raises(Failure):
        guard.accept(1)
