"""The store in memory, behind the same RPCs: for the tests of siblings.

    async with fake_kvstore() as kv:
        stub = check_pb2_grpc.CheckServiceStub(channels.get(kv.address))

CHECK, STORE and one directory shard share the address. Everything is the real code but the disk,
so that what passes here passes against the processes (tests/contract/test_kvstore_*.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pelagos.kvstore.v1 import check_pb2_grpc, store_pb2_grpc, swa_pb2_grpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.rpc_client import Channels
from services.common.rpc_server import RpcServer
from services.kvstore.backends.base import ReadStatus
from services.kvstore.check.match import Matcher
from services.kvstore.check.replica import Replica
from services.kvstore.check.server import CheckServicer, StoreLink
from services.kvstore.client import SwaDirectoryClient
from services.kvstore.formats import FLAG_APPROXIMATE, Record, State
from services.kvstore.hash_chain import SessionChains
from services.kvstore.index_table import EPOCH_S
from services.kvstore.limits import PIN_TTL_S
from services.kvstore.storage.meta import CommitOutcome, LogPart, Meta
from services.kvstore.store.blocks import BlockRead, NewBlock, Outcome, Room, StoreStat
from services.kvstore.store.fetch import Fetcher
from services.kvstore.store.put import Putter
from services.kvstore.store.rings import RingCache
from services.kvstore.store.server import StoreServicer
from services.kvstore.swa.directory import Location, SwaKey
from services.kvstore.swa.server import SwaDirectoryServicer


class MemoryBlocks:
    """A BlockStore in memory, with room for `max_blocks`."""

    def __init__(self, max_blocks: int = 100_000, clock: Clock = SYSTEM_CLOCK) -> None:
        self._max_blocks = max_blocks
        self._clock = clock
        self.meta = Meta(None, clock.wall_s)
        self._blocks: dict[tuple[bytes, int], NewBlock] = {}

    def block_bytes(self, key: bytes) -> int | None:
        """Returns the payload length of a stored block."""
        block = self._find(key)
        return None if block is None else len(block.payload)

    def _find(self, key: bytes) -> NewBlock | None:
        fields = self.meta.get(key[:16])
        return None if fields is None else self._blocks.get((key[:16], fields[0]))

    async def get(self, key: bytes, layout: bytes, room: Room) -> BlockRead:
        """Reads a block."""
        block = self._find(key)
        if block is None:
            return BlockRead(ReadStatus.ABSENT)
        if block.key != key:
            return BlockRead(ReadStatus.WRONG_KEY)
        if block.layout != layout:
            return BlockRead(ReadStatus.WRONG_LAYOUT)
        out = room(len(block.payload))
        if out is None:
            return BlockRead(ReadStatus.WRONG_LAYOUT)
        memoryview(out)[:] = block.payload
        return BlockRead(ReadStatus.OK, len(out), bool(block.flags & FLAG_APPROXIMATE))

    def is_stored(self, block: NewBlock) -> bool:
        """Returns whether a put would change nothing."""
        fields = self.meta.get(block.key[:16])
        if fields is None:
            return False
        return bool(block.flags & FLAG_APPROXIMATE) or not fields[7] & FLAG_APPROXIMATE

    async def write(self, block: NewBlock) -> int | None:
        """Keeps a copy of the block; None when there is no room."""
        if len(self._blocks) >= self._max_blocks:
            return None
        put_id = secrets.randbits(64)
        copy = NewBlock(**{**block.__dict__, "payload": bytes(block.payload)})
        self._blocks[(block.key[:16], put_id)] = copy
        return put_id

    async def commit(self, block: NewBlock, put_id: int) -> Outcome:
        """Makes a written block visible."""
        now_s = int(self._clock.wall_s())
        done = self.meta.commit(
            block.key[:16],
            Record(
                put_id=put_id,
                block_index=block.block_index,
                created_s=now_s,
                access_epoch=now_s // EPOCH_S,
                shards=1,
                state=State.COMMITTED,
                ttl_class=block.ttl_class,
                flags=block.flags,
                parent16=block.parent16,
            ),
        )
        if done.outcome is CommitOutcome.EXISTS or done.outcome is CommitOutcome.NO_PARENT:
            await self.take_back(block, put_id)
            exists = done.outcome is CommitOutcome.EXISTS
            return Outcome.EXISTS if exists else Outcome.NO_PARENT
        if done.replaced_put_id is not None:
            self._blocks.pop((block.key[:16], done.replaced_put_id), None)
        return Outcome.COMMITTED

    async def take_back(self, block: NewBlock, put_id: int) -> None:
        """Forgets a write that will not be committed."""
        self._blocks.pop((block.key[:16], put_id), None)

    def exists(self, keys: bytes) -> bytes:
        """Returns a byte per key, 1 when stored."""
        return bytes(self.meta.has(keys[at : at + 16]) for at in range(0, len(keys), 32))

    def index_of(self, key: bytes) -> int | None:
        """Returns the number of a stored block in its chain."""
        fields = self.meta.get(key[:16])
        return None if fields is None else fields[1]

    async def touch(self, keys: bytes, ttl_class: int) -> int:
        """Renews access of blocks."""
        return self.meta.touch(keys, 32, ttl_class)

    async def pin(self, pin_id: str, keys16: bytes, ttl_s: float) -> int:
        """Holds blocks against eviction."""
        return self.meta.pin(pin_id, keys16, ttl_s, self._clock.now_s())

    async def renew_pin(self, pin_id: str) -> None:
        """Gives a pin new life."""
        self.meta.renew_pin(pin_id, PIN_TTL_S, self._clock.now_s())

    def follow(
        self, log_id: str, from_seq: int, heartbeat_s: float
    ) -> AsyncGenerator[LogPart, None]:
        """Yields the commit log for ever."""
        return self.meta.follow(log_id, from_seq, heartbeat_s)

    def wake_followers(self) -> None:
        """Makes every follower come round."""
        self.meta.wake_followers()

    def evict(self, key: bytes) -> None:
        """Takes a block away as garbage collection would; for tests of what follows."""
        fields = self.meta.set_state(key[:16], State.TOMBSTONE)
        if fields is not None:
            self._blocks.pop((key[:16], fields[0]), None)

    async def delete_tenant(self, tag: bytes) -> int:
        """Erases a tenant's blocks."""
        going = [name for name, block in self._blocks.items() if block.tenant_tag == tag]
        self.meta.remove([key16 for key16, _ in going])
        for name in going:
            del self._blocks[name]
        return len(going)

    async def stat(self) -> StoreStat:
        """Returns the counts."""
        used = sum(len(block.payload) for block in self._blocks.values())
        return StoreStat(
            len(self._blocks), used, self._max_blocks << 17, "memory", self.meta.num_pins
        )


