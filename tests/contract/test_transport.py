"""The bulk transport's contract: the same cases by shared memory and inside gRPC messages.

Control is a real `KvTransferService.Push` stream on loopback, as between two engines.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from pelagos.engine.v1 import kv_transfer_pb2 as pb
from pelagos.engine.v1 import kv_transfer_pb2_grpc as rpc

from services.common import rpc_errors
from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, StreamCall, stream_call
from services.common.rpc_server import RpcServer
from services.common.shm_ring import SHM_FOLDER, RingRef, SlotRing, reclaim_orphans
from services.common.transport import (
    GRPC,
    SHM,
    BulkReader,
    BulkWriter,
    Part,
    ShmReader,
    ShmWriter,
    StreamReader,
    StreamWriter,
    choose,
    crc32c,
    host_id,
)

NUM_SLOTS = 4
PART_BYTES = 64 * 1024


@dataclass
class Receiver(rpc.KvTransferServiceServicer):
    """The receiving engine: takes parts, acknowledges each."""

    reader: BulkReader
    taken: list[bytes] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def Push(self, requests, context) -> AsyncIterator[pb.PushResponse]:
        self.opened.set()
        try:
            async for request in requests:
                await self.gate.wait()
                chunk = request.chunk
                try:
                    self.taken.append(self.reader.take(part_of(chunk)))
                except Failure as failure:
                    yield pb.PushResponse(error=rpc_errors.to_proto(failure))
                    return
                yield pb.PushResponse(seq=chunk.seq, verified=chunk.last)
        finally:
            self.ended.set()


@dataclass
class Pair:
    """Both ends and the stream between them."""

    writer: BulkWriter
    receiver: Receiver
    stream: StreamCall
    kind: str
    ring: SlotRing | None

    async def send(self, data: bytes) -> None:
        part = await self.writer.stage(data)
        await self.stream.write(pb.PushRequest(chunk=chunk_of(part)))

    async def pump_acknowledgements(self) -> None:
        async for answer in self.stream:
            if answer.HasField("error"):
                raise rpc_errors.from_proto(answer.error)
            self.writer.acknowledge(answer.seq)


def chunk_of(part: Part) -> pb.KvChunk:
    return pb.KvChunk(
        seq=part.seq,
        slot=part.slot or 0,
        data=part.data,
        length_bytes=part.length_bytes,
        crc32c=part.crc32c,
    )


def part_of(chunk: pb.KvChunk) -> Part:
    return Part(chunk.seq, chunk.length_bytes, chunk.crc32c, chunk.slot, chunk.data)


def own_files() -> set[str]:
    """Rings of this process: others on the machine come and go."""
    return {path.name for path in SHM_FOLDER.glob("pelagos-transport-test-*")}


@pytest.fixture(params=[SHM, GRPC])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    ring: SlotRing | None = None
    writer: BulkWriter
    reader: BulkReader
    if request.param == SHM:
        ring = SlotRing.create("transport-test", PART_BYTES, NUM_SLOTS)
        writer, reader = ShmWriter(ring), ShmReader.attach(ring.ref)
    else:
        writer = StreamWriter(NUM_SLOTS * PART_BYTES, PART_BYTES)
        reader = StreamReader()
    receiver = Receiver(reader)
    receiver.gate.set()
    server = RpcServer("127.0.0.1:0")
    server.add(rpc.add_KvTransferServiceServicer_to_server, receiver)
    address = server.bind()
    await server.start()
    channels = Channels()
    stub = rpc.KvTransferServiceStub(channels.get(address))
    async with stream_call(stub.Push, timeout_s=60) as stream:
        yield Pair(writer, receiver, stream, request.param, ring)
    writer.close()
    reader.close()
    await channels.close()
    await server.stop(1)


async def test_bytes_arrive_whole_and_in_order(pair: Pair) -> None:
    rng = random.Random(7)
    sizes = [0, 1, 4095, 4096, 4097, PART_BYTES - 1, PART_BYTES]
    sizes += [rng.randrange(PART_BYTES) for _ in range(60)]
    sent = [rng.randbytes(size) for size in sizes]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        pump = group.create_task(pair.pump_acknowledgements())
        for data in sent:
            await pair.send(data)
        await pair.stream.done_writing()
        await pump
    assert pair.receiver.taken == sent
    assert pair.writer.num_in_flight == 0


async def test_a_slow_receiver_bounds_what_is_in_flight(pair: Pair) -> None:
    pair.receiver.gate.clear()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        pump = group.create_task(pair.pump_acknowledgements())
        for _ in range(NUM_SLOTS):
            await pair.send(bytes(PART_BYTES))
        late = group.create_task(pair.send(b"x" * PART_BYTES))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not late.done()
        assert pair.writer.num_in_flight == NUM_SLOTS
        pair.receiver.gate.set()
        await late
        await pair.stream.done_writing()
        await pump
    assert len(pair.receiver.taken) == NUM_SLOTS + 1
    assert pair.writer.num_in_flight == 0


async def test_p_30_a_changed_byte_is_refused(pair: Pair) -> None:
    part = await pair.writer.stage(bytes(1000))
    chunk = chunk_of(part)
    if pair.ring is not None:
        assert part.slot is not None
        pair.ring.view(part.slot)[500] ^= 1
    else:
        chunk.data = chunk.data[:500] + b"\x01" + chunk.data[501:]
    await pair.stream.write(pb.PushRequest(chunk=chunk))
    with pytest.raises(Failure) as caught:
        await asyncio.wait_for(pair.pump_acknowledgements(), 30)
    assert caught.value.reason is Reason.BLOCK_CORRUPT


async def test_a_length_that_lies_is_refused(pair: Pair) -> None:
    part = await pair.writer.stage(bytes(1000))
    chunk = chunk_of(part)
    chunk.length_bytes = 999
    await pair.stream.write(pb.PushRequest(chunk=chunk))
    with pytest.raises(Failure) as caught:
        await asyncio.wait_for(pair.pump_acknowledgements(), 30)
    assert caught.value.reason is Reason.BLOCK_CORRUPT


async def test_more_than_a_part_is_our_own_mistake(pair: Pair) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        await pair.writer.stage(bytes(PART_BYTES + 1))


async def test_closing_ends_whoever_waits_for_room(pair: Pair) -> None:
    for _ in range(NUM_SLOTS):
        await pair.writer.stage(bytes(PART_BYTES))
    waiting = [asyncio.ensure_future(pair.writer.stage(bytes(PART_BYTES))) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    pair.writer.close()
    for future in waiting:
        with pytest.raises(Failure) as caught:
            await asyncio.wait_for(future, 30)
        assert caught.value.reason is Reason.BACKEND_LOST
    with pytest.raises(Failure):
        await pair.writer.stage(b"")


async def test_a_cancelled_waiter_does_not_swallow_room(pair: Pair) -> None:
    parts = [await pair.writer.stage(bytes(PART_BYTES)) for _ in range(NUM_SLOTS)]
    first = asyncio.ensure_future(pair.writer.stage(bytes(PART_BYTES)))
    second = asyncio.ensure_future(pair.writer.stage(bytes(PART_BYTES)))
    for _ in range(5):
        await asyncio.sleep(0)
    pair.writer.acknowledge(parts[0].seq)  # wakes the first ...
    first.cancel()  # ... which is gone before it runs
    assert (await asyncio.wait_for(second, 30)).seq == NUM_SLOTS
    assert first.cancelled()


async def test_leaving_the_stream_ends_the_receivers_handler(pair: Pair) -> None:
    await pair.send(b"1")
    assert (await pair.stream.read()).seq == 0
    assert pair.receiver.opened.is_set()
    assert not pair.receiver.ended.is_set()
    pair.stream.cancel()
    await asyncio.wait_for(pair.receiver.ended.wait(), 30)


async def test_an_acknowledgement_twice_is_harmless(pair: Pair) -> None:
    part = await pair.writer.stage(b"1")
    await pair.writer.stage(b"2")
    pair.writer.acknowledge(part.seq)
    pair.writer.acknowledge(part.seq)
    assert pair.writer.num_in_flight == 1


# ---- shared memory alone ----------------------------------------------------------------------


def test_s_11_a_ring_is_for_its_owner_and_is_unlinked_on_release() -> None:
    before = own_files()
    ring = SlotRing.create("transport-test", 100, 3)
    path = SHM_FOLDER / ring.ref.name
    assert path.stat().st_mode & 0o777 == 0o600
    ring.close()
    assert not path.exists()
    assert own_files() <= before


def test_a_peer_of_another_epoch_or_size_is_refused() -> None:
    ring = SlotRing.create("transport-test", 100, 3)
    ref = ring.ref
    cases = {
        Reason.STALE_EPOCH: [
            RingRef(ref.name, 100, 3, ref.owner_epoch + 1),
            RingRef("pelagos-transport-test-gone", 100, 3, ref.owner_epoch),
        ],
        Reason.INVALID_REQUEST: [
            RingRef(ref.name, 100, 4, ref.owner_epoch),
            RingRef(ref.name, 5000, 3, ref.owner_epoch),
            RingRef("../etc/passwd", 100, 3, ref.owner_epoch),
            RingRef("pelagos-" + "x" * 200, 100, 3, ref.owner_epoch),
        ],
    }
    for reason, refs in cases.items():
        for bad in refs:
            with pytest.raises(Failure) as caught:
                SlotRing.attach(bad)
            assert caught.value.reason is reason, bad
    ring.close()


def test_a_slot_that_was_taken_back_cannot_be_published_or_read() -> None:
    ring = SlotRing.create("transport-test", 100, 2)
    peer = SlotRing.attach(ring.ref)
    slot = ring.allocate()
    assert slot is not None
    assert ring.num_used == 1
    ring.free(slot)
    with pytest.raises(Failure) as caught:
        peer.publish(slot, 10, 0, 0)
    assert caught.value.reason is Reason.STALE_EPOCH
    with pytest.raises(Failure) as caught:
        ShmReader(peer).take(Part(0, 10, 0, slot=slot))
    assert caught.value.reason is Reason.STALE_EPOCH
    with pytest.raises(ValueError, match="twice"):
        ring.free(slot)
    with pytest.raises(Failure):
        peer.view(2)
    peer.close()
    ring.close()


def test_a_peer_fills_the_owners_slots_as_a_fetch_does() -> None:
    ring = SlotRing.create("transport-test", 5000, 3)
    peer = SlotRing.attach(ring.ref)
    slots = [ring.allocate() for _ in range(3)]
    assert ring.allocate() is None
    for i, slot in enumerate(slots):
        assert slot is not None
        data = bytes([i]) * 5000
        peer.view(slot)[:] = data
        peer.publish(slot, 5000, crc32c(data), i)
    for i, slot in enumerate(slots):
        assert slot is not None
        info = ring.info(slot)
        assert ShmReader(ring).take(Part(i, info.length_bytes, info.crc32c, slot=slot))[0] == i
        ring.free(slot)
    assert ring.num_free == 3
    peer.close()
    ring.close()


def test_p_36_the_ring_of_a_dead_process_is_reclaimed_and_of_a_living_one_is_not() -> None:
    program = (
        "import sys; from services.common.shm_ring import SlotRing\n"
        "ring = SlotRing.create('transport-test', 100, 3)\n"
        "print(ring.ref.name, ring.ref.owner_epoch, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    name, epoch = child.stdout.readline().split()
    path = SHM_FOLDER / name
    ours = SlotRing.create("transport-test", 100, 3)
    reclaim_orphans()
    assert path.exists()
    peer = SlotRing.attach(RingRef(name, 100, 3, int(epoch)))
    assert peer.is_owner_alive
    child.kill()
    child.wait()
    child.stdin.close()  # type: ignore[union-attr]
    child.stdout.close()
    assert not peer.is_owner_alive
    reclaim_orphans()
    assert not path.exists()
    assert (SHM_FOLDER / ours.ref.name).exists()
    peer.close()
    ours.close()


def test_only_processes_that_share_the_folder_choose_shared_memory() -> None:
    assert choose([SHM, GRPC], host_id(), [SHM, GRPC]) == SHM
    assert choose([SHM, GRPC], "another-host", [SHM, GRPC]) == GRPC
    assert choose([SHM, GRPC], "", [SHM, GRPC]) == GRPC
    assert choose([SHM, GRPC], host_id(), [GRPC]) == GRPC
    with pytest.raises(Failure) as caught:
        choose(["rdma"], host_id(), [SHM, GRPC])
    assert caught.value.reason is Reason.UNSUPPORTED_FEATURE
    assert str(os.geteuid()) in host_id()


def test_the_checksum_is_castagnoli() -> None:
    assert crc32c(b"123456789") == crc32c(memoryview(b"123456789")) == 0xE3069283
    assert crc32c(b"") == 0
