"""Shards that no record names, on nodes: none of them keeps its slot for ever."""

from __future__ import annotations

import pytest

from services.common.clock import SYSTEM_CLOCK
from services.kvstore.backends.base import PutStatus, ShardRef
from services.kvstore.formats import State
from services.kvstore.gc.policy import Waterlines
from services.kvstore.gc.worker import NodeTarget
from services.kvstore.store.blocks import cut_shards
from services.kvstore.tests.cluster_kit import (
    ROOT,
    Cluster,
    backend_of,
    cluster,
    leader_of,
    leader_of_key,
    num_used,
)
from services.kvstore.tests.kit import blocks_of, token_ids, until
from services.kvstore.tests.test_cluster import _commit, _shards, _write_some

pytestmark = pytest.mark.timeout(120)


async def free_orphans(c: Cluster) -> None:
    """Runs the orphan pass of every node."""
    for number in c.runtimes:
        await target_of(c, number).free_orphans()


def target_of(c: Cluster, number: int, **lines: float) -> NodeTarget:
    """A node as its GC worker has it."""
    link = c.blocks._links.get(f"n{number:02d}")
    return NodeTarget(link, c.blocks._links, c.view, Waterlines(**lines), SYSTEM_CLOCK)


async def test_pins_are_passed_over_by_the_line_that_was_configured(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = (await c.put(1, 128))[0]
        key16 = block.key[:16]
        number = int(leader_of_key(c, block.key)._node[1:])
        assert await c.blocks.pin("p", key16, 600) == 1
        for emergency, count in ((0.96, 0), (0.0001, 1)):
            below = {"low": emergency / 8, "high": emergency / 4, "reject": emergency / 2}
            target = target_of(c, number, **below, emergency=emergency)
            await target.usage()
            assert await target.evict([key16], "gc") == count


async def old_put(c: Cluster, num_shards: int):
    """Writes shards of a put of a while ago; returns (block, put)."""
    block = blocks_of(ROOT, token_ids(1, 128))[0]
    new, put_id, _ = await _shards(c, block)
    created_s = SYSTEM_CLOCK.wall_s() - 700
    put = new, put_id, cut_shards(new, put_id, created_s, c.view.pgmap.profile)
    await _write_some(c, put, num_shards)
    return block, put


async def test_a_put_that_was_broken_off_leaves_no_shard(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block, _ = await old_put(c, 1)
        assert await num_used(c) == 1
        await free_orphans(c)
        assert await num_used(c) == 0
        # Unless a member that is away might make it whole.
        block, _ = await old_put(c, 1)
        away = c.node_of(block.key, 2)
        await c.stop(away)
        await until(lambda: len(c.view.up()) == 2)
        await c.settled()
        await free_orphans(c)
        assert await num_used(c) == 1


async def test_a_put_whose_commit_was_never_heard_becomes_a_block(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block, _ = await old_put(c, 2)
        await free_orphans(c)
        assert leader_of_key(c, block.key).meta.has(block.key[:16])
        await c.repaired()
        assert await num_used(c) == 3
        await until(lambda: c.index.find(block.key[:16]) is not None)
        assert await c.read([block]) == [True]


async def test_what_an_evicted_block_left_on_a_node_goes(tmp_path) -> None:
    """A node that was away while it was evicted, or a write that came late."""
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block, put = await old_put(c, 3)
        await _commit(c, put)
        shard = await shard_of(c, block.key, 1)
        leader = leader_of_key(c, block.key)
        assert await leader.evict([block.key[:16]], "test") == 1
        await place(c, c.node_of(block.key, 1), shard)
        await free_orphans(c)
        assert await num_used(c) == 0
        assert leader.meta.table.get(block.key[:16])[5] == State.TOMBSTONE


async def test_a_node_that_was_replaced_gives_back_the_slots_of_what_is_elsewhere_now(
    tmp_path,
) -> None:
    async with cluster(tmp_path, 4, profile="2+1") as c:
        block, put = await old_put(c, 3)
        await _commit(c, put)
        members = c.view.pgmap.members_of(block.key)
        other = next(n for n in range(4) if f"n{n:02d}" not in members)
        await place(c, other, await shard_of(c, block.key, 1))
        await free_orphans(c)
        assert await num_used(c) == 3
        assert (await backend_of(c, other).stat()).num_used == 0
        assert await c.read([block]) == [True]


@pytest.mark.parametrize("is_taken_over", [False, True])
async def test_shards_on_nodes_that_were_replaced_and_are_back_make_a_block_whole(
    tmp_path, is_taken_over: bool
) -> None:
    """Replaced one after the other, faster than their successors were given anything."""
    async with cluster(tmp_path, 5, profile="2+1") as c:
        block, put = await old_put(c, 3)
        await _commit(c, put)
        members = c.view.pgmap.members_of(block.key)
        others = [n for n in range(5) if f"n{n:02d}" not in members]
        put_id = c.index.find(block.key[:16])[0]
        leader = leader_of_key(c, block.key)
        for shard, other in zip((1, 2), others, strict=True):
            await place(c, other, await shard_of(c, block.key, shard))
            refs = [ShardRef(block.key[:16], shard, put_id)]
            await backend_of(c, c.node_of(block.key, shard)).delete_shards(refs)
        if is_taken_over:
            leader.meta.remove([block.key[:16]])
            await leader._audit(c.view.pgmap, c.view.lives(), leader.led)
        else:
            leader.report_bad(block.key[:16], put_id, 1)
        await until(lambda: (leader.meta.get(block.key[:16]) or [0] * 5)[4] == 0b111)
        assert leader.counts.dropped == 0
        await until(lambda: (c.index.find(block.key[:16]) or [0] * 5)[4] == 0b111)
        assert await c.read([block]) == [True]
        await free_orphans(c)
        assert await num_used(c) == 3


async def test_an_eviction_that_was_broken_off_is_brought_to_its_end(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = (await c.put(1, 128))[0]
        leader = leader_of_key(c, block.key)
        leader.meta.set_state(block.key[:16], State.EVICTING)
        for each in map(leader_of, c.runtimes.values()):
            await each.finish_evictions()
        assert await num_used(c) == 0
        assert leader.meta.table.get(block.key[:16])[5] == State.TOMBSTONE


async def shard_of(c: Cluster, key: bytes, shard: int) -> bytes:
    """A stored shard's bytes."""
    put_id = c.index.find(key[:16])[0]
    node = backend_of(c, c.node_of(key, shard))
    data, _ = await node.get_shard(ShardRef(key[:16], shard, put_id))
    return data


async def place(c: Cluster, number: int, shard: bytes) -> None:
    """Puts a shard onto a node's disk behind everybody's back."""
    pieces = [shard[:128], shard[128:]]
    assert await backend_of(c, number).put_shard(pieces) is PutStatus.BUFFERED
