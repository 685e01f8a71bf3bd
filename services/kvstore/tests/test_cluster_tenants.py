"""Erasing a tenant from nodes that are slow or away: all of it, or a failure that says so."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import Failure, Reason
from services.kvstore.backends.base import PutStatus, ReadStatus, ShardRef
from services.kvstore.tests.cluster_kit import backend_of, cluster, leader_of_key, num_used
from services.kvstore.tests.kit import until

pytestmark = pytest.mark.timeout(120)


async def test_s_11_a_node_that_does_not_answer_makes_an_erasure_fail_and_it_can_be_repeated(
    tmp_path,
) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        theirs = await c.put(2, tenant="globex")
        frozen = c.blocks._links.get("n01")

        async def says_nothing(*_) -> None:
            return None

        async def erases_nothing(*_) -> bool:
            return False

        for name, instead in (("headers", says_nothing), ("erase", erases_nothing)):
            mine = await c.put(1, tenant="acme")
            setattr(frozen, name, instead)
            with pytest.raises(Failure) as failed:
                await c.store.delete_tenant("acme")
            assert failed.value.reason is Reason.BACKEND_LOST
            delattr(frozen, name)
            await until(lambda keys={b.key[:16] for b in mine}: not any(map(c.index.find, keys)))
        await c.store.delete_tenant("acme")
        assert await num_used(c) == 3 * len(theirs)
        assert all(await c.read(theirs))


async def test_s_11_blocks_that_a_return_would_make_whole_are_not_called_erased(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        mine = await c.put(1, tenant="acme")
        await c.stop(1)
        await c.stop(2)
        await until(lambda: len(c.view.up()) == 1)
        with pytest.raises(Failure) as failed:
            await c.store.delete_tenant("acme")
        assert failed.value.reason is Reason.BACKEND_LOST
        await asyncio.gather(c.start(1), c.start(2))
        await c.settled()
        await c.store.delete_tenant("acme")
        await until(lambda: not any(c.index.find(block.key[:16]) for block in mine))
        assert await num_used(c) == 0


async def test_s_11_a_shard_that_lies_on_no_member_is_erased_too(tmp_path) -> None:
    """A node that was replaced and is back has what it had."""
    async with cluster(tmp_path, 4, profile="2+1") as c:
        block = (await c.put(1, 128, tenant="acme"))[0]
        members = c.view.pgmap.members_of(block.key)
        other = next(n for n in range(4) if f"n{n:02d}" not in members)
        put_id = c.index.find(block.key[:16])[0]
        first = backend_of(c, c.node_of(block.key, 0))
        shard, _ = await first.get_shard(ShardRef(block.key[:16], 0, put_id))
        pieces = [shard[:128], shard[128:]]
        assert await backend_of(c, other).put_shard(pieces) is PutStatus.BUFFERED
        assert await c.store.delete_tenant("acme") == 1
        assert await num_used(c) == 0


async def test_a_block_that_was_evicted_while_it_was_read_is_absent_not_corrupt(tmp_path) -> None:
    async with cluster(tmp_path, 3, profile="2+1") as c:
        block = (await c.put(1, 128))[0]
        known = c.index.find(block.key[:16])
        assert await leader_of_key(c, block.key).evict([block.key[:16]], "test") == 1
        c.index.find = lambda key16: known
        _, status = await c.blocks._read_object(block.key, block.layout)
        assert status is ReadStatus.ABSENT
        assert c.blocks.num_corrupt == 0
