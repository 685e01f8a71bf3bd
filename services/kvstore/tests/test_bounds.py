"""What one caller may ask for, and what a slow one costs the others: nothing, and it all comes
back. Callers here speak the wire themselves, as ours would not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import check_pb2_grpc, store_pb2_grpc
from pelagos.kvstore.v1 import store_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.rpc_client import call, stream_call
from services.common.shm_ring import RingRef, SlotRing
from services.kvstore import limits
from services.kvstore.backends.base import ReadStatus
from services.kvstore.check import server as check_server
from services.kvstore.check.replica import Replica
from services.kvstore.check.server import StoreLink
from services.kvstore.client import _put_request
from services.kvstore.hash_chain import (
    MediaSpan,
    SessionChains,
    Uncacheable,
    block_extras,
    layout_digest,
)
from services.kvstore.storage import meta as meta_module
from services.kvstore.storage.meta import Meta
from services.kvstore.store import fetch as fetch_module
from services.kvstore.store import server as server_module
from services.kvstore.store.blocks import BlockRead, NewBlock
from services.kvstore.store.fetch import Fetcher
from services.kvstore.store.put import PutResult, Putter
from services.kvstore.store.rings import RingCache
from services.kvstore.tests.kit import (
    LAYOUT,
    Stack,
    blocks_of,
    match_request,
    stack,
    token_ids,
    until,
)

pytestmark = pytest.mark.timeout(60)
MIB = 1 << 20


class _Large:
    """Has a block of 1 MiB under every key but those that begin with 0."""

    def __init__(self) -> None:
        self.num_reads = 0

    def block_bytes(self, key: bytes) -> int | None:
        return MIB if key[0] else None

    async def get(self, key: bytes, layout: bytes, room) -> BlockRead:
        self.num_reads += 1
        memoryview(room(MIB))[:4] = key[:4]
        await asyncio.sleep(0)
        return BlockRead(ReadStatus.OK, MIB)


def keys_of(count: int, first: int = 1) -> bytes:
    return b"".join(bytes([first]) + n.to_bytes(31, "big") for n in range(count))


async def settle() -> None:
    """Lets everything run that can."""
    for _ in range(200):
        await asyncio.sleep(0)


def inline(fetcher: Fetcher, keys: bytes, **more):
    return fetcher.fetch(keys, bytes(32), ring=None, slots=(), **more)


async def test_a_fetch_that_nobody_reads_holds_a_bound_and_no_other_waits_for_it() -> None:
    blocks = _Large()
    fetcher = Fetcher(blocks, 32 * MIB)
    slow = inline(fetcher, keys_of(1_000))
    async with aclosing(slow):
        await anext(slow)
        await settle()
        ahead = fetch_module._MAX_AHEAD_BYTES // MIB
        assert blocks.num_reads <= ahead + 1
        assert fetcher.num_inflight_bytes == 0, "nothing that is read keeps a ring's fetch out"
        assert fetcher.num_unread_bytes <= ahead * MIB
        # Another one goes through beside it.
        assert len([part async for part in inline(fetcher, keys_of(100))]) == 100
    assert (fetcher.num_running, fetcher.num_unread_bytes, fetcher.num_inflight_bytes) == (0, 0, 0)


async def test_fetches_that_nobody_reads_are_bounded_together() -> None:
    fetcher = Fetcher(_Large(), 32 * MIB)
    slow = [inline(fetcher, keys_of(100, first)) for first in range(1, 21)]
    readers = [asyncio.ensure_future(anext(fetch)) for fetch in slow]
    await settle()
    assert fetcher.num_unread_bytes <= 32 * MIB
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    for fetch in slow:
        await fetch.aclose()
    assert (fetcher.num_running, fetcher.num_unread_bytes, fetcher.num_inflight_bytes) == (0, 0, 0)


async def test_readers_that_stand_still_hold_up_no_other_also_without_a_ring() -> None:
    fetcher = Fetcher(_Large(), 4 * MIB)
    stalled = [inline(fetcher, keys_of(50, first)) for first in range(1, 9)]
    for fetch in stalled:
        await anext(fetch)
    await settle()
    assert fetcher.num_unread_bytes == 4 * MIB
    assert len([part async for part in inline(fetcher, keys_of(30, 9))]) == 30
    for fetch in stalled:
        await fetch.aclose()
    assert (fetcher.num_running, fetcher.num_unread_bytes, fetcher.num_inflight_bytes) == (0, 0, 0)


async def test_a_fetch_without_a_deadline_gets_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "_DEFAULT_FETCH_S", 0.2)
    async with raw_store(tmp_path) as (s, stub):
        blocks = blocks_of(bytes(32), token_ids(1, 128 * 40))
        await s.put_all(blocks)
        keys = b"".join(block.key for block in blocks) * 100
        request = pb.FetchRequest(keys=keys, layout_fingerprint=LAYOUT)
        rpc = stub.Fetch(request)  # and nobody reads it
        census = s.store_runtime.census
        await until(lambda: census.snapshot()["kv.fetch"]["transfers"] == 1)
        await until(lambda: census.snapshot()["kv.fetch"]["transfers"] == 0)
        rpc.cancel()


async def test_absent_blocks_are_told_before_room_is_waited_for() -> None:
    fetcher = Fetcher(_Large(), MIB)
    first = inline(fetcher, keys_of(3))
    await anext(first)  # and does not go on: its second block waits to be taken
    async with aclosing(inline(fetcher, keys_of(5) + keys_of(1, first=0))) as parts:
        part = await anext(parts)
        assert (part.index, part.read.status) == (5, ReadStatus.ABSENT)
    await first.aclose()
    assert fetcher.num_unread_bytes == 0


async def test_a_long_fetch_has_one_place_in_the_queue() -> None:
    """It does not put a thousand blocks in front of those who come after it."""

    class Slow(_Large):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[int] = []

        async def get(self, key: bytes, layout: bytes, room) -> BlockRead:
            self.order.append(key[0])
            return await super().get(key, layout, room)

    blocks = Slow()
    fetcher = Fetcher(blocks, 2 * MIB)

    async def read(first: int, count: int) -> None:
        async for _ in inline(fetcher, keys_of(count, first)):
            pass

    long = asyncio.create_task(read(1, 200))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.gather(long, read(2, 4))
    assert max(at for at, first in enumerate(blocks.order) if first == 2) < 40


@pytest.mark.parametrize(
    ("keys", "layout", "reason"),
    [
        (bytes(32), b"", Reason.INVALID_REQUEST),
        (bytes(32), bytes(31), Reason.INVALID_REQUEST),
        (bytes(33), bytes(32), Reason.INVALID_REQUEST),
        (bytes(32 * (fetch_module.MAX_FETCH_BLOCKS + 1)), bytes(32), Reason.INVALID_REQUEST),
    ],
)
async def test_a_fetch_of_the_wrong_shape_is_refused(keys, layout, reason) -> None:
    fetcher = Fetcher(_Large(), MIB)
    with pytest.raises(Failure) as failure:
        await anext(fetcher.fetch(keys, layout, ring=None, slots=()))
    assert failure.value.reason is reason
    assert fetcher.num_running == 0


async def test_more_fetches_than_the_bound_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(fetch_module, "MAX_FETCHES", 3)
    fetcher = Fetcher(_Large(), MIB)
    running = [inline(fetcher, keys_of(3, first)) for first in (1, 2, 3)]
    started = [asyncio.ensure_future(anext(fetch)) for fetch in running]
    await settle()
    with pytest.raises(Failure) as failure:
        await anext(inline(fetcher, keys_of(1)))
    assert failure.value.reason is Reason.ENGINE_FULL
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
    for fetch in running:
        await fetch.aclose()
    assert len([part async for part in inline(fetcher, keys_of(2))]) == 2


class _Refuses:
    """Stores nothing: the first write fails when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.num_writes = 0

    def is_stored(self, block: NewBlock) -> bool:
        return False

    def index_of(self, key: bytes) -> int | None:
        return None

    async def write(self, block: NewBlock) -> int | None:
        self.num_writes += 1
        await self.go_on.wait()
        return None


