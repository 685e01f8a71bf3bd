"""STORE's copy of the nodes' logs, while nodes come and go."""

from __future__ import annotations

import asyncio

import pytest

from services.kvstore.formats import State
from services.kvstore.store import cluster_index as index_module
from services.kvstore.store.blocks import Outcome
from services.kvstore.tests.cluster_kit import ROOT, cluster, leader_of_key
from services.kvstore.tests.kit import blocks_of, token_ids, until

pytestmark = pytest.mark.timeout(120)


class Without:
    """A view without one node."""

    def __init__(self, view, gone: str) -> None:
        self._view, self._gone = view, gone

    def up(self) -> dict[str, str]:
        return {node: where for node, where in self._view.up().items() if node != self._gone}


async def test_a_node_that_was_cut_off_from_the_cluster_store_only_is_heard_out_again(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(index_module, "_FORGET_AFTER_S", 0.2)
    async with cluster(tmp_path, 3, profile="2+1") as c:
        blocks = await c.put(1, 128 * 8)
        node = leader_of_key(c, blocks[0].key)._node
        view, c.index._view = c.index._view, Without(c.index._view, node)
        await until(lambda: c.index.find(blocks[0].key[:16]) is None)
        c.index._view = view
        await until(lambda: c.index.is_level and len(c.index) == len(blocks))
        assert await c.read(blocks) == [True] * len(blocks)


async def test_a_commit_answered_late_brings_no_evicted_block_back(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        tell, answered, go = c.blocks._tell_primary, asyncio.Event(), asyncio.Event()

        async def late(*args):
            answer = await tell(*args)
            answered.set()
            await go.wait()
            return answer

        c.blocks._tell_primary = late
        put = asyncio.create_task(c.store.put(block))
        await answered.wait()
        await until(lambda: c.index.find(block.key[:16]) is not None)
        assert await leader_of_key(c, block.key).evict([block.key[:16]], "test") == 1
        await until(lambda: c.index.merged.table.get(block.key[:16])[5] == State.TOMBSTONE)
        go.set()
        assert (await put).name == Outcome.COMMITTED.name
        assert c.index.find(block.key[:16]) is None
