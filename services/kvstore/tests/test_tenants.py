"""Erasing a tenant: nothing of it is left, whatever was on its way, and others keep theirs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from services.common.errors import Failure, Reason
from services.common.service import running
from services.common.store_memory import MemoryStore
from services.kvstore.client import Block, PutStatus, StoreClient, tenant_tag
from services.kvstore.inspect_files import shards_in
from services.kvstore.store import main as store_main
from services.kvstore.store.blocks import NewBlock
from services.kvstore.tests.cluster_kit import cluster
from services.kvstore.tests.kit import (
    blocks_of,
    match_request,
    stack,
    store_config,
    token_ids,
    until,
)


def chain_of(tenant: str, seed: int) -> list[Block]:
    """Returns three blocks of a prompt; the root is no secret here."""
    root = tenant.encode().ljust(32, b".")
    return blocks_of(root, token_ids(seed, 384), tenant=tenant)


@pytest.fixture(params=["local", "posix"])
def backend_flags(request, tmp_path):
    if request.param == "local":
        return {}
    (tmp_path / "mount").mkdir()
    return {"backend": "posix", "at": str(tmp_path / "mount"), "capacity_bytes": 64 << 20}


async def test_s_11_delete_tenant_leaves_no_block_also_of_puts_under_way(
    tmp_path, backend_flags
) -> None:
    async with stack(tmp_path, **backend_flags) as s:
        begun: list[Block] = []
        ended: list[tuple[Block, PutStatus]] = []
        is_over = False

        async def write(tenant: str, first: int) -> None:
            for seed in range(first, first + 1000):
                if is_over:
                    return
                blocks = chain_of(tenant, seed)
                begun.extend(blocks)
                ended.extend(zip(blocks, await s.put_all(blocks), strict=True))

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(write("acme", 1000 * number))
            group.create_task(write("globex", 9000))
            await until(lambda: len(ended) >= 60)
            for _ in range(3):
                num_ended = len(ended)
                mine = [block for block in begun if block.tenant == "acme"]
                await s.store.delete_tenant("acme")
                left = await s.store.exists(b"".join(block.key for block in mine))
                assert not any(left), f"{sum(left)} of {len(left)} blocks are left"
                await until(lambda seen=num_ended: len(ended) >= seen + 30)
            is_over = True
        assert PutStatus.COMMITTED in {status for _, status in ended}
        await s.store.delete_tenant("acme")
        others = {
            block.key
            for block, status in ended
            if block.tenant == "globex" and status is PutStatus.COMMITTED
        }
        assert (await s.store.stat()).blocks == len(others)
        assert all(await s.store.exists(b"".join(others)))
        payloads = [block.payload for block in begun if block.tenant == "acme"]
    data = b"".join(path.read_bytes() for path in tmp_path.rglob("seg-*"))
    assert not [1 for payload in payloads if payload[100:200] in data], "bytes are left on the disk"
    assert {found.header.key16 for found in shards_in(tmp_path, verify=False)} <= {
        key[:16] for key in others
    }


@asynccontextmanager
async def two_stores(tmp_path) -> AsyncIterator[tuple[StoreClient, StoreClient]]:
    """Two STOREs of two machines on one mount."""
    (tmp_path / "mount").mkdir()
    members, clients = MemoryStore(), []
    async with AsyncExitStack() as all_of_it:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            config = store_config(tmp_path / name, backend="posix", at=str(tmp_path / "mount"))
            runtime = await all_of_it.enter_async_context(
                running("store", config, store_main.build, store=members)
            )
            client = StoreClient(runtime.channels, runtime.address)
            all_of_it.push_async_callback(client.close)
            clients.append(client)
        yield clients[0], clients[1]


async def eventually_there(store: StoreClient, blocks: list[Block]) -> None:
    """Waits until a store knows blocks that another one wrote."""
    keys = b"".join(block.key for block in blocks)
    while not all(await store.exists(keys)):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_what_one_machine_stores_another_hits_and_a_tenant_goes_from_both(tmp_path) -> None:
    async with two_stores(tmp_path) as (one, two):
        mine, theirs = chain_of("acme", 1), chain_of("globex", 2)
        later = chain_of("acme", 3)
        for block in (*mine, *theirs):
            assert await one.put(block) is PutStatus.COMMITTED
        await eventually_there(two, [*mine, *theirs])
        async with two.fetch(b"".join(b.key for b in mine), mine[0].layout) as parts:
            found = {part.index: part.payload async for part in parts}
        assert [found[number] for number in range(3)] == [block.payload for block in mine]
        # A block that another machine stored is not stored twice.
        assert await two.put(mine[0]) is PutStatus.EXISTS
        for block in later:
            assert await two.put(block) is PutStatus.COMMITTED
        await eventually_there(one, later)
        # Each STORE is asked: what is on its way is known only where it is put.
        assert await one.delete_tenant("acme") == 6
        assert await two.delete_tenant("acme") == 0
        data = b"".join(path.read_bytes() for path in (tmp_path / "mount").rglob("*/seg-*"))
        for block in (*mine, *later):
            assert block.payload[100:200] not in data
        for store in (one, two):
            keys = b"".join(block.key for block in (*mine, *later))
            assert not any(await store.exists(keys))
            await eventually_there(store, theirs)


async def test_s_11_delete_tenant_leaves_no_byte_on_nodes_also_without_a_first_shard(
    tmp_path,
) -> None:
    async with cluster(tmp_path, 4, profile="2+2") as c:
        mine = await c.put(1, tenant="acme")
        theirs = await c.put(2, tenant="globex")
        # A put that was never committed, as a writer that died leaves it: staging.
        stray = blocks_of(bytes(32), token_ids(3, 128), tenant="acme")[0]
        assert await c.blocks.write(_new_block(stray)) is not None
        # The node with the first shard of some of them is not there.
        away = c.node_of(mine[1].key, 0)
        await c.stop(away)
        await until(lambda: len(c.view.up()) == 3)
        await c.settled()
        # A group that was taken over may have made a block of the stray (docs/adr/0021).
        assert await c.store.delete_tenant("acme") in (4, 5)
        data = b"".join(
            path.read_bytes() for path in tmp_path.rglob("seg-*") if f"node-{away}" not in str(path)
        )
        for block in (*mine, stray):
            assert not any(block.payload[at : at + 64] in data for at in range(0, 4900, 100))
            assert block.key[:16] not in data
        assert all(await c.read(theirs))


def _new_block(block: Block) -> NewBlock:
    return NewBlock(
        key=block.key,
        parent=block.parent_key,
        layout=block.layout,
        block_index=block.index,
        num_tokens=128,
        ttl_class=1,
        payload=block.payload,
        tenant_tag=tenant_tag(block.tenant),
    )


async def test_two_stores_of_one_folder_are_refused_and_a_storage_away_is_named(tmp_path) -> None:
    (tmp_path / "mount").mkdir()
    config = store_config(tmp_path, backend="posix", at=str(tmp_path / "mount"))
    async with running("store", config, store_main.build):
        with pytest.raises(Failure) as refused:
            await _start(config)
    assert refused.value.reason is Reason.CONFLICT
    (tmp_path / "mount").rename(tmp_path / "elsewhere")
    with pytest.raises(Failure) as away:
        await _start(config)
    assert away.value.reason is Reason.BACKEND_LOST
    (tmp_path / "mount").mkdir()
    with pytest.raises(Failure):
        await _start(config)
    assert not list((tmp_path / "mount").iterdir()), "an empty mount point is not written to"


async def _start(config) -> None:
    try:
        async with running("store", config, store_main.build):
            pass
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def test_ur_38_cross_tenant_hits_are_none_in_any_scope(tmp_path) -> None:
    tokens = token_ids(20, 600)
    async with stack(tmp_path) as s:
        for tenant in ("acme", "globex", "initech"):
            answer = await s.check.match(match_request(tokens, tenant=tenant), timeout_s=30)
            assert answer.hit.stored_tokens == 0, tenant
            blocks = blocks_of(answer.namespace.root, tokens, tenant=tenant)
            assert set(await s.put_all(blocks)) == {PutStatus.COMMITTED}
            await s.stored(match_request(tokens, tenant=tenant), 384)
