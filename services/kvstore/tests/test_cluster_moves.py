"""Puts while the placement map or the primary of a group changes."""

from __future__ import annotations

import asyncio

import pytest

from services.kvstore.backends.base import PutStatus
from services.kvstore.tests.cluster_kit import ROOT, cluster
from services.kvstore.tests.kit import blocks_of, token_ids, until
from services.kvstore.tests.test_cluster_repairs import leader_of_key

pytestmark = pytest.mark.timeout(120)


async def test_a_commit_claims_no_shard_of_a_member_that_was_replaced_since(tmp_path) -> None:
    async with cluster(tmp_path, 5, profile="2+2", out_after_s=0.3) as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        commit, written, go = c.blocks.commit, asyncio.Event(), asyncio.Event()

        async def late(*args):
            written.set()
            await go.wait()
            return await commit(*args)

        c.blocks.commit = late
        put = asyncio.create_task(c.store.put(block))
        await written.wait()
        epoch = c.view.pgmap.epoch
        await c.stop(c.node_of(block.key, 1))
        await until(lambda: c.view.pgmap.epoch > epoch)
        await c.settled()
        go.set()
        assert (await put).name == "COMMITTED"
        assert await c.read([block]) == [True]
        # Three shards and the fourth in the repair queue, not four of which one is nowhere.
        await c.repaired()
        assert leader_of_key(c, block.key).counts.repaired == 1


async def test_shards_of_two_maps_travel_in_two_messages(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        sent = []
        link = c.blocks._links.get("n00")

        async def take(batch) -> None:
            sent.append([epoch for _, epoch, _, _ in batch])
            for *_, answer in batch:
                answer.set_result(PutStatus.BUFFERED)

        link._put_batch = take
        for epoch in (1, 1, 2, 1):
            link.put(block.payload, epoch, False)
        await until(lambda: sum(map(len, sent)) == 4)
        assert sorted(sent) == [[1], [1, 1], [2]]
