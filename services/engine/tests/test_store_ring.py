"""Who may use a slot, and when it is never used again."""

import asyncio
import re

import pytest
from pelagos.engine.v1 import records_pb2

from services.common.errors import Failure, Reason
from services.common.shm_ring import SHM_FOLDER
from services.engine.persister import FullBlock, Persister
from services.engine.store_ring import StoreRing, leased
from services.kvstore.client import PutStatus


def exists(ring) -> bool:
    return (SHM_FOLDER / ring.ref.name).exists()


@pytest.fixture
def rings():
    ring = StoreRing("test-ring", 64, 4)
    yield ring
    ring.close()


def test_slots_are_lent_and_come_back(rings):
    assert rings.num_leased == 0
    one, two = rings.take(3), rings.take(3)
    assert (len(one.slots), len(two.slots), rings.take(1)) == (3, 1, None)
    assert not set(one.slots) & set(two.slots)
    one.write(b"abc")
    assert one.read(0, 3) == b"abc"
    with pytest.raises(ValueError, match="65 bytes do not fit a slot of 64"):
        one.write(bytes(65))
    one.give_back()
    assert rings.num_leased == 1
    assert len(rings.take(9).slots) == 3


def test_an_abandoned_slot_is_never_lent_again_and_its_ring_goes_with_the_last_lease(rings):
    one, two = rings.take(1), rings.take(1)
    old = one.ring
    one.abandon()
    new = rings.take(4)
    assert len(new.slots) == 4
    assert new.ring is not old
    assert rings.num_retired == 1
    assert exists(old), "another lease is on it"
    two.write(b"x")
    two.give_back()
    assert not exists(old)
    assert exists(new.ring)
    rings.close()
    assert exists(new.ring)
    new.give_back()
    assert not exists(new.ring)


@pytest.mark.parametrize("error", [None, asyncio.CancelledError(), ValueError(), "failure"])
def test_only_a_failure_says_that_the_store_may_still_write(rings, error):
    if error == "failure":
        error = Failure(Reason.BACKEND_LOST, "away")
    lease = rings.take(2)
    try:
        with leased(lease):
            if error is not None:
                raise error
    except type(error or ValueError()):
        pass
    rings.take(1).give_back()
    assert rings.num_retired == isinstance(error, Failure)


def test_no_slots_and_no_room_mean_no_shared_memory():
    assert StoreRing("test-none", 64, 0).take(1) is None
    large = StoreRing("test-large", 1 << 39, 1)
    assert large.take(1) is None
    off = StoreRing("test-off", 64, 2)
    lease = off.take(1)
    off.turn_off()
    assert off.take(1) is None
    lease.give_back()
    assert not exists(lease.ring)


class Store:
    """Answers puts as told; sees what is in the slot when it answers."""

    def __init__(self, *statuses: PutStatus) -> None:
        self.statuses = list(statuses)
        self.seen: list[tuple[bytes, bool]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.asked = asyncio.Event()

    async def put(self, block, ring=None):
        self.asked.set()
        await self.hold.wait()
        slot = b"" if ring is None else bytes(ring.view(block.slot)[: block.num_bytes])
        self.seen.append((block.payload or slot, ring is not None))
        return self.statuses.pop(0)


def block(number: int) -> FullBlock:
    return FullBlock(
        key=bytes([number]) * 32,
        parent_key=bytes(32),
        index=number,
        token_ids=b"",
        extra=b"",
        ttl_class=records_pb2.TTL_CLASS_CHAT,
        approximate=False,
        request_id="r",
        tenant="",
    )


async def persist(store: Store, ring: StoreRing, num: int) -> Persister:
    persister = Persister(
        lambda: store,
        layout=bytes(32),
        writer_id="w",
        block_bytes=64,
        max_queue_bytes=64 * 16,
        by_decode=True,
        ring=lambda: ring,
    )
    task = asyncio.create_task(persister.run())
    for number in range(1, num + 1):
        done = asyncio.Event()
        read = (bytes([number]) * 9).__bytes__
        assert persister.offer(block(number), lambda done=done: done.set, read)
        async with asyncio.timeout(10):
            await (done if store.hold.is_set() else store.asked).wait()
    task.cancel()
    await asyncio.wait([task])
    return persister


async def test_a_put_travels_in_a_slot_that_is_free_again_when_it_is_answered(rings):
    store = Store(*[PutStatus.COMMITTED] * 6)
    persister = await persist(store, rings, 6)
    assert store.seen == [(bytes([n]) * 9, True) for n in range(1, 7)]
    assert persister.counts.persisted == 6
    assert (rings.num_leased, rings.num_retired) == (0, 0)


async def test_a_lost_put_leaves_its_slot_behind(rings):
    store = Store(PutStatus.LOST, PutStatus.COMMITTED)
    persister = await persist(store, rings, 2)
    assert [by_ring for _, by_ring in store.seen] == [True, True]
    assert rings.num_retired == 1
    assert (persister.counts.dropped, persister.counts.persisted) == (1, 1)


async def test_a_store_that_does_not_see_the_ring_gets_the_bytes(rings, caplog):
    store = Store(PutStatus.STALE_RING, PutStatus.COMMITTED, PutStatus.COMMITTED)
    persister = await persist(store, rings, 2)
    assert [(bytes([1]) * 9, True), (bytes([1]) * 9, False), (bytes([2]) * 9, False)] == store.seen
    assert persister.counts.persisted == 2
    assert re.findall("does not see", caplog.text)


async def test_a_put_that_its_engine_leaves_keeps_its_slot(rings):
    store = Store(PutStatus.COMMITTED)
    store.hold.clear()
    persister = await persist(store, rings, 1)
    assert persister.num_queued == 0
    assert store.seen == []
    rings.take(1).give_back()
    assert rings.num_retired == 1