def new_block(payload: bytes = bytes(100)) -> NewBlock:
    block = blocks_of(bytes(32), token_ids(1, 128))[0]
    return NewBlock(block.key, block.parent_key, LAYOUT, 1, 128, 2, payload)


async def test_puts_that_wait_for_their_twin_are_in_the_queues_bound() -> None:
    blocks = _Refuses()
    putter = Putter(blocks, max_queued_bytes=1_000, max_parallel=4)
    puts = [asyncio.create_task(putter.put(new_block(), token_ids(1, 128))) for _ in range(50)]
    await settle()
    assert (putter.num_queued, putter.num_queued_bytes) == (10, 1_000)
    blocks.go_on.set()
    assert set(await asyncio.gather(*puts)) == {PutResult.DROPPED}
    assert (putter.num_queued, putter.num_queued_bytes, blocks.num_writes) == (0, 0, 10)


async def test_a_thousand_twins_of_a_put_that_fails_end_like_it() -> None:
    blocks = _Refuses()
    putter = Putter(blocks, max_queued_bytes=1 << 30, max_parallel=4)
    puts = [asyncio.create_task(putter.put(new_block(), token_ids(1, 128))) for _ in range(1_500)]
    await settle()
    blocks.go_on.set()
    assert set(await asyncio.gather(*puts)) == {PutResult.DROPPED}


