"""The contracts of CHECK, STORE and the window-state directory: the same cases on the fake and on
the real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import (
    check_pb2,
    check_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
    swa_pb2,
    swa_pb2_grpc,
)

from services.common.errors import Failure, Reason
from services.common.membership import Member
from services.common.rpc_client import Channels, call, stream_call
from services.common.service import running
from services.common.shm_ring import SlotRing
from services.common.store_memory import MemoryStore
from services.kvstore.check import main as check_main
from services.kvstore.client import (
    CheckClient,
    Location,
    PutStatus,
    StoreClient,
    SwaDirectoryClient,
    SwaKey,
)
from services.kvstore.config import CheckConfig, StoreConfig, SwaConfig
from services.kvstore.fake import fake_kvstore
from services.kvstore.store import main as store_main
from services.kvstore.swa import main as swa_main
from services.kvstore.tests.kit import LAYOUT, blocks_of, match_request, token_ids


@dataclass
class System:
    """Where the three services are."""

    channels: Channels
    check_address: str
    store_address: str
    directory_address: str
    store: StoreClient
    check: CheckClient

    def directory(self) -> SwaDirectoryClient:
        """Returns a client that knows one shard."""
        member = Member(role="entrypoint", instance_id="e0", address=self.directory_address)
        return SwaDirectoryClient(self.channels, lambda: [member])

    async def stored(self, request, num_tokens: int):
        """Matches until so much is stored; the test's deadline bounds the wait."""
        while True:
            answer = await self.check.match(request, timeout_s=30)
            if answer.hit.stored_tokens == num_tokens:
                return answer
            await asyncio.sleep(0.01)


