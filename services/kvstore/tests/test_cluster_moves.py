"""Puts while the placement map or the primary of a group changes."""

from __future__ import annotations

import asyncio

import pytest

from services.common.clock import SYSTEM_CLOCK
from services.kvstore.backends.base import PutStatus
from services.kvstore.store.blocks import cut_shards
from services.kvstore.tests.cluster_kit import (
    ROOT,
    Pause,
    cluster,
    leader_of,
    leader_of_key,
    num_used,
)
from services.kvstore.tests.kit import blocks_of, token_ids, until
from services.kvstore.tests.test_cluster import _shards, _write_some

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


async def test_a_commit_that_the_last_primary_answered_late_is_known_to_the_next(tmp_path) -> None:
    """The next one has seen that it leads, and listed every member's shards, before the last one
    has seen the same."""
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        group = c.view.pgmap.group_of(block.key)
        first, second, _ = (int(node[1:]) for node in c.view.pgmap.groups[group])
        await c.stop(first)
        await until(lambda: len(c.view.up()) == 2)
        await c.settled()
        last = leader_of(c.runtimes[second])
        assert last.leads(block.key)
        # What the last primary and STORE know of members stands still while the next one starts.
        views = [last._view, c.view]
        known = views[0]._nodes()
        for view in views:
            view._nodes = lambda: known
        await c.start(first)
        new = leader_of(c.runtimes[first])
        await until(lambda: new.knows_all and new.leads(block.key))
        assert (await c.store.put(block)).name in ("COMMITTED", "DEGRADED")
        assert last.meta.has(block.key[:16])
        assert not new.meta.has(block.key[:16])
        for view in views:
            del view._nodes
        last.poke()
        await until(lambda: new.meta.has(block.key[:16]))
        await c.settled()
        await until(lambda: c.index.find(block.key[:16]) is not None)
        assert await c.read([block]) == [True]
        assert last.handover.num_waiting == 0


async def test_a_writer_whose_clock_is_ahead_keeps_no_block_for_years(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        c.blocks._clock = Jumped(c.blocks._clock, 10 * 365 * 86_400)
        block = (await c.put(1, 128))[0]
        meta = leader_of_key(c, block.key).meta
        assert meta.get(block.key[:16])[3] <= meta.epoch
        # Nor when its record is rebuilt from its shards.
        for number in list(c.runtimes):
            await c.stop(number)
            (tmp_path / f"node-{number}" / "meta.log").unlink()
        for number in range(3):
            await c.start(number)
        await c.settled()
        meta = leader_of_key(c, block.key).meta
        assert meta.get(block.key[:16])[3] <= meta.epoch
        assert await c.read([block]) == [True]


@pytest.mark.parametrize("is_withdrawn_first", [False, True])
async def test_a_put_that_is_taken_back_while_its_group_is_taken_over_misleads_nobody(
    tmp_path, is_withdrawn_first: bool
) -> None:
    """An audit makes a block of shards that it finds: then they stay. What is told to be going is
    none, however the two meet."""
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        new, put_id, _ = await _shards(c, block)
        shards = cut_shards(new, put_id, SYSTEM_CLOCK.wall_s(), c.view.pgmap.profile)
        await _write_some(c, (new, put_id, shards), 3)
        leader = leader_of_key(c, block.key)

        async def audit() -> None:
            await leader._audit(c.view.pgmap, c.view.lives(), leader.led)

        if is_withdrawn_first:
            pause = Pause(leader, "_headers", after=True)
            looking = asyncio.create_task(audit())
            await pause.begun.wait()
            await c.blocks.take_back(new, put_id)
            pause.go.set()
            await looking
        else:
            await audit()
            await c.blocks.take_back(new, put_id)
        is_kept = not is_withdrawn_first
        assert (leader.meta.table.get(block.key[:16]) is not None) == is_kept
        assert await num_used(c) == (3 if is_kept else 0)


class Jumped:
    """A clock whose wall time is wrong."""

    def __init__(self, clock, by_s: float) -> None:
        self._clock, self._by_s = clock, by_s

    def wall_s(self) -> float:
        return self._clock.wall_s() + self._by_s

    def __getattr__(self, name: str):
        return getattr(self._clock, name)
