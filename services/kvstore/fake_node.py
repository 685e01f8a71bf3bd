"""A storage node and its collector in memory, behind the same RPCs: for the tests of siblings.

    async with fake_storage_node() as node:
        stub = storage_pb2_grpc.StorageServiceStub(channels.get(node.address))

DATA, META and GC share the address. Everything is the real code but the disk and the placement map,
which is of this one node (tests/contract/test_kv_node_contract.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from pelagos.kvstore.v1 import gc_pb2_grpc, storage_pb2_grpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.rpc_client import Channels
from services.common.rpc_server import RpcServer
from services.kvstore.backends.base import (
    BackendStat,
    BlockBackend,
    Capabilities,
    PutStatus,
    ReadStatus,
    ScrubReport,
    ShardRef,
)
from services.kvstore.checksums import Buffer, crc32c
from services.kvstore.config import GcConfig
from services.kvstore.formats import ShardHeader
from services.kvstore.gc.main import GcServicer
from services.kvstore.gc.policy import Waterlines
from services.kvstore.gc.worker import passes_over
from services.kvstore.placement import SHARD_HEADER_BYTES, WHOLE
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.leader import Leader
from services.kvstore.storage.links import Links, NodeLink
from services.kvstore.storage.meta import Meta
from services.kvstore.storage.pgmap import PgMap
from services.kvstore.storage.server import MetaServicer, StorageServicer


class MemoryShards:
    """Shards in memory, as many as there are slots."""

    capabilities = Capabilities(
        protects=False, atomic_replace=True, range_read=True, batch=True, durable_ack=True
    )

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._shards: dict[ShardRef, bytes] = {}

    async def put_shard(self, pieces: Sequence[Buffer], durable: bool = False) -> PutStatus:
        """Stores one shard; see BlockBackend."""
        data = b"".join(map(bytes, pieces))
        header = ShardHeader.parse(data[:SHARD_HEADER_BYTES])
        if header is None or len(data) != SHARD_HEADER_BYTES + header.shard_bytes:
            raise ValueError("a header that does not describe the data")
        ref = ShardRef(header.key16, header.shard, header.put_id)
        if ref not in self._shards and len(self._shards) >= self._num_slots:
            return PutStatus.FULL
        self._shards[ref] = data
        return PutStatus.DURABLE if durable else PutStatus.BUFFERED

    async def get_shard(self, ref: ShardRef) -> tuple[bytes | None, ReadStatus]:
        """Returns a shard; see BlockBackend."""
        data = self._shards.get(ref)
        if data is None:
            return None, ReadStatus.ABSENT
        header = ShardHeader.parse(data[:SHARD_HEADER_BYTES])
        if header is None or crc32c(data[SHARD_HEADER_BYTES:]) != header.data_crc:
            return None, ReadStatus.DATA
        return data, ReadStatus.OK

    async def delete_shards(self, refs: Sequence[ShardRef], erase: bool = False) -> int:
        """Frees shards; see BlockBackend."""
        return sum(self._shards.pop(ref, None) is not None for ref in refs)

    async def list_headers(self) -> AsyncGenerator[bytes, None]:
        """Yields headers; see BlockBackend."""
        for data in list(self._shards.values()):
            yield data[:SHARD_HEADER_BYTES]

    async def stat(self) -> BackendStat:
        """Returns the counts."""
        return BackendStat(self._num_slots, len(self._shards), 4096, 4096 * len(self._shards))

    async def scrub(self, bytes_per_s: float) -> ScrubReport:
        """Reads everything once; see BlockBackend."""
        bad = []
        refs = list(self._shards)
        for ref in refs:
            data, status = await self.get_shard(ref)
            if data is None:
                bad.append((ref, status))
        await self.delete_shards([ref for ref, _ in bad])
        return ScrubReport(len(refs), tuple(bad))

    async def sync(self) -> None:
        """Memory is as durable as it gets."""


@dataclass
class OneNodeMap:
    """A placement map of one node that holds every group."""

    node: str
    address: str
    num_groups: int
    pgmap: PgMap = field(init=False)

    def __post_init__(self) -> None:
        self.pgmap = PgMap(1, WHOLE, ((self.node,),) * self.num_groups)

    def up(self) -> dict[str, str]:
        """Returns the node."""
        return {self.node: self.address}

    def address_of(self, node: str) -> str | None:
        """Returns where the node answers."""
        return self.address if node == self.node else None


@dataclass(frozen=True)
class FakeStorageNode:
    """A running fake."""

    address: str
    shards: MemoryShards
    meta: Meta


@asynccontextmanager
async def fake_storage_node(
    *, num_slots: int = 1000, num_groups: int = 8, clock: Clock = SYSTEM_CLOCK
) -> AsyncIterator[FakeStorageNode]:
    """Serves a fake on loopback for as long as the block."""
    server = RpcServer("127.0.0.1:0")
    address = server.bind()
    channels = Channels()
    # The real view follows the cluster store; what reads it asks no more than this one has.
    view = cast(MapView, OneNodeMap("fake", address, num_groups))
    links = Links(channels, view.address_of, clock)
    shards = MemoryShards(num_slots)
    meta = Meta(None, clock.wall_s, num_groups=num_groups)
    leader = Leader("fake", meta, view, links, repair_bytes_per_s=1e9, clock=clock)
    leader.led = frozenset(range(num_groups))
    backend = cast(BlockBackend, shards)
    data = StorageServicer("fake", backend, view, leader, 0, Waterlines())
    records = MetaServicer(leader, view, clock)
    link = NodeLink(channels, address, clock)
    passes = passes_over(link, links, view, GcConfig(), clock)
    add: Any = server.add
    add(storage_pb2_grpc.add_StorageServiceServicer_to_server, data)
    add(storage_pb2_grpc.add_MetaServiceServicer_to_server, records)
    add(gc_pb2_grpc.add_GcServiceServicer_to_server, GcServicer(passes, clock))
    await server.start()
    await server.set_serving(True)
    try:
        yield FakeStorageNode(address, shards, meta)
    finally:
        records.end_streams()
        await links.close()
        await link.close()
        await server.stop(0)
        await channels.close()