@dataclass(frozen=True)
class FakeKvStore:
    """A running fake."""

    address: str
    blocks: MemoryBlocks
    directory: SwaDirectoryServicer
    replica: Replica


@dataclass(frozen=True)
class _Self:
    instance_id: str
    address: str


@asynccontextmanager
async def fake_kvstore(
    *,
    max_blocks: int = 100_000,
    cluster_key: bytes = bytes(32),
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[FakeKvStore]:
    """Serves a fake on loopback for as long as the block."""
    blocks = MemoryBlocks(max_blocks, clock)
    server = RpcServer("127.0.0.1:0")
    address = server.bind()
    channels = Channels()
    replica = Replica()
    link = StoreLink(channels, lambda: address, replica, max_queued=1000, clock=clock)
    shard = SwaDirectoryServicer(clock=clock)
    directory = SwaDirectoryClient(channels, lambda: [_Self("fake", address)])
    rings = RingCache()

    async def find_swa(keys: Sequence[SwaKey]) -> Sequence[Location | None]:
        return await directory.lookup(keys, 5.0)

    store = StoreServicer(blocks, Fetcher(blocks, 64 << 20), Putter(blocks, 64 << 20, 16), rings)
    check = CheckServicer(
        Matcher(cluster_key, replica, SessionChains(1000)),
        replica,
        link,
        find_swa,
        lagging_after_ms=5_000,
        clock=clock,
    )
    server.add(check_pb2_grpc.add_CheckServiceServicer_to_server, check)
    server.add(store_pb2_grpc.add_StoreServiceServicer_to_server, store)
    server.add(swa_pb2_grpc.add_SwaDirectoryServiceServicer_to_server, shard)
    await server.start()
    await server.set_serving(True)
    tasks = [asyncio.create_task(link.follow()), asyncio.create_task(link.send_notes())]
    try:
        await link.level.wait()
        yield FakeKvStore(address, blocks, shard, replica)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        store.end_streams()
        await server.stop(0)
        await channels.close()
        rings.close()
