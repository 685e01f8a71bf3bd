"""Registration and the view: leases, incarnations, static stability."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.clock import VirtualClock
from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.membership import (
    REJOIN_GRACE_S,
    ClusterView,
    Member,
    MemberState,
    Registration,
    parse_member,
)
from services.common.store import Backoff
from services.common.store_memory import MemoryStore

KEYS = Keys("test")


def member(instance_id: str = "decode-1", role: str = "decode") -> Member:
    return Member(role, instance_id, "127.0.0.1:1", MemberState.READY)


@asynccontextmanager
async def cluster(
    *members: Member,
) -> AsyncIterator[tuple[VirtualClock, MemoryStore, ClusterView, list[Registration]]]:
    """A store, a view of it and registrations, all on one virtual clock."""
    clock = VirtualClock()
    store = MemoryStore(clock)
    view = ClusterView(store, KEYS, clock=clock, rng=random.Random(1))
    registrations = [
        Registration(store, KEYS, item, clock=clock, rng=random.Random(i))
        for i, item in enumerate(members)
    ]
    tasks = [asyncio.ensure_future(runner.run()) for runner in (view, *registrations)]
    await clock.advance(1)
    yield clock, store, view, registrations
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()


def ids(view: ClusterView, role: str = "decode") -> list[str]:
    return [item.instance_id for item in view.members(role)]


async def test_members_are_seen_with_all_they_announced() -> None:
    async with cluster(member("decode-1"), member("decode-2")) as (clock, _, view, regs):
        regs[0].update(capacity={"num_ranks": 2}, fingerprint={"layout": "x"}, labels={"a": "b"})
        await clock.advance(1)
        seen = view.member("decode", "decode-1")
        assert seen == regs[0].member
        assert seen is not None
        assert seen.capacity == {"num_ranks": 2.0}
        assert ids(view) == ["decode-1", "decode-2"]
        assert view.roles == ("decode",)


async def test_only_ready_members_get_work() -> None:
    async with cluster(member()) as (clock, _, view, regs):
        regs[0].update(state=MemberState.DRAINING)
        await clock.advance(1)
        assert ids(view) == []
        assert [m.state for m in view.members("decode", tuple(MemberState))] == [
            MemberState.DRAINING
        ]
        with pytest.raises(Failure) as caught:
            view.pick("decode", random.Random(0))
        assert caught.value.reason is Reason.NO_INSTANCE


async def test_a_lease_is_renewed_before_half_of_it_is_over() -> None:
    async with cluster(member()) as (clock, store, view, regs):
        renewals: list[float] = []
        keep_alive = store.keep_alive

        async def counted(lease_id: int) -> float:
            renewals.append(clock.now_s())
            return await keep_alive(lease_id)

        store.keep_alive = counted  # type: ignore[method-assign]
        await clock.advance(100)
        assert ids(view) == ["decode-1"]
        gaps = [b - a for a, b in itertools.pairwise(renewals)]
        assert all(4.0 <= gap <= 5.0 for gap in gaps), gaps
        assert regs[0].is_registered


async def test_ur_54_a_lost_lease_means_a_new_incarnation_without_anybodys_help() -> None:
    async with cluster(member()) as (clock, store, view, regs):
        before = regs[0].member.incarnation
        for lease_id in list(store._leases):
            await store.revoke(lease_id)
        await clock.advance(0.2)
        assert ids(view) == []
        await clock.advance(6)
        seen = view.member("decode", "decode-1")
        assert seen is not None
        assert seen.incarnation == regs[0].member.incarnation != before


@pytest.mark.parametrize("outage_s", [5, 30, 120])
async def test_p_21_members_stay_while_the_store_is_away(outage_s: int) -> None:
    async with cluster(member("decode-1"), member("decode-2")) as (clock, store, view, regs):
        store.set_down(True)
        await clock.advance(outage_s)
        assert ids(view) == ["decode-1", "decode-2"]
        assert not view.is_healthy
        assert view.is_stale == (outage_s > 30)
        regs[0].update(state=MemberState.DRAINING)  # wanted now, written when it can be
        store.set_down(False)
        await clock.advance(5)
        assert view.is_healthy
        assert ids(view) == ["decode-2"]
        assert all(reg.is_registered for reg in regs)
        # etcd gives leases their time again, so nobody had to become new.
        assert regs[1].member.incarnation == view.members("decode")[0].incarnation


async def test_p_21_a_store_that_comes_back_empty_takes_nobody_away() -> None:
    async with cluster(member("decode-1"), member("decode-2")) as (clock, store, view, _):
        for i in range(20):
            await store.put(f"/other/{i}", b"")  # history that the new store lacks
        await clock.advance(1)
        store.wipe()
        lowest = 2
        for _ in range(int(REJOIN_GRACE_S * 4)):
            await clock.advance(0.25)
            lowest = min(lowest, len(ids(view)))
        assert lowest == 2
        assert view.num_history_losses == 1
        assert ids(view) == ["decode-1", "decode-2"]


async def test_p_21_an_empty_store_that_has_outgrown_the_old_one_is_told_apart() -> None:
    async with cluster(member("decode-1"), member("decode-2")) as (clock, store, view, _):
        store.wipe()
        for i in range(100):
            await store.put(f"/other/{i}", b"")  # its revision is past all that the view has seen
        lowest = 2
        for _ in range(int(REJOIN_GRACE_S * 4)):
            await clock.advance(0.25)
            lowest = min(lowest, len(ids(view)))
        assert lowest == 2
        assert view.num_history_losses == 1
        assert len((await store.list(KEYS.members)).items) == 2


async def test_who_does_not_come_back_to_an_empty_store_is_gone_after_the_grace() -> None:
    async with cluster(member("decode-1")) as (clock, store, view, _):
        await store.put(KEYS.member("decode", "decode-2"), member("decode-2").to_bytes())
        for i in range(20):
            await store.put(f"/other/{i}", b"")
        await clock.advance(1)
        assert len(ids(view)) == 2
        changes: list[int] = []
        view.subscribe(lambda: changes.append(len(ids(view))))
        store.wipe()
        await clock.advance(REJOIN_GRACE_S - 5)
        assert len(ids(view)) == 2
        await clock.advance(10)
        assert ids(view) == ["decode-1"]
        assert changes[-1] == 1  # consumers were told


async def test_a_planned_end_removes_the_key_at_once() -> None:
    async with cluster(member()) as (clock, _, view, regs):
        await regs[0].close()
        await clock.advance(0.1)
        assert view.member("decode", "decode-1") is None


async def test_a_value_that_cannot_be_read_hides_only_itself() -> None:
    async with cluster(member()) as (clock, store, view, _):
        bad = [b"", b"\xff", b"[]", b"{}", b'{"address": 1, "capacity": 3}', b"[" * 8000]
        for i, value in enumerate([*bad, b'{"address":"a","x":"' + b"y" * 9000 + b'"}']):
            await store.put(KEYS.member("decode", f"bad-{i}"), value)
        await store.put(KEYS.member("decode", "new"), b'{"address": "a", "state": "resting"}')
        await clock.advance(1)
        assert ids(view) == ["decode-1"]
        newer = view.member("decode", "new")
        assert newer is not None
        assert newer.state is MemberState.STARTING  # an unknown state gets no work


async def test_a_bad_callback_does_not_stop_the_view() -> None:
    async with cluster(member()) as (clock, _, view, regs):
        calls: list[int] = []

        def bad() -> None:
            calls.append(1)
            raise ValueError

        stop = view.subscribe(bad)
        regs[0].update(capacity={"a": 1})
        await clock.advance(1)
        regs[0].update(capacity={"a": 2})
        await clock.advance(1)
        assert len(calls) == 2
        stop()
        assert view.members("decode")[0].capacity == {"a": 2}


def test_a_value_over_8_kib_is_the_callers_mistake() -> None:
    store = MemoryStore()
    reg = Registration(store, KEYS, member())
    with pytest.raises(ValueError, match="8192 fit"):
        reg.update(labels={"x": "y" * 9000})


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(value: bytes) -> None:
    parsed = parse_member("decode", "x", value)
    assert parsed is None or parsed.role == "decode"


def test_ur_56_fifty_clients_come_back_spread_over_the_window() -> None:
    """All lose the store at one moment; their tries, over the first window and later ones."""
    window_s = 2.0
    times: list[float] = []
    for seed in range(50):
        backoff, now_s = Backoff(random.Random(seed), first_s=window_s, max_s=window_s), 0.0
        while now_s < 20:
            now_s += backoff.next_s()
            times.append(now_s)
    first = sorted(t for t in times if t < window_s)
    assert (first[-1] - first[0]) / window_s >= 0.8
    per_slot = [0] * 20
    for t in times:
        if t < 20:
            per_slot[int(t)] += 1
    assert max(per_slot) <= 2 * sum(per_slot) / len(per_slot)


def test_backoff_doubles_up_to_its_bound_and_starts_again() -> None:
    class Ceiling(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    backoff = Backoff(Ceiling(), first_s=0.5, max_s=2.0)
    assert [backoff.next_s() for _ in range(4)] == [0.5, 1.0, 2.0, 2.0]
    backoff.reset()
    assert backoff.next_s() == 0.5


async def test_waiting_for_the_registration_means_as_it_should_be_now() -> None:
    async with cluster(member()) as (clock, store, _, regs):
        (reg,) = regs
        store.set_down(True)
        reg.update(capacity={"n": 1})
        waiting = asyncio.ensure_future(reg.wait_registered())
        await clock.advance(5)
        assert not waiting.done()
        store.set_down(False)
        await clock.advance(3)
        await asyncio.wait_for(waiting, 30)
        item = await store.get(KEYS.member("decode", "decode-1"))
        assert item is not None
        assert parse_member("decode", "decode-1", item.value) == reg.member
