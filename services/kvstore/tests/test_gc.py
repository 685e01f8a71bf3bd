"""Garbage collection: one pass over an embedded node, and the worker beside each storage node."""

import asyncio
import math
from contextlib import AsyncExitStack

import pytest
from pelagos.kvstore.v1 import gc_pb2, gc_pb2_grpc

from services.common.clock import VirtualClock
from services.common.metrics import Metrics
from services.common.rpc_client import call
from services.common.service import RuntimeConfig, running
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.config import GcConfig
from services.kvstore.formats import State, TtlClass
from services.kvstore.gc import main as gc_main
from services.kvstore.gc.collector import Collector
from services.kvstore.gc.metrics import export_gc_metrics
from services.kvstore.gc.policy import ClockGuard, Waterlines
from services.kvstore.storage.node import Node
from services.kvstore.store.blocks import EmbeddedBlocks, NewBlock, Outcome
from services.kvstore.tests.cluster_kit import cluster, leader_of
from services.kvstore.tests.kit import until

LAYOUT = bytes(32)


def block(number: int, index: int = 1, parent: bytes = bytes(32), ttl=TtlClass.AGENT) -> NewBlock:
    key = number.to_bytes(2, "big") * 16
    return NewBlock(key, parent, LAYOUT, index, 128, ttl, number.to_bytes(4, "big") * 250)


@pytest.fixture
async def small(tmp_path):
    """A node of 40 slots under a clock that stands still."""
    clock = VirtualClock(wall_s=600_000.0)
    config = LocalBackendConfig(tmp_path / "s", 40 * 4096, 10 * 4096, payload_bytes=1000)
    node = await Node.open(await LocalBackend.open(config), tmp_path / "meta.log", clock)
    blocks = EmbeddedBlocks(node, Waterlines(), clock=clock)
    yield clock, node, blocks, Collector(node, Waterlines(), clock=clock)
    await node.close()


async def store(blocks: EmbeddedBlocks, new: NewBlock) -> Outcome | None:
    put_id = await blocks.write(new)
    return None if put_id is None else await blocks.commit(new, put_id)


async def test_nothing_goes_below_the_high_waterline(small) -> None:
    _, node, blocks, collector = small
    for number in range(34):
        assert await store(blocks, block(number)) is Outcome.COMMITTED
    done = await collector.collect()
    assert (done.expired, done.by_waterline, await node.usage()) == (0, 0, (40, 34))


async def test_above_high_the_oldest_go_down_to_low(small) -> None:
    clock, node, blocks, collector = small
    for number in range(35):
        await store(blocks, block(number))
        if number == 9:
            clock.jump_wall(1200)
    done = await collector.collect()
    assert done.by_waterline == 35 - 30
    assert done.retention_epochs == 2
    gone = [n for n in range(35) if not node.meta.has(block(n).key[:16])]
    assert len(gone) == 5
    assert max(gone) <= 9
    # Their slots are free, their tombstones say why they are away, and they may come again.
    assert (await node.usage()) == (40, 30)
    assert node.meta.table.get(block(gone[0]).key[:16])[5] == State.TOMBSTONE
    assert await store(blocks, block(gone[0])) is Outcome.COMMITTED
    # The retention that the disk gives stays known when a pass has nothing to do.
    assert (await collector.collect()).by_waterline == 0
    assert (collector.retention_s, collector.totals.by_waterline) == (1200, 5)


async def test_expired_blocks_go_without_a_waterline(small) -> None:
    clock, node, blocks, collector = small
    await store(blocks, block(1))
    await store(blocks, block(2, ttl=TtlClass.CHAT))
    clock.jump_wall(600 + 259_200 + 1)
    done = await collector.collect()
    assert (done.expired, done.by_waterline) == (1, 0)
    assert [node.meta.has(block(n).key[:16]) for n in (1, 2)] == [False, True]
    assert (collector.totals.expired, collector.retention_s) == (1, None)


@pytest.mark.parametrize("jump_s", [86_400.0 * 8, -86_400.0])
async def test_p_23_a_jump_of_the_wall_clock_expires_nothing_and_room_is_made_all_the_same(
    small, jump_s
) -> None:
    clock, node, blocks, collector = small
    await collector.collect()
    for number in range(30):
        await store(blocks, block(number))
    clock.jump_wall(jump_s)
    done = await collector.collect(with_orphans=True)
    assert (done.expired, done.orphans, collector.holds_for_clock) == (0, 0, True)
    assert len([n for n in range(30) if node.meta.table.get(block(n).key[:16])[5] == 1]) == 30
    for number in range(30, 36):
        await store(blocks, block(number))
    assert (await collector.collect()).by_waterline == 6
    # Back where it was: as if it had never been away.
    clock.jump_wall(-jump_s)
    assert (await collector.collect()).expired == 0
    assert not collector.holds_for_clock
    assert (await node.usage())[1] == 30


async def test_p_23_a_jump_that_lasts_for_a_day_is_believed(small) -> None:
    clock, _, blocks, collector = small
    await collector.collect()
    await store(blocks, block(1))
    clock.jump_wall(600 + 259_200 + 1)
    for _ in range(5):
        assert (await collector.collect()).expired == 0
        await clock.advance(86_399 / 5)
    await clock.advance(2)
    assert (await collector.collect()).expired == 1
    assert not collector.holds_for_clock


def test_small_steps_of_the_clock_are_followed_and_each_large_one_begins_anew() -> None:
    guard = ClockGuard(max_jump_s=300, believed_after_s=1_000)
    wall_s = 1e9
    for now_s in range(100):
        wall_s += 1 - 200  # an hour and more backwards, in steps
        assert guard.believes(wall_s, float(now_s))
    assert not guard.believes(wall_s + 3_600, 100.0)
    assert not guard.believes(wall_s + 86_400, 1_099.0)
    assert not guard.believes(wall_s + 86_400 + 900, 2_000.0), "another jump, another wait"
    assert guard.believes(wall_s + 86_400 + 1_901, 3_001.0)


