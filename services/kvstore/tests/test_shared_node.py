"""Records over a storage that others use too: whose put a key names, and what if that goes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from services.common.clock import SYSTEM_CLOCK
from services.kvstore.formats import ShardHeader
from services.kvstore.storage import shared_node
from services.kvstore.storage.node import record_of
from services.kvstore.storage.shared_node import SharedNode
from services.kvstore.tests.backend_suite import shard

pytestmark = pytest.mark.parametrize("shared", ["posix"], indirect=True)


async def open_node(shared, name: str) -> SharedNode:
    return await SharedNode.open_shared(await shared.writer(name), None, SYSTEM_CLOCK)


async def commit(node: SharedNode, number: int, put_id: int) -> bytes:
    """Stores a block of now as PUT does: the shard, then its record. Returns its short key."""
    ref, _, pieces = shard(number, put_id)
    header = ShardHeader.parse(pieces[0])
    assert header is not None
    header = replace(header, created_s=int(time.time()))
    assert (await node.backend.put_shard([header.pack(), *pieces[1:]])).is_stored
    assert node.meta.adopt(ref.key16, record_of(header))
    return ref.key16


def put_of(node: SharedNode, key16: bytes) -> int | None:
    fields = node.meta.get(key16)
    return fields and fields[0]


async def remove(node: SharedNode, key16: bytes) -> None:
    """Evicts the block with all that shares its segment, so that others see it go."""
    keys = [await commit(node, number, put_id=1) for number in range(100, 108)]
    assert await node.evict([key16, *keys], "lru") == 9


async def two_puts_of_one_key(shared) -> tuple[SharedNode, SharedNode, bytes]:
    """Returns two nodes that stored the same block at once; each names its own."""
    one, two = await open_node(shared, "w1"), await open_node(shared, "w2")
    key16 = await commit(one, 1, put_id=11)
    assert await commit(two, 1, put_id=12) == key16
    await one.learn()
    await two.learn()
    assert (put_of(one, key16), put_of(two, key16)) == (11, 12)
    return one, two, key16


async def test_the_other_put_is_named_when_ours_is_evicted(shared) -> None:
    one, two, key16 = await two_puts_of_one_key(shared)
    assert await one.evict([key16], "lru") == 1
    assert put_of(one, key16) is None
    await one.learn()
    assert put_of(one, key16) == 12
    await two.learn()
    assert put_of(two, key16) == 12


async def test_a_third_node_names_the_second_put_when_the_first_is_gone(shared) -> None:
    third = await open_node(shared, "w3")
    one, two, key16 = await two_puts_of_one_key(shared)
    await third.learn()
    named = put_of(third, key16)
    first, second = (one, 12) if named == 11 else (two, 11)
    await remove(first, key16)
    await third.learn()
    assert put_of(third, key16) == second


async def test_a_second_put_that_went_first_is_not_named(shared) -> None:
    one, two, key16 = await two_puts_of_one_key(shared)
    await remove(two, key16)
    await one.learn()
    await one.evict([key16], "lru")
    await one.learn()
    assert put_of(one, key16) is None


async def test_an_erased_tenant_has_no_second_put(shared) -> None:
    one, _, key16 = await two_puts_of_one_key(shared)
    assert await one.delete_tenant(bytes(16)) == 2
    await one.learn()
    assert put_of(one, key16) is None


async def test_orphans_that_are_freed_leave_the_second_put(shared, monkeypatch) -> None:
    one, _, key16 = await two_puts_of_one_key(shared)
    monkeypatch.setattr("services.kvstore.storage.node._ORPHAN_AGE_S", -10)
    await one.free_orphans()
    await one.evict([key16], "lru")
    await one.learn()
    assert put_of(one, key16) == 12


async def test_no_more_second_puts_are_kept_than_the_bound(shared, monkeypatch) -> None:
    monkeypatch.setattr(shared_node, "_MAX_SPARE", 3)
    one, two = await open_node(shared, "w1"), await open_node(shared, "w2")
    keys = [await commit(one, number, put_id=11) for number in range(6)]
    for number in range(6):
        await commit(two, number, put_id=12)
    await one.learn()
    await one.evict(keys, "lru")
    await one.learn()
    assert sum(put_of(one, key16) == 12 for key16 in keys) == 3
