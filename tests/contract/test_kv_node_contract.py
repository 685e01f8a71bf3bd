"""The contracts of a storage node (DATA and META) and of its collector: the same cases on the fake
and on the real servers."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pelagos.kvstore.v1 import gc_pb2, gc_pb2_grpc, storage_pb2, storage_pb2_grpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call, stream_call
from services.common.service import running
from services.common.store_memory import MemoryStore
from services.kvstore.checksums import crc32c
from services.kvstore.config import GcConfig, StorageNodeConfig
from services.kvstore.fake_node import fake_storage_node
from services.kvstore.formats import EC_REPLICATION, Record, ShardHeader, State
from services.kvstore.gc import main as gc_main
from services.kvstore.storage import main as node_main

NUM_SLOTS = 64
EPOCH = 1  # of the first map


@dataclass
class Node:
    """One node, and what its contract speaks to."""

    data: Any
    meta: Any
    gc: Any

    async def put(self, *shards: bytes, epoch: int = EPOCH, durable: bool = False) -> list[int]:
        request = storage_pb2.PutShardsRequest(
            shards=[storage_pb2.Shard(bytes=shard) for shard in shards],
            epoch=epoch,
            durable=durable,
        )
        return list((await call(self.data.PutShards, request)).statuses)

    async def get(self, number: int, put_id: int = 7) -> tuple[int, bytes]:
        request = storage_pb2.GetShardsRequest(shards=[ref(number, put_id)])
        [found] = (await call(self.data.GetShards, request)).shards
        return found.status, found.bytes

    async def commit(
        self,
        number: int,
        put_id: int = 7,
        flags: int = 0,
        epoch: int = EPOCH,
        used_s: float | None = None,  # when it was used last; None: now
    ) -> Any:
        access_epoch = int(time.time() if used_s is None else used_s) // 600
        record = Record(
            put_id=put_id, block_index=1, created_s=1_000, access_epoch=access_epoch, shards=1,
            state=State.COMMITTED, ttl_class=2, flags=flags,
        )  # fmt: skip
        found = storage_pb2.ObjectRecord(key16=key_of(number), record=record.pack(0))
        return await call(self.meta.Commit, storage_pb2.CommitRequest(epoch=epoch, object=found))

    async def lookup(self, *numbers: int) -> list[Record | None]:
        keys16 = b"".join(map(key_of, numbers))
        answer = await call(self.meta.Lookup, storage_pb2.LookupRequest(keys16=keys16))
        return [Record.parse(found.record) for found in answer.objects]

    async def evict(self, *numbers: int, reason: str = "waterline") -> int:
        request = storage_pb2.EvictObjectsRequest(
            keys16=b"".join(map(key_of, numbers)), reason=reason
        )
        return int((await call(self.meta.EvictObjects, request)).evicted)

    async def log(self, from_seq: int = 0, log_id: str = "", group: int = -1) -> list[Any]:
        """Returns what the log says until the reader is level."""
        request = storage_pb2.FollowLogRequest(pg=group, from_seq=from_seq, log_id=log_id)
        parts = []
        async with stream_call(self.meta.FollowLog, request, timeout_s=60) as stream:
            async for part in stream:
                parts.append(part)
                if part.level:
                    break
        return parts


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def ref(number: int, put_id: int = 7) -> storage_pb2.ShardRef:
    return storage_pb2.ShardRef(key16=key_of(number), put_id=put_id, index=0)


def shard_of(number: int, put_id: int = 7, created_s: int = 1_000) -> bytes:
    data = random.Random(f"{number} {put_id}").randbytes(900)
    header = ShardHeader(
        shard=0, k=1, m=0, algorithm=EC_REPLICATION, ttl_class=2, shard_bytes=len(data),
        object_bytes=len(data), block_index=1, key16=key_of(number), parent16=bytes(16),
        put_id=put_id, created_s=created_s, data_crc=crc32c(data),
    )  # fmt: skip
    return header.pack() + data


@pytest.fixture(params=["fake", "real"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    async with AsyncExitStack() as stack:
        channels = Channels()
        stack.push_async_callback(channels.close)
        if request.param == "fake":
            fake = await stack.enter_async_context(fake_storage_node(num_slots=NUM_SLOTS))
            data_at = gc_at = fake.address
        else:
            members = MemoryStore()
            config = StorageNodeConfig(
                dir=tmp_path / "node", node_id="n0", profile="1+0", num_groups=8,
                capacity_bytes=NUM_SLOTS * 4096, segment_bytes=NUM_SLOTS * 2048,
                payload_bytes=1000, keeper_every_s=0.02, gc_every_s=0, scrub_bytes_per_s=0,
            )  # fmt: skip
            real = await stack.enter_async_context(
                running("storage-node", config, node_main.build, store=members)
            )
            worker = await stack.enter_async_context(
                running(
                    "gc", GcConfig(node=real.address, every_s=3600), gc_main.build, store=members
                )
            )
            data_at, gc_at = real.address, worker.address
        at = channels.get(data_at)
        found = Node(
            storage_pb2_grpc.StorageServiceStub(at),
            storage_pb2_grpc.MetaServiceStub(at),
            gc_pb2_grpc.GcServiceStub(channels.get(gc_at)),
        )
        # A node serves its groups once there is a map and it has taken them over.
        while (await call(found.data.StatNode, storage_pb2.StatNodeRequest())).primary_of < 8:
            pass
        yield found


async def test_shards_are_written_once_read_and_freed(node: Node) -> None:
    ok, buffered = storage_pb2.SHARD_STATUS_OK, storage_pb2.SHARD_STATUS_BUFFERED
    assert await node.put(shard_of(1), shard_of(2)) == [buffered, buffered]
    assert await node.put(shard_of(1)) == [buffered], "idempotent"
    assert await node.put(shard_of(3), durable=True) == [storage_pb2.SHARD_STATUS_DURABLE]
    assert await node.get(1) == (ok, shard_of(1))
    # Another put of the key has another name; neither is read for the other.
    assert await node.get(1, put_id=8) == (storage_pb2.SHARD_STATUS_ABSENT, b"")
    stat = await call(node.data.StatNode, storage_pb2.StatNodeRequest())
    assert (stat.slots, stat.used, stat.bad) == (NUM_SLOTS, 3, 0)
    free = storage_pb2.DeleteShardsRequest(shards=[ref(1), ref(9)], epoch=EPOCH)
    assert (await call(node.data.DeleteShards, free)).deleted == 1
    assert (await call(node.data.DeleteShards, free)).deleted == 0
    assert await node.get(1) == (storage_pb2.SHARD_STATUS_ABSENT, b"")


async def test_what_is_no_shard_is_answered_and_a_full_node_says_so(node: Node) -> None:
    damaged = bytearray(shard_of(1))
    damaged[20] ^= 1
    assert await node.put(bytes(damaged), b"") == [storage_pb2.SHARD_STATUS_CORRUPT] * 2
    statuses = []
    for number in range(NUM_SLOTS + 4):
        statuses += await node.put(shard_of(number))
    assert storage_pb2.SHARD_STATUS_FULL in statuses[-4:]
    assert storage_pb2.SHARD_STATUS_FULL not in statuses[: NUM_SLOTS // 2]


async def test_a_writer_with_an_older_map_is_fenced_and_told_of_the_newer_one(node: Node) -> None:
    for refused in (
        node.put(shard_of(1), epoch=EPOCH - 1),
        node.commit(1, epoch=EPOCH - 1),
        call(node.data.DeleteShards, storage_pb2.DeleteShardsRequest(shards=[ref(1)], epoch=0)),
    ):
        with pytest.raises(Failure) as failure:
            await refused
        assert failure.value.reason is Reason.STALE_EPOCH
    with pytest.raises(Failure) as failure:
        await node.put(shard_of(1), epoch=0)
    assert failure.value.metadata["current"] == str(EPOCH)
    # Who knows a newer map than the node is right; from then on the old one is refused.
    assert await node.put(shard_of(1), epoch=EPOCH + 1) == [storage_pb2.SHARD_STATUS_BUFFERED]
    with pytest.raises(Failure):
        await node.put(shard_of(2), epoch=EPOCH)


async def test_headers_are_listed_by_age_and_group(node: Node) -> None:
    await node.put(shard_of(1, created_s=100), shard_of(2, created_s=200))

    async def listed(**which: int) -> set[bytes]:
        request = storage_pb2.ListShardsRequest(**({"pg": -1} | which))
        async with stream_call(node.data.ListShards, request, timeout_s=60) as stream:
            raw = b"".join([part.headers async for part in stream])
        return {raw[at + 24 : at + 40] for at in range(0, len(raw), 128)}

    both = {key_of(1), key_of(2)}
    assert await listed() == both
    assert await listed(created_before_unix_s=200) == {key_of(1)}
    by_group = [await listed(pg=group) for group in range(8)]
    assert set().union(*by_group) == both
    group = int.from_bytes(key_of(1)[:2], "big") % 8
    assert key_of(1) in by_group[group]


async def test_a_scrub_of_good_shards_names_none(node: Node) -> None:
    await node.put(*(shard_of(number) for number in range(5)))
    async with stream_call(node.data.Scrub, storage_pb2.ScrubRequest(), timeout_s=60) as stream:
        parts = [part async for part in stream]
    assert sum(part.checked for part in parts) == 5
    assert [bad for part in parts for bad in part.bad] == []


async def test_the_first_commit_of_a_key_wins_and_sent_again_it_is_the_same(node: Node) -> None:
    await node.put(shard_of(1), shard_of(1, put_id=8))
    first = await node.commit(1)
    assert (first.status, first.put_id) == (storage_pb2.COMMIT_STATUS_COMMITTED, 7)
    assert (await node.commit(1)).status == storage_pb2.COMMIT_STATUS_COMMITTED
    late = await node.commit(1, put_id=8)
    assert (late.status, late.put_id) == (storage_pb2.COMMIT_STATUS_EXISTS, 7)
    found, none = await node.lookup(1, 2)
    assert found is not None
    assert found.put_id == 7
    assert none is None


async def test_an_exact_block_takes_the_place_of_an_approximate_one_never_back(node: Node) -> None:
    await node.put(shard_of(1), shard_of(1, put_id=8))
    await node.commit(1, flags=4)
    assert (await node.commit(1, put_id=8)).put_id == 8
    assert (await node.commit(1, put_id=7, flags=4)).status == storage_pb2.COMMIT_STATUS_EXISTS
    # The shard that was replaced is freed.
    assert (await node.get(1))[0] == storage_pb2.SHARD_STATUS_ABSENT


async def test_the_log_begins_with_a_snapshot_and_goes_on_from_a_number(node: Node) -> None:
    await node.put(shard_of(1), shard_of(2))
    await node.commit(1)
    parts = await node.log()
    assert parts[0].reset
    assert sum(len(part.entries) for part in parts) == 80
    await node.commit(2)
    more = await node.log(parts[-1].next_seq, parts[-1].log_id)
    assert not more[0].reset
    assert b"".join(part.entries for part in more)[12:28] == key_of(2)
    # A number of another life of the log means nothing: all of it again.
    assert (await node.log(parts[-1].next_seq, "another life"))[0].reset
    with pytest.raises(Failure) as failure:
        await node.log(group=3)
    assert failure.value.reason is Reason.UNSUPPORTED_FEATURE


async def test_touches_move_the_epoch_and_raise_the_class(node: Node) -> None:
    await node.put(shard_of(1))
    await node.commit(1, used_s=1_000)
    touch = storage_pb2.TouchObjectsRequest(keys16=key_of(1) + key_of(2), ttl_class=2)
    assert (await call(node.meta.TouchObjects, touch)).touched == 1
    assert (await call(node.meta.TouchObjects, touch)).touched == 0
    [found] = await node.lookup(1)
    assert found is not None
    assert found.access_epoch > 1


async def test_pinned_blocks_outlast_an_eviction_but_not_an_emergency(node: Node) -> None:
    await node.put(shard_of(1), shard_of(2))
    for number in (1, 2):
        await node.commit(number)
    pin = storage_pb2.PinObjectsRequest(pin_id="p", keys16=key_of(1))
    assert (await call(node.meta.PinObjects, pin)).pinned == 1
    assert await node.evict(1, 2, 3) == 1
    assert (await node.get(1))[0] == storage_pb2.SHARD_STATUS_OK
    assert (await node.get(2))[0] == storage_pb2.SHARD_STATUS_ABSENT
    assert await node.evict(2) == 0, "idempotent"
    assert await node.evict(1, reason="emergency") == 1
    assert (await node.get(1))[0] == storage_pb2.SHARD_STATUS_ABSENT
    # A key that was evicted may be put again.
    await node.put(shard_of(2, put_id=9))
    assert (await node.commit(2, put_id=9)).status == storage_pb2.COMMIT_STATUS_COMMITTED


async def test_a_bad_shard_is_reported_once_and_another_puts_shard_is_not_ours(node: Node) -> None:
    await node.put(shard_of(1))
    await node.commit(1)
    of_another = storage_pb2.ReportShardRequest(shard=ref(1, put_id=8), reason="corrupt")
    assert not (await call(node.meta.ReportShard, of_another)).queued
    of_ours = storage_pb2.ReportShardRequest(shard=ref(1), reason="corrupt")
    assert (await call(node.meta.ReportShard, of_ours)).queued


async def test_nonsense_is_refused(node: Node) -> None:
    short = storage_pb2.ShardRef(key16=b"short")
    for method, request in (
        (node.data.GetShards, storage_pb2.GetShardsRequest(shards=[short])),
        (node.data.DeleteShards, storage_pb2.DeleteShardsRequest(shards=[short], epoch=EPOCH)),
        (node.meta.Lookup, storage_pb2.LookupRequest(keys16=b"short")),
        (node.meta.Commit, storage_pb2.CommitRequest(epoch=EPOCH)),
        (node.meta.PinObjects, storage_pb2.PinObjectsRequest(keys16=key_of(1))),
        (node.meta.EvictObjects, storage_pb2.EvictObjectsRequest(keys16=b"short")),
    ):
        with pytest.raises(Failure) as failure:
            await call(method, request)
        assert failure.value.reason is Reason.INVALID_REQUEST, method


async def test_a_pass_of_collection_evicts_what_has_expired_and_says_so(node: Node) -> None:
    await node.put(shard_of(1), shard_of(2))
    await node.commit(1, used_s=1_000)
    await node.commit(2)
    done = await call(node.gc.Collect, gc_pb2.CollectRequest())
    assert (done.expired, done.by_waterline) == (1, 0)
    assert (await node.get(1))[0] == storage_pb2.SHARD_STATUS_ABSENT
    assert (await node.get(2))[0] == storage_pb2.SHARD_STATUS_OK
    status = await call(node.gc.GetGcStatus, gc_pb2.GetGcStatusRequest())
    assert status.evicted_total == 1
    assert status.used_share == pytest.approx(1 / NUM_SLOTS)


async def test_above_the_high_waterline_collection_leads_to_the_low_one(node: Node) -> None:
    for number in range(int(0.9 * NUM_SLOTS)):
        await node.put(shard_of(number))
        await node.commit(number)
    done = await call(node.gc.Collect, gc_pb2.CollectRequest())
    assert done.expired == 0
    assert done.by_waterline == int(0.9 * NUM_SLOTS) - int(0.75 * NUM_SLOTS)
    status = await call(node.gc.GetGcStatus, gc_pb2.GetGcStatusRequest())
    assert status.used_share <= 0.75
    # All of them were used just now: that is what the disk retains.
    assert status.effective_retention_s == 0
