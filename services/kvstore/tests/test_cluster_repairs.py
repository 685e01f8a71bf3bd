"""Repairs that meet evictions, replacements, silent and full members: nothing is lost or left."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.kvstore.backends.base import ReadStatus, ShardRef
from services.kvstore.storage import repairs
from services.kvstore.tests.cluster_kit import (
    Cluster,
    Pause,
    backend_of,
    cluster,
    leader_of,
    leader_of_key,
    num_used,
)
from services.kvstore.tests.kit import until

pytestmark = pytest.mark.timeout(120)


async def lose_shard(c: Cluster, key: bytes, shard: int) -> int:
    """Frees one shard behind everybody's back; returns the block's put id."""
    put_id: int = c.index.find(key[:16])[0]
    refs = [ShardRef(key[:16], shard, put_id)]
    assert await backend_of(c, c.node_of(key, shard)).delete_shards(refs) == 1
    return put_id


async def test_a_late_repair_takes_nothing_from_the_put_that_took_the_blocks_place(
    tmp_path,
) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = (await c.put(1, 128, approximate=True))[0]
        leader = leader_of_key(c, block.key)
        pause = Pause(leader, "_read_shards", after=False)
        repair = asyncio.create_task(leader._repair_one(block.key[:16]))
        await pause.begun.wait()
        exact = replace(block, approximate=False)
        assert (await c.store.put(exact)).name == "COMMITTED"
        pause.go.set()
        await repair
        assert leader.counts.dropped == 0
        assert leader.meta.has(block.key[:16])
        assert await c.read([exact]) == [True]


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_repair_leaves_no_shard_of_a_block_that_goes_meanwhile(
    tmp_path, is_replaced: bool
) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = (await c.put(1, 128, approximate=True))[0]
        leader = leader_of_key(c, block.key)
        await lose_shard(c, block.key, 2)
        link = leader._links.get(c.view.pgmap.node_of(block.key, 2))
        put, begun, go = link.put, asyncio.Event(), asyncio.Event()

        async def late(*args):
            begun.set()
            await go.wait()
            return await put(*args)

        link.put = lambda *args: asyncio.ensure_future(late(*args))
        repair = asyncio.create_task(leader._repair_one(block.key[:16]))
        await begun.wait()
        link.put = put
        if is_replaced:
            assert (await c.store.put(replace(block, approximate=False))).is_stored
        else:
            assert await leader.evict([block.key[:16]], "tenant") == 1
        go.set()
        await repair
        assert await num_used(c) == (3 if is_replaced else 0)
        assert await c.read([block]) == [is_replaced]


async def test_what_a_silent_member_lacks_stays_queued_until_it_answers(
    tmp_path, monkeypatch
) -> None:
    """Nobody audits a node that never left: frozen for seconds, or cut off from the primary."""
    monkeypatch.setattr(repairs, "_RETRY_S", 0.02)
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = (await c.put(1, 128))[0]
        leader = leader_of_key(c, block.key)
        put_id = await lose_shard(c, block.key, 1)
        link = leader._links.get(c.view.pgmap.node_of(block.key, 1))
        get, asked = link.get, asyncio.Event()

        def silent(ref: ShardRef):
            asked.set()
            answer = asyncio.get_running_loop().create_future()
            answer.set_result((None, ReadStatus.IO))
            return answer

        link.get = silent
        leader.report_bad(block.key[:16], put_id, 1)
        await asked.wait()
        await asyncio.sleep(0.1)
        link.get = get
        await until(lambda: leader.meta.get(block.key[:16])[4] == 0b111)
        assert len(leader.repairs) == 0
        assert await num_used(c) == 3


async def test_blocks_that_cannot_be_repaired_hold_up_no_others(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(repairs, "_RETRY_S", 0.02)
    async with cluster(tmp_path, 3, profile="2+1") as c:
        leader = leader_of(c.runtimes[0])
        stuck = [bytes([1, number]) * 8 for number in range(20)]
        fine = [bytes([2, number]) * 8 for number in range(20)]
        done = []

        async def repair_one(key16: bytes) -> tuple[int, bool]:
            done.append(key16)
            return 0, key16 in fine

        leader.repairs._repair = repair_one
        for key16 in stuck + fine:
            leader.want_repair(key16)
        await until(lambda: set(fine) <= set(done) and len(leader.repairs) == len(stuck))
        assert all(done.count(key16) == 1 for key16 in fine)
        for key16 in stuck:
            leader.repairs.forget(key16)