@asynccontextmanager
async def raw_store(path) -> AsyncIterator[tuple[Stack, store_pb2_grpc.StoreServiceStub]]:
    async with stack(path) as s:
        channel = s.check_runtime.channels.get(s.store_runtime.address)
        yield s, store_pb2_grpc.StoreServiceStub(channel)


async def put_raw(stub, *requests: pb.PutRequest) -> dict[int, str]:
    async with stream_call(stub.Put) as stream:
        for request in requests:
            await stream.write(request)
        await stream.done_writing()
        return {a.put_seq: pb.PutStatus.Name(a.status)[11:] async for a in stream}


async def test_a_put_that_fails_unforeseen_takes_no_neighbour_along(tmp_path, monkeypatch) -> None:
    real = Putter.put

    async def put(self, block, token_ids, extra=b""):
        if extra:
            raise KeyError("unforeseen")
        return await real(self, block, token_ids, extra)

    monkeypatch.setattr(Putter, "put", put)
    async with raw_store(tmp_path) as (_, stub):
        blocks = blocks_of(bytes(32), token_ids(1, 256))
        requests = [_put_request(n, block, None) for n, block in enumerate(blocks)]
        requests.insert(1, _put_request(7, replace(blocks[0], extra=bytes(36)), None))
        assert await put_raw(stub, *requests) == {0: "COMMITTED", 1: "COMMITTED", 7: "DROPPED"}


async def test_a_block_is_numbered_from_one(tmp_path) -> None:
    async with raw_store(tmp_path) as (s, stub):
        block = blocks_of(bytes(32), token_ids(1, 128))[0]
        request = _put_request(1, replace(block, index=0), None)
        assert await put_raw(stub, request) == {1: "KEY_MISMATCH"}
        assert (await s.store.stat()).blocks == 0