@pytest.fixture(params=["fake", "real"])
async def system(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        channels = Channels()
        stack.push_async_callback(channels.close)
        if request.param == "fake":
            fake = await stack.enter_async_context(fake_kvstore())
            addresses = (fake.address, fake.address, fake.address)
        else:
            config = StoreConfig(
                dir=tmp_path / "kv", capacity_bytes=8 << 20, segment_bytes=1 << 20,
                payload_bytes=5000,
            )  # fmt: skip
            members = MemoryStore()
            store = await stack.enter_async_context(
                running("store", config, store_main.build, store=members)
            )
            # A directory shard that is a member as an entrypoint is, so that CHECK asks it.
            shard = await stack.enter_async_context(
                running("swa", SwaConfig(), swa_main.build, role="entrypoint", store=members)
            )
            check = await stack.enter_async_context(
                running(
                    "check",
                    CheckConfig(store=store.address, swa_timeout_ms=30_000),
                    check_main.build,
                    store=members,
                )
            )
            await check.view.wait_for(lambda view: bool(view.members("entrypoint")))
            addresses = (check.address, store.address, shard.address)
        client = StoreClient(channels, addresses[1])
        stack.push_async_callback(client.close)
        yield System(channels, *addresses, client, CheckClient(channels, addresses[0]))


async def test_put_match_fetch(system: System) -> None:
    tokens = token_ids(1, 700)
    cold = await system.check.match(match_request(tokens), timeout_s=30)
    blocks = blocks_of(cold.namespace.root, tokens)
    statuses = await asyncio.gather(*(system.store.put(block) for block in blocks))
    assert set(statuses) == {PutStatus.COMMITTED}
    warm = await system.stored(match_request(tokens), 512)
    assert (warm.hit.hit_tokens, warm.hit.ended_by, warm.hit.replay) == (384, "swa_miss", True)
    assert await system.store.exists(warm.hit.block_keys + bytes(32)) == b"\1" * 5 + b"\0"
    async with system.store.fetch(warm.hit.block_keys, LAYOUT) as parts:
        fetched = {part.index: part.payload async for part in parts}
    assert fetched == {i: block.payload for i, block in enumerate(blocks)}


async def test_a_window_state_in_the_directory_makes_the_hit_whole(system: System) -> None:
    tokens = token_ids(2, 700)
    root = (await system.check.match(match_request(tokens), timeout_s=30)).namespace.root
    blocks = blocks_of(root, tokens)
    for block in blocks:
        await system.store.put(block)
    location = Location(512, "engine-1", "127.0.0.1:9", 3, 77, b"d" * 16, False, 5)
    key = SwaKey(blocks[3].key[:16], LAYOUT)
    directory = system.directory()
    assert await directory.publish(key, location, timeout_s=30)
    warm = await system.stored(match_request(tokens), 512)
    assert (warm.hit.hit_tokens, warm.hit.replay, warm.hit.ended_by) == (512, False, "cap")
    assert (warm.hit.swa.position, warm.hit.swa.slot) == (512, 3)
    assert await directory.withdraw(key, "engine-1")
    again = await system.check.match(match_request(tokens), timeout_s=30)
    assert (again.hit.hit_tokens, again.hit.HasField("swa")) == (384, False)


async def test_directory_rules_over_the_wire(system: System) -> None:
    directory = system.directory()
    key, other = SwaKey(bytes([1]) * 16, LAYOUT), SwaKey(bytes([2]) * 16, LAYOUT)
    exact = Location(128, "h", "a:1", 1, 10, b"d" * 16, False, 7)
    assert await directory.publish(key, exact, timeout_s=30)
    assert not await directory.publish(key, replace(exact, approximate=True, slot=2))
    assert await directory.lookup([other, key]) == [None, exact]
    assert not await directory.withdraw(key, "somebody-else")
    # The host comes back in a new life: what the old one announced is gone.
    assert await directory.publish(other, replace(exact, host_epoch=8))
    assert await directory.lookup([key]) == [None]
    stub = swa_pb2_grpc.SwaDirectoryServiceStub(system.channels.get(system.directory_address))
    for bad in (
        swa_pb2.PublishRequest(),
        swa_pb2.PublishRequest(key=swa_pb2.SwaKey(key16=b"short", layout_digest=LAYOUT)),
    ):
        with pytest.raises(Failure) as failure:
            await call(stub.Publish, bad, timeout_s=5)
        assert failure.value.reason is Reason.INVALID_REQUEST


async def test_refused_puts_are_answers(system: System) -> None:
    tokens = token_ids(3, 400)
    root = (await system.check.match(match_request(tokens), timeout_s=30)).namespace.root
    blocks = blocks_of(root, tokens)
    assert await system.store.put(blocks[1]) is PutStatus.NO_PARENT
    assert await system.store.put(replace(blocks[0], extra=bytes(36))) is PutStatus.KEY_MISMATCH
    assert await system.store.put(replace(blocks[0], layout=b"")) is PutStatus.KEY_MISMATCH
    assert await system.store.put(blocks[0]) is PutStatus.COMMITTED
    assert await system.store.put(blocks[0]) is PutStatus.EXISTS
    assert await system.store.put(blocks[1]) is PutStatus.COMMITTED


async def test_p_35_the_same_block_put_by_many_at_once_is_stored_once(system: System) -> None:
    tokens = token_ids(4, 200)
    root = (await system.check.match(match_request(tokens), timeout_s=30)).namespace.root
    block = blocks_of(root, tokens)[0]
    statuses = await asyncio.gather(*(system.store.put(block) for _ in range(20)))
    assert sorted(status.name for status in statuses) == ["COMMITTED"] + ["EXISTS"] * 19
    assert (await system.store.stat()).blocks == 1


async def test_fetch_into_slots_and_cancel(system: System) -> None:
    tokens = token_ids(5, 400)
    root = (await system.check.match(match_request(tokens), timeout_s=30)).namespace.root
    blocks = blocks_of(root, tokens)
    for block in blocks:
        await system.store.put(block)
    keys = b"".join(block.key for block in blocks)
    ring = SlotRing.create("kv-contract", 8192, 3)
    try:
        async with system.store.fetch(keys, LAYOUT, ring=ring, slots=[2, 0, 1]) as parts:
            assert [part.is_ok async for part in parts] == [True] * 3
        for slot, block in zip((2, 0, 1), blocks, strict=True):
            assert bytes(ring.view(slot)[:5000]) == block.payload
        stub = store_pb2_grpc.StoreServiceStub(system.channels.get(system.store_address))
        answer = await call(stub.CancelFetch, store_pb2.CancelFetchRequest(fetch_id=5), timeout_s=5)
        assert not answer.was_running
        twice = store_pb2.FetchRequest(keys=keys, layout_fingerprint=LAYOUT, slots=[0, 0, 1])
        twice.ring.name, twice.ring.slot_bytes = ring.ref.name, ring.ref.slot_bytes
        twice.ring.num_slots, twice.ring.owner_epoch = ring.ref.num_slots, ring.ref.owner_epoch
        with pytest.raises(Failure) as failure:
            await _drain(stub.Fetch, twice)
        assert failure.value.reason is Reason.INVALID_REQUEST
    finally:
        ring.close()


async def _drain(method, request) -> None:
    async with stream_call(method, request, timeout_s=5) as stream:
        async for _ in stream:
            pass


async def test_the_log_is_a_snapshot_then_changes_and_resumes_by_number(system: System) -> None:
    tokens = token_ids(6, 400)
    root = (await system.check.match(match_request(tokens), timeout_s=30)).namespace.root
    blocks = blocks_of(root, tokens)
    await system.store.put(blocks[0])
    stub = store_pb2_grpc.StoreServiceStub(system.channels.get(system.store_address))
    async with stream_call(stub.FollowCommits, store_pb2.FollowCommitsRequest()) as stream:
        first = await stream.read()
        assert (first.reset, len(first.entries)) == (True, 80)
        while not (part := await stream.read()).level:
            pass
        await system.store.put(blocks[1])
        while not (part := await stream.read()).entries:
            pass
        assert (part.reset, len(part.entries), part.log_id) == (False, 80, first.log_id)
        seen = part.next_seq
    await system.store.put(blocks[2])
    resume = store_pb2.FollowCommitsRequest(log_id=first.log_id, from_seq=seen)
    async with stream_call(stub.FollowCommits, resume) as stream:
        part = await stream.read()
        assert (part.reset, part.entries[12:28]) == (False, blocks[2].key[:16])
    other_life = store_pb2.FollowCommitsRequest(log_id="other", from_seq=seen)
    async with stream_call(stub.FollowCommits, other_life) as stream:
        part = await stream.read()
        assert (part.reset, len(part.entries)) == (True, 240)


async def test_tenant_deletion_touch_and_pin(system: System) -> None:
    tokens = token_ids(7, 200)
    root = (await system.check.match(match_request(tokens), timeout_s=30)).namespace.root
    block = blocks_of(root, tokens, tenant="acme")[0]
    await system.store.put(block)
    stub = store_pb2_grpc.StoreServiceStub(system.channels.get(system.store_address))
    pin = store_pb2.PinRequest(pin_id="p", keys=block.key)
    assert (await call(stub.Pin, pin, timeout_s=5)).pinned == 1
    assert (await system.store.stat()).pins >= 1
    assert (await call(stub.Pin, store_pb2.PinRequest(pin_id="p"), timeout_s=5)).pinned == 0
    touch = store_pb2.TouchRequest(keys=block.key, ttl_class=records_pb2.TTL_CLASS_CHAT)
    assert (await call(stub.Touch, touch, timeout_s=5)).touched == 0  # chat, this epoch, already
    assert await system.store.delete_tenant("globex") == 0
    assert await system.store.delete_tenant("acme") == 1
    assert (await system.store.stat()).blocks == 0
    for method, bad in (
        (stub.DeleteTenant, store_pb2.DeleteTenantRequest(domain_id=bytes(16))),
        (stub.Pin, store_pb2.PinRequest(keys=block.key)),
        (stub.Exists, store_pb2.ExistsRequest(keys=b"x")),
    ):
        with pytest.raises(Failure) as failure:
            await call(method, bad, timeout_s=5)
        assert failure.value.reason is Reason.INVALID_REQUEST


async def test_unpin_is_idempotent(system: System) -> None:
    stub = check_pb2_grpc.CheckServiceStub(system.channels.get(system.check_address))
    for pin_id in ("", "never-was", "never-was"):
        await call(stub.Unpin, check_pb2.UnpinRequest(pin_id=pin_id), timeout_s=5)
