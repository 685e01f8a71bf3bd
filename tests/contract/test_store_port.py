"""The store port's contract: the same cases on the fake, our etcd client and the package etcd3."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local.etcd import EtcdProcess, running_etcd
from services.common.clock import SYSTEM_CLOCK
from services.common.store import (
    Compacted,
    Compare,
    Delete,
    LeaseLost,
    Put,
    StorePort,
    StoreUnavailable,
    WatchBatch,
    follow,
)
from services.common.store_etcd import EtcdStore, prefix_end
from services.common.store_etcd3 import Etcd3Store
from services.common.store_memory import MemoryStore


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdProcess]:
    """One etcd for the module; the tests that share it only compact it."""
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest.fixture(params=["memory", "etcd", "etcd3"])
async def store(request: pytest.FixtureRequest, etcd: EtcdProcess) -> AsyncIterator[StorePort]:
    makers = {
        "memory": MemoryStore,
        "etcd": lambda: EtcdStore(etcd.endpoint),
        "etcd3": lambda: Etcd3Store(etcd.endpoint),
    }
    made: StorePort = makers[request.param]()
    yield made
    await made.close()


@pytest.fixture
def root() -> str:
    """A prefix of this test alone: the etcd is shared."""
    return f"/test/{uuid.uuid4().hex}/"


async def compact(store: StorePort, revision: int) -> None:
    if isinstance(store, MemoryStore):
        store.compact()
    else:
        await store.compact(revision)  # type: ignore[attr-defined]


async def next_batch(batches: AsyncIterator[WatchBatch]) -> WatchBatch:
    async with asyncio.timeout(20):
        return await anext(batches)


async def test_every_adapter_is_a_store_port(store: StorePort) -> None:
    assert isinstance(store, StorePort)


async def test_a_key_keeps_its_create_revision_and_changes_its_mod_revision(
    store: StorePort, root: str
) -> None:
    assert await store.get(root + "a") is None
    first = await store.put(root + "a", b"1")
    second = await store.put(root + "a", b"2")
    item = await store.get(root + "a")
    assert item is not None
    assert (item.key, item.value, item.lease_id) == (root + "a", b"2", 0)
    assert (item.create_revision, item.mod_revision) == (first, second)
    assert second > first


async def test_a_deleted_key_begins_a_new_life(store: StorePort, root: str) -> None:
    first = await store.put(root + "a", b"1")
    assert await store.delete(root + "a")
    assert not await store.delete(root + "a")
    await store.put(root + "a", b"1")
    item = await store.get(root + "a")
    assert item is not None
    assert item.create_revision > first


async def test_a_list_is_ordered_and_holds_only_its_prefix(store: StorePort, root: str) -> None:
    for name in ("b/2", "b/1", "c", "b"):
        await store.put(root + name, name.encode())
    listing = await store.list(root + "b/")
    assert [item.key for item in listing.items] == [root + "b/1", root + "b/2"]
    assert listing.revision >= max(item.mod_revision for item in listing.items)
    assert await store.delete_prefix(root + "b/") == 2
    assert (await store.list(root + "b/")).items == ()
    assert await store.get(root + "b") is not None


async def test_bytes_come_back_as_they_went(store: StorePort, root: str) -> None:
    for value in (b"", bytes(range(256)), b"x" * 8192):
        await store.put(root + "a", value)
        item = await store.get(root + "a")
        assert item is not None
        assert item.value == value


async def test_a_transaction_writes_only_when_every_comparison_holds(
    store: StorePort, root: str
) -> None:
    absent = Compare(root + "a", create_revision=0)
    created = await store.txn([absent], [Put(root + "a", b"1"), Put(root + "b", b"1")])
    assert created.succeeded
    refused = await store.txn([absent], [Put(root + "a", b"2")], [Put(root + "c", b"else")])
    assert not refused.succeeded
    items = {item.key: item for item in (await store.list(root)).items}
    assert {key: item.value for key, item in items.items()} == {
        root + "a": b"1",
        root + "b": b"1",
        root + "c": b"else",
    }
    # One transaction is one revision.
    assert items[root + "a"].mod_revision == items[root + "b"].mod_revision == created.revision
    guard = Compare(root + "a", mod_revision=items[root + "a"].mod_revision, value=b"1")
    assert (await store.txn([guard], [Delete(root + "b")])).succeeded
    wrong = Compare(root + "a", mod_revision=items[root + "a"].mod_revision, value=b"2")
    assert not (await store.txn([wrong], [Delete(root + "a")])).succeeded
    assert await store.get(root + "b") is None


async def test_an_empty_transaction_tells_the_revision(store: StorePort, root: str) -> None:
    revision = await store.put(root + "a", b"1")
    result = await store.txn([Compare(root + "a", create_revision=0)], [])
    assert not result.succeeded
    assert result.revision >= revision


async def test_a_revoked_lease_takes_its_keys_along(store: StorePort, root: str) -> None:
    lease = await store.grant(30)
    assert lease.ttl_s >= 30
    await store.put(root + "a", b"1", lease.lease_id)
    await store.put(root + "b", b"1")
    assert await store.keep_alive(lease.lease_id) >= 30
    item = await store.get(root + "a")
    assert item is not None
    assert item.lease_id == lease.lease_id
    await store.revoke(lease.lease_id)
    assert [item.key for item in (await store.list(root)).items] == [root + "b"]
    await store.revoke(lease.lease_id)  # again is no error


async def test_a_lost_lease_is_told_to_whoever_uses_it(store: StorePort, root: str) -> None:
    lease = await store.grant(30)
    await store.revoke(lease.lease_id)
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease.lease_id)
    with pytest.raises(LeaseLost):
        await store.put(root + "a", b"1", lease.lease_id)
    with pytest.raises(LeaseLost):
        await store.txn([], [Put(root + "a", b"1", lease.lease_id)])


async def test_an_expired_lease_deletes_its_keys(store: StorePort, root: str) -> None:
    lease = await store.grant(1)
    revision = await store.put(root + "a", b"1", lease.lease_id)
    async with aclosing(store.watch(root, revision + 1)) as batches:  # type: ignore[type-var]
        assert (await next_batch(batches)).changes == ()
        change = (await next_batch(batches)).changes[0]
    assert (change.key, change.item) == (root + "a", None)


async def test_a_watch_stands_before_it_is_used_and_then_misses_nothing(
    store: StorePort, root: str
) -> None:
    start = await store.put(root + "before", b"")
    async with aclosing(store.watch(root, start + 1)) as batches:  # type: ignore[type-var]
        first = await next_batch(batches)
        assert first.changes == ()
        assert first.revision >= start
        seen = []
        for i in range(20):
            await store.put(f"{root}k{i % 3}", str(i).encode())
        await store.put(root[:-1] + "-not-ours", b"")
        await store.delete(root + "k0")
        while len(seen) < 21:
            seen += (await next_batch(batches)).changes
    values = [change.item.value if change.item else None for change in seen]
    assert values == [str(i).encode() for i in range(20)] + [None]
    revisions = [change.revision for change in seen]
    assert revisions == sorted(set(revisions))


async def test_a_watch_from_an_old_revision_replays_it(store: StorePort, root: str) -> None:
    start = await store.put(root + "a", b"1")
    await store.put(root + "a", b"2")
    async with aclosing(store.watch(root, start)) as batches:  # type: ignore[type-var]
        seen = []
        while len(seen) < 2:
            seen += (await next_batch(batches)).changes
    assert [change.item.value for change in seen if change.item] == [b"1", b"2"]


async def test_a_watch_of_forgotten_history_says_so(store: StorePort, root: str) -> None:
    start = await store.put(root + "a", b"1")
    last = await store.put(root + "a", b"2")
    await store.put(root + "a", b"3")
    await compact(store, last)

    async def read_all() -> None:
        async with aclosing(store.watch(root, start)) as batches:  # type: ignore[type-var]
            while True:
                await next_batch(batches)

    with pytest.raises(Compacted):
        await read_all()


async def test_two_keys_of_one_transaction_arrive_in_one_batch(store: StorePort, root: str) -> None:
    start = await store.put(root + "a", b"1")
    async with aclosing(store.watch(root, start + 1)) as batches:  # type: ignore[type-var]
        await next_batch(batches)
        await store.txn([], [Put(root + "a", b"2"), Put(root + "b", b"2")])
        batch = await next_batch(batches)
    assert [change.key for change in batch.changes] == [root + "a", root + "b"]


async def test_follow_yields_the_whole_state_after_each_change(store: StorePort, root: str) -> None:
    await store.put(root + "a", b"1")
    async with aclosing(follow(store, root)) as snapshots, asyncio.timeout(20):
        snapshot = await anext(snapshots)
        assert set(snapshot.items) == {root + "a"}
        await store.put(root + "b", b"1")
        await store.delete(root + "a")
        while set(snapshot.items) != {root + "b"}:
            snapshot = await anext(snapshots)
        assert snapshot.healthy


async def test_ur_55_compaction_under_a_follower_misses_and_doubles_nothing(
    store: StorePort, root: str
) -> None:
    async with aclosing(follow(store, root)) as snapshots, asyncio.timeout(60):
        snapshot = await anext(snapshots)
        for i in range(30):
            revision = await store.put(f"{root}{i:02}", b"")
            await compact(store, revision)
            if i % 3 == 2:
                await store.delete(f"{root}{i - 1:02}")
        wanted = {f"{root}{i:02}" for i in range(30) if i % 3 != 1}
        while set(snapshot.items) != wanted:
            snapshot = await anext(snapshots)


@pytest.mark.parametrize("make", [EtcdStore, Etcd3Store])
async def test_ur_55_a_follower_survives_a_killed_and_a_frozen_etcd(make, tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd, asyncio.timeout(100):
        store, writer = make(etcd.endpoint), EtcdStore(etcd.endpoint)
        lease = await writer.grant(60)
        await writer.put("/a/1", b"1", lease.lease_id)
        async with aclosing(follow(store, "/a/")) as snapshots:
            snapshot = await anext(snapshots)
            for end in (etcd.kill, etcd.stop):
                await end()
                while snapshot.healthy:
                    snapshot = await anext(snapshots)
                assert "/a/1" in snapshot.items  # the last known view stays
                await etcd.start()
                await writer.put("/a/2", str(end).encode())
                wanted = str(end).encode()
                while "/a/2" not in snapshot.items or snapshot.items["/a/2"].value != wanted:
                    snapshot = await anext(snapshots)
                assert snapshot.healthy
                assert set(snapshot.items) == {"/a/1", "/a/2"}
                # The lease outlived etcd.
                assert await writer.keep_alive(lease.lease_id) >= 60
        await store.close()
        await writer.close()


async def test_p_21_a_frozen_etcd_ends_the_watch_and_each_call(tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd, asyncio.timeout(100):
        store = EtcdStore(etcd.endpoint, timeout_s=0.5)
        await store.put("/a/1", b"1")
        async with aclosing(follow(store, "/a/")) as snapshots:
            snapshot = await anext(snapshots)
            etcd.pause()
            with pytest.raises(StoreUnavailable):
                await store.get("/a/1")
            # Only pings tell that the peer is frozen: the watch itself expects nothing.
            while snapshot.healthy:
                snapshot = await anext(snapshots)
            etcd.resume()
            while not snapshot.healthy:
                snapshot = await anext(snapshots)
            assert set(snapshot.items) == {"/a/1"}
        await store.close()


async def test_p_21_an_etcd_that_lost_its_disk_is_noticed_not_waited_for(tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd, asyncio.timeout(100):
        store = EtcdStore(etcd.endpoint)
        for i in range(50):
            await store.put(f"/a/{i}", b"")
        async with aclosing(follow(store, "/a/")) as snapshots:
            snapshot = await anext(snapshots)
            await etcd.wipe()
            await etcd.start()
            while not snapshot.history_lost:
                snapshot = await anext(snapshots)
            assert snapshot.items == {}
            await store.put("/a/new", b"")
            while not snapshot.items:
                snapshot = await anext(snapshots)
        await store.close()


async def test_the_fake_expires_leases_on_its_own_clock() -> None:
    from services.common.clock import VirtualClock

    clock = VirtualClock()
    store = MemoryStore(clock)
    lease = await store.grant(10)
    await store.put("a", b"", lease.lease_id)
    await clock.advance(6)
    assert await store.keep_alive(lease.lease_id) == 10
    await clock.advance(9.9)
    assert await store.get("a") is not None
    await clock.advance(0.2)
    assert await store.get("a") is None
    await store.close()
    assert SYSTEM_CLOCK.now_s() >= 0


def test_the_end_of_a_prefix_is_its_successor() -> None:
    assert prefix_end(b"/a/") == b"/a0"
    assert prefix_end(b"a\xff") == b"b"
    assert prefix_end(b"\xff\xff") == b"\0"
    assert prefix_end(b"") == b"\0"