async def test_answers_to_puts_that_nobody_takes_stop_the_stream(monkeypatch) -> None:
    """And whoever reads on gets every answer."""
    monkeypatch.setattr(server_module, "_MAX_PUTS_PER_STREAM", 8)
    num_read = 0
    block = blocks_of(bytes(32), token_ids(1, 128))[0]
    wrong = replace(block, token_ids=token_ids(2, 128))

    async def requests() -> AsyncIterator[pb.PutRequest]:
        nonlocal num_read
        for number in range(40):
            num_read += 1
            yield _put_request(number, wrong, None)

    servicer = server_module.StoreServicer(None, None, Putter(None, 1 << 20, 4), RingCache())
    async with aclosing(servicer.Put(requests(), None)) as answers:
        first = await anext(answers)
        await settle()
        assert num_read == 8 + 1, "one more is read before there is room for it"
        rest = [answer.put_seq async for answer in answers]
    assert sorted([first.put_seq, *rest]) == list(range(40))


async def test_too_many_keys_and_pins_without_end_are_refused_by_name(tmp_path) -> None:
    many = bytes(32 * (limits.MAX_KEYS + 1))
    async with raw_store(tmp_path) as (s, stub):
        for method, request in (
            (stub.Exists, pb.ExistsRequest(keys=many)),
            (stub.Touch, pb.TouchRequest(keys=many)),
            (stub.Pin, pb.PinRequest(pin_id="a", keys=many)),
            (stub.Exists, pb.ExistsRequest(keys=b"abc")),
            (stub.Pin, pb.PinRequest(keys=bytes(32))),
            (stub.Pin, pb.PinRequest(pin_id="a" * 1_000, keys=bytes(32))),
            (stub.Pin, pb.PinRequest(pin_id="a", keys=bytes(32), ttl_ms=2**32 - 1)),
        ):
            with pytest.raises(Failure) as failure:
                await call(method, request, timeout_s=30)
            assert failure.value.reason is Reason.INVALID_REQUEST
            assert failure.value.message
        assert (await s.store.stat()).pins == 0


async def test_a_layout_that_is_none_is_refused_and_no_block_is_called_damaged(tmp_path) -> None:
    async with raw_store(tmp_path) as (s, stub):
        blocks = blocks_of(bytes(32), token_ids(1, 256))
        await s.put_all(blocks)
        keys = b"".join(block.key for block in blocks)
        for layout in (b"", b"abc"):
            request = pb.FetchRequest(keys=keys, layout_fingerprint=layout)
            async with stream_call(stub.Fetch, request, timeout_s=30) as stream:
                with pytest.raises(Failure) as failure:
                    await stream.read()
            assert failure.value.reason is Reason.INVALID_REQUEST
        # Another layout is another block that is absent, not damage that an operator looks into.
        async with s.store.fetch(keys, bytes(32)) as parts:
            assert [part.reason async for part in parts] == ["absent", "absent"]
        assert (await s.store.stat()).corrupt_blocks == 0


def test_what_pins_name_is_bounded_and_lapsed_ones_are_looked_for_once_a_second() -> None:
    meta = Meta(None, lambda: 0.0)
    keys = bytes(meta_module._MAX_PINNED_BYTES // 4)
    assert [meta.pin(f"p{n}", keys, 30, 0.0) > 0 for n in range(6)] == [True] * 4 + [False] * 2
    assert meta.pin("p0", keys, 30, 0.0) > 0, "renewed in its own place"
    assert meta.pin("p1", b"", 30, 0.0) == 0
    assert meta.pin("p4", keys, 30, 0.0) > 0, "what was released is room again"
    assert meta.pin("p5", keys, 30, 31.0) > 0, "and what has lapsed"
    assert meta.num_pins == 1
    looked = 0
    meta._lapse_now = meta._lapse

    def lapse(now_s: float) -> None:
        nonlocal looked
        looked += 1
        meta._lapse_now(now_s)

    meta._lapse = lapse
    for number in range(1_000):
        meta.pin(f"q{number}", bytes(16), 30, 40.0 + number / 1_000)
    assert looked <= 2


async def test_a_ring_that_its_living_owner_removed_is_let_go() -> None:
    rings = RingCache()
    for _ in range(3):
        ring = SlotRing.create("kv-test", 4096, 2)
        view = rings.get(ring.ref).view(0)
        ring.close()
    assert len(rings) == 3
    assert rings.sweep() == 3
    assert len(rings) == 0
    view[:4] = b"held"  # by a transfer under way, as long as it needs it
    assert bytes(view[:4]) == b"held"


async def test_a_ring_of_other_sizes_is_refused_also_when_it_is_known() -> None:
    rings = RingCache()
    ring = SlotRing.create("kv-test", 4096, 2)
    try:
        rings.get(ring.ref)
        other = RingRef(ring.ref.name, 2048, 4, ring.ref.owner_epoch)
        with pytest.raises(Failure) as failure:
            rings.get(other)
        assert failure.value.reason is Reason.INVALID_REQUEST
    finally:
        rings.close()
        ring.close()


# ---- CHECK ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [b"[" * 100_000, b'{"a":' * 50_000, b'{"a":"\\ud800"}', b'{"a":1e999}', b"\xff"]
)
def test_a_layout_that_nobody_can_spell_is_uncacheable(layout) -> None:
    with pytest.raises(Uncacheable):
        layout_digest(layout)


