"""Shards, records and messages that no writer of ours makes, and nodes that outlive them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pelagos.kvstore.v1 import storage_pb2 as pb
from pelagos.kvstore.v1 import storage_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import call
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.checksums import crc32c
from services.kvstore.formats import EC_CAUCHY, Record, ShardHeader, State
from services.kvstore.placement import WHOLE, Profile
from services.kvstore.storage.node import Node
from services.kvstore.tests.cluster_kit import Cluster, cluster, leader_of

pytestmark = pytest.mark.timeout(120)

DATA = bytes(range(256)) * 4
SOUND = ShardHeader(
    shard=0,
    k=2,
    m=1,
    algorithm=EC_CAUCHY,
    ttl_class=2,
    shard_bytes=len(DATA),
    object_bytes=2 * len(DATA),
    block_index=1,
    key16=b"k" * 16,
    parent16=bytes(16),
    put_id=7,
    created_s=1_700_000_000,
    data_crc=crc32c(DATA),
)
# What a header with a right checksum may say, and nobody may act upon.
ODD = (
    {"ttl_class": 0},
    {"ttl_class": 3},
    {"ttl_class": 200},
    {"shard": 3},
    {"shard": 255},
    {"k": 0, "m": 0},
    {"k": 200, "m": 50},
    {"flags": 1 << 12},
)


def packed(**fields: int) -> bytes:
    return replace(SOUND, **fields).pack() + DATA


def stubs(c: Cluster, number: int):
    channel = c.store_runtime.channels.get(c.runtimes[number].address)
    return rpc.StorageServiceStub(channel), rpc.MetaServiceStub(channel)


async def test_a_node_takes_no_shard_that_its_map_has_no_place_for(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        epoch = c.view.pgmap.epoch
        here = next(n for n in range(3) if c.node_of(SOUND.key16, 0) == n)
        storage, _ = stubs(c, here)

        async def put(shard: bytes) -> int:
            request = pb.PutShardsRequest(shards=[pb.Shard(bytes=shard)], epoch=epoch)
            return (await call(storage.PutShards, request, timeout_s=30)).statuses[0]

        for fields in (*ODD, {"k": 10, "m": 2}):
            assert await put(packed(**fields)) == pb.SHARD_STATUS_CORRUPT, fields
        for raw in (b"", b"DKSH", bytes(128), packed()[:-1], packed() + b"x"):
            assert await put(raw) == pb.SHARD_STATUS_CORRUPT
        assert await put(packed()) == pb.SHARD_STATUS_BUFFERED
        stat = await call(storage.StatNode, pb.StatNodeRequest(), timeout_s=30)
        assert stat.used == 1


async def test_shards_that_nobody_should_have_written_stop_no_node(tmp_path) -> None:
    """Three nodes hold whole stripes of them; their groups' primaries go on, also after a start."""
    async with cluster(tmp_path, 3, profile="2+1") as c:
        blocks = await c.put(1)
    for number in range(3):
        backend = await opened(tmp_path / f"node-{number}", Profile(2, 1), "local")
        for put_id, fields in enumerate(ODD):
            key = bytes([put_id]) * 16
            header = replace(SOUND, **({"shard": number} | fields), key16=key, put_id=put_id)
            assert (await backend.put_shard([header.pack(), DATA])).is_stored
        await backend.close()
    async with cluster(tmp_path, 3, profile="2+1") as c:
        assert await c.read(blocks) == [True] * len(blocks)
        await c.stop(0)
        await c.start(0)
        await c.settled()
        assert await c.read(blocks) == [True] * len(blocks)
        keys = {key for runtime in c.runtimes.values() for key in leader_of(runtime)._keys()}
        assert keys == {block.key[:16] for block in blocks}


async def opened(folder, profile: Profile = WHOLE, cluster: str = "") -> LocalBackend:
    return await LocalBackend.open(
        LocalBackendConfig(
            dir=folder / "segments",
            capacity_bytes=4 << 20,
            segment_bytes=1 << 20,
            payload_bytes=5000,
            profile=profile,
            cluster=cluster,
        )
    )


async def test_a_store_starts_over_shards_that_are_no_blocks(tmp_path) -> None:
    odd = [fields for fields in ODD if "k" not in fields]
    backend = await opened(tmp_path)
    for put_id, fields in enumerate(odd):
        whole = {"k": 1, "m": 0, "object_bytes": len(DATA)} | fields
        header = replace(SOUND, **whole, key16=bytes([put_id]) * 16, put_id=put_id)
        assert (await backend.put_shard([header.pack(), DATA])).is_stored
    await backend.close()
    node = await Node.open(await opened(tmp_path), tmp_path / "meta.log")
    try:
        assert len(node.meta.table) == 0
        assert await node.free_orphans() == len(odd), "their slots are used again"
    finally:
        await node.close()


async def test_records_and_touches_of_no_class_are_refused_and_change_nothing(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        (block, *_) = await c.put(1)
        key16 = block.key[:16]
        pgmap = c.view.pgmap
        primary = pgmap.primary_of(pgmap.group_of(key16), c.view.up())
        _, meta = stubs(c, int(primary[1:]))
        before = leader_of(c.runtimes[int(primary[1:])]).meta.get(key16)
        sound = Record(9, 1, 1, 1, 0b111, State.COMMITTED, 2)
        for odd in ({"ttl_class": 0}, {"ttl_class": 200}, {"shards": 0xFFFF}, {"flags": 1 << 12}):
            message = pb.ObjectRecord(key16=key16, record=replace(sound, **odd).pack(0))
            with pytest.raises(Failure) as failure:
                await call(
                    meta.Commit, pb.CommitRequest(epoch=pgmap.epoch, object=message), timeout_s=30
                )
            assert failure.value.reason is Reason.INVALID_REQUEST, odd
        for ttl_class in (3, 15, 77):
            request = pb.TouchObjectsRequest(keys16=key16, ttl_class=ttl_class)
            with pytest.raises(Failure) as failure:
                await call(meta.TouchObjects, request, timeout_s=30)
            assert failure.value.reason is Reason.INVALID_REQUEST
        assert leader_of(c.runtimes[int(primary[1:])]).meta.get(key16) == before
        assert await c.read([block]) == [True]


async def test_an_epoch_that_no_map_ever_had_fences_nobody_for_long(tmp_path) -> None:
    """A writer of another cluster, whose node was at this address once, does not shut ours out."""
    async with cluster(tmp_path, 3, profile="2+1") as c:
        for number in range(3):
            storage, _ = stubs(c, number)
            request = pb.DeleteShardsRequest(epoch=2**63)
            with pytest.raises(Failure) as failure:
                await call(storage.DeleteShards, request, timeout_s=30)
            assert failure.value.reason is Reason.STALE_EPOCH
        blocks = await c.put(1)
        assert await c.read(blocks) == [True] * len(blocks)