async def test_the_metrics_of_a_collector_state_the_effective_retention(small) -> None:
    clock, _, blocks, collector = small
    metrics = Metrics("gc")
    export_gc_metrics(metrics, collector, clock)

    def read(name: str) -> float:
        lines = metrics.render().decode().splitlines()
        return float(
            next(line for line in lines if line.startswith(f"pelagos_gc_{name}")).split()[1]
        )

    assert math.isnan(read("effective_retention_seconds "))
    for number in range(36):
        await store(blocks, block(number))
    clock.jump_wall(3000)
    await collector.collect()
    await clock.advance(7)
    assert read("effective_retention_seconds ") == 3000
    assert read('evictions{why="waterline"}') == 6
    assert read("collection_age_seconds ") == 7
    assert read("used_share ") == 0.75


async def test_pinned_blocks_stay_until_the_emergency(small) -> None:
    clock, node, blocks, collector = small
    for number in range(35):
        await store(blocks, block(number, ttl=TtlClass.CHAT))
    pinned = b"".join(block(n).key[:16] for n in range(35))
    await blocks.pin("p", pinned, 30)
    assert (await collector.collect()).by_waterline == 0
    await clock.advance(31)
    assert (await collector.collect()).by_waterline == 5
    for number in range(100, 109):
        await store(blocks, block(number, ttl=TtlClass.CHAT))
    assert (await node.usage())[1] == 39
    await blocks.pin("p", pinned, 30)
    assert (await collector.collect()).by_waterline == 9


async def test_t_gc_2_a_chain_is_evicted_from_its_leaf(small) -> None:
    clock, node, blocks, _ = small
    parent = bytes(32)
    chain = []
    for index in range(1, 5):
        chain.append(block(index, index, parent))
        parent = chain[-1].key
        await store(blocks, chain[-1])
    clock.jump_wall(600)
    await blocks.touch(chain[0].key + chain[1].key, TtlClass.AGENT)
    order = [key for key, _ in node.eviction_order(4)]
    assert order == [chain[n].key[:16] for n in (3, 2, 1, 0)]


async def test_two_passes_at_once_are_one(small) -> None:
    _, _, blocks, collector = small
    for number in range(36):
        await store(blocks, block(number))
    first, second = await asyncio.gather(collector.collect(), collector.collect())
    assert first is second
    assert collector.num_evicted == 6


async def test_tombstones_and_orphans_are_freed_in_the_end(small) -> None:
    clock, node, blocks, collector = small
    await store(blocks, block(1))
    await node.evict([block(1).key[:16]], "test")
    left_over = block(2)
    await blocks.write(left_over)  # its writer died before the commit
    assert (await collector.collect(with_orphans=True)).orphans == 0
    await clock.advance(1300)
    assert (await collector.collect(with_orphans=True)).orphans == 1
    assert len(node.meta.table) == 0
    assert (await node.usage())[1] == 0


async def test_an_agent_is_refused_before_a_chat_and_both_at_the_end(small) -> None:
    _, _, blocks, _ = small
    for number in range(37):
        await store(blocks, block(number, ttl=TtlClass.CHAT))
    assert await store(blocks, block(100)) is None
    assert await store(blocks, block(101, ttl=TtlClass.CHAT)) is Outcome.COMMITTED
    assert await store(blocks, block(102, ttl=TtlClass.CHAT)) is Outcome.COMMITTED
    assert await store(blocks, block(103, ttl=TtlClass.CHAT)) is None


async def test_a_worker_beside_each_node_keeps_all_of_them_below_high(tmp_path) -> None:
    """Every worker evicts only what its node leads; together they free what is needed."""
    async with cluster(tmp_path, profile="2+1", num_nodes=3, capacity_bytes=1 << 20) as c:
        num_slots = (await leader_stat(c)).slots
        written = []
        for seed in range(200):
            if len(written) + 4 > num_slots * 0.9:
                break
            written += await c.put(seed)
        async with AsyncExitStack() as workers:
            clients = []
            for runtime in c.runtimes.values():
                config = GcConfig(
                    node=runtime.address, every_s=3600, runtime=RuntimeConfig(machine="m")
                )
                worker = await workers.enter_async_context(
                    running("gc", config, gc_main.build, store=c.members)
                )
                clients.append(gc_pb2_grpc.GcServiceStub(worker.channels.get(worker.address)))
            evicted = 0
            for stub in clients:
                answer = await call(stub.Collect, gc_pb2.CollectRequest(), timeout_s=60)
                evicted += answer.by_waterline
            used = (await leader_stat(c)).used
            assert evicted == len(written) - used
            # The first worker saw the most; rounding of the shares leaves a block or two.
            assert used <= num_slots * 0.85
            status = await call(clients[0].GetGcStatus, gc_pb2.GetGcStatusRequest(), timeout_s=30)
            assert status.evicted_total > 0
        await until(lambda: len(_alive(c)) == used)
        kept = await c.read(written)
        assert kept.count(True) == used


async def leader_stat(c):
    from pelagos.kvstore.v1 import storage_pb2

    link = c.blocks._links.get("n00")
    return await call(link.storage.StatNode, storage_pb2.StatNodeRequest(), timeout_s=30)


def _alive(c) -> list[bytes]:
    return [
        key
        for runtime in c.runtimes.values()
        for key in leader_of(runtime)._keys()
        if c.index.find(key) is not None
    ]