def test_media_that_cover_the_prompt_many_times_over_are_uncacheable() -> None:
    whole = MediaSpan(0, 10**6, bytes(32))
    assert len(block_extras([whole] * 8, 10**6, 128)) == 7_812
    with pytest.raises(Uncacheable):
        block_extras([whole] * 20_000, 10**6, 128)


def test_long_session_ids_and_media_lists_are_counted() -> None:
    sessions = SessionChains(max_sessions=1_000, max_bytes=20_000)
    media = [(0, bytes(36 * 100))]
    for number in range(50):
        sessions.keys(f"{number}" + "s" * 100_000, bytes(32), token_ids(1, 128), 128, media)
    assert sessions.num_bytes <= 20_000
    assert len(sessions) == 20_000 // (32 + 3_600)
    assert all(len(name) == 32 for name in sessions._known)


async def test_a_match_of_more_blocks_than_an_answer_can_hold_is_refused(tmp_path) -> None:
    async with stack(tmp_path) as s:
        request = match_request(bytes(4 * (check_server._MAX_BLOCKS + 1)), block_tokens=1)
        with pytest.raises(Failure) as failure:
            await s.check.match(request, timeout_s=30)
        assert failure.value.reason is Reason.INVALID_REQUEST
        assert failure.value.metadata["max_blocks"] == str(check_server._MAX_BLOCKS)


async def test_odd_prompts_are_uncacheable_not_failures(tmp_path) -> None:
    whole = records_pb2.MediaSpan(start=0, num_tokens=128_000, digest=bytes(32))
    async with stack(tmp_path) as s:
        stub = check_pb2_grpc.CheckServiceStub(
            s.check_runtime.channels.get(s.check_runtime.address)
        )
        for more in (
            {"token_ids": bytes(4 * 128_000), "media": [whole] * 100},
            {"layout_fingerprint": b"[" * 100_000},
            {"layout_fingerprint": b'{"a":"\\ud800"}'},
            {"tenant": ""},
            {"model_id": "a\0"},
        ):
            answer = await call(stub.Match, match_request(token_ids(1, 300), **more), timeout_s=30)
            assert answer.hit.ended_by == "namespace"


async def test_notes_for_a_store_that_is_away_are_bounded_by_their_bytes(monkeypatch) -> None:
    monkeypatch.setattr(check_server, "_MAX_NOTED_BYTES", 1_000)
    link = StoreLink(None, lambda: None, Replica(), max_queued=100)
    for _ in range(50):
        link.note("Pin", pb.PinRequest(pin_id="a", keys=bytes(320)))
    assert (link.num_queued, link.num_dropped_notes) == (3, 47)
    sending = asyncio.create_task(link.send_notes())
    await until(lambda: link.num_queued == 0)
    link.note("Pin", pb.PinRequest(pin_id="a", keys=bytes(960)))
    assert link.num_dropped_notes == 47
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
