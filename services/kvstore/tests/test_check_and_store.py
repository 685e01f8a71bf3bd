"""CHECK and STORE together, real servers on loopback: what is put is matched and fetched again."""

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest
from pelagos.engine.v1 import records_pb2

from services.common.errors import Failure, Reason
from services.common.service import running
from services.common.shm_ring import SlotRing
from services.kvstore.check import main as check_main
from services.kvstore.client import (
    CheckClient,
    PutStatus,
    StoreClient,
    TtlClass,
    layout_fingerprint,
)
from services.kvstore.config import CheckConfig
from services.kvstore.store import main as store_main
from services.kvstore.tests.kit import (
    LAYOUT,
    blocks_of,
    match_request,
    payload_of,
    stack,
    store_config,
    token_ids,
    until,
)


async def root_of(s, tokens: bytes, **more: object) -> bytes:
    answer = await s.check.match(match_request(tokens, **more), timeout_s=30)
    return answer.namespace.root


async def fetch_all(store: StoreClient, keys: bytes, **more):
    async with store.fetch(keys, LAYOUT, **more) as parts:
        return {part.index: part async for part in parts}


async def test_a_second_identical_prompt_hits_what_the_rule_says(tmp_path) -> None:
    tokens = token_ids(1, 1000)
    async with stack(tmp_path) as s:
        cold = await s.check.match(match_request(tokens), timeout_s=30)
        assert (cold.hit.hit_tokens, cold.hit.ended_by) == (0, "absent")
        assert len(cold.hit.block_keys) == 7 * 32
        blocks = blocks_of(cold.namespace.root, tokens)
        assert b"".join(block.key for block in blocks) == cold.hit.block_keys
        assert await s.put_all(blocks) == [PutStatus.COMMITTED] * 7
        warm = await s.stored(match_request(tokens), 768)
        # No window state anywhere: one block is given back and replayed (T-HIT-2).
        assert (warm.hit.hit_tokens, warm.hit.replay, warm.hit.replay_from) == (640, True, 640)
        assert warm.hit.ended_by == "swa_miss"
        fetched = await fetch_all(s.store, warm.hit.block_keys[: 32 * 6], pin_id=warm.hit.pin_id)
        assert [fetched[i].payload for i in range(6)] == [b.payload for b in blocks[:6]]
        assert max(part.watermark for part in fetched.values()) == 6
        assert await s.put_all(blocks) == [PutStatus.EXISTS] * 7
        assert (await s.store.stat()).blocks == 7


async def test_blocks_go_through_shared_memory_both_ways(tmp_path) -> None:
    tokens = token_ids(2, 600)
    ring = SlotRing.create("kv-test", 8192, 8)
    try:
        async with stack(tmp_path) as s:
            blocks = blocks_of(await root_of(s, tokens), tokens)
            puts = []
            for block in blocks:
                slot = ring.allocate()
                ring.view(slot)[:5000] = block.payload
                shared = replace(block, payload=b"", slot=slot, num_bytes=5000)
                puts.append((slot, asyncio.create_task(s.store.put(shared, ring))))
            for slot, put in puts:
                assert await put is PutStatus.COMMITTED
                ring.view(slot)[:] = bytes(8192)
                ring.free(slot)
            keys = b"".join(block.key for block in blocks)
            slots = [ring.allocate() for _ in blocks]
            fetched = await fetch_all(s.store, keys, ring=ring, slots=slots)
            assert all(part.is_ok and not part.payload for part in fetched.values())
            for slot, block in zip(slots, blocks, strict=True):
                assert bytes(ring.view(slot)[:5000]) == block.payload
    finally:
        ring.close()


async def test_ur_43_a_missing_block_is_named_and_the_watermark_stops_before_it(tmp_path) -> None:
    tokens = token_ids(3, 700)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens)
        await s.put_all(blocks)
        keys = b"".join(block.key for block in blocks)
        broken = keys[:64] + bytes(32) + keys[96:]
        fetched = await fetch_all(s.store, broken)
        assert [fetched[i].reason for i in range(5)] == ["ok", "ok", "absent", "ok", "ok"]
        assert max(part.watermark for part in fetched.values()) == 2


async def test_ur_36_two_keys_with_one_index_key_never_give_each_others_bytes(tmp_path) -> None:
    tokens = token_ids(4, 256)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens)
        await s.put_all(blocks)
        collision = blocks[0].key[:16] + os.urandom(16)
        fetched = await fetch_all(s.store, collision)
        assert (fetched[0].is_ok, fetched[0].payload) == (False, b"")
        # The block whose index key it shares is still there.
        assert (await fetch_all(s.store, blocks[0].key))[0].payload == blocks[0].payload


async def test_another_layout_gets_nothing(tmp_path) -> None:
    tokens = token_ids(5, 256)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens)
        await s.put_all(blocks)
        async with s.store.fetch(blocks[0].key, bytes(32)) as parts:
            assert [part.is_ok async for part in parts] == [False]
        assert (await fetch_all(s.store, blocks[0].key))[0].is_ok


async def test_ur_45_everything_acknowledged_hits_again_after_a_restart(tmp_path) -> None:
    prompts = [token_ids(seed, 400) for seed in range(30)]
    async with stack(tmp_path) as s:
        for tokens in prompts:
            blocks = blocks_of(await root_of(s, tokens), tokens)
            assert await s.put_all(blocks) == [PutStatus.COMMITTED] * 3
    async with stack(tmp_path) as s:
        for tokens in prompts:
            answer = await s.stored(match_request(tokens), 256)
            keys = answer.hit.block_keys
            fetched = await fetch_all(s.store, keys)
            for i in range(3):
                assert fetched[i].payload == payload_of(keys[32 * i : 32 * i + 32])


async def test_check_finds_blocks_again_when_the_store_restarts_and_the_other_way(tmp_path) -> None:
    tokens = token_ids(6, 400)
    config = store_config(tmp_path)
    key_file = str(tmp_path / "cluster.key")
    async with running("store", config, store_main.build) as store:
        address = store.address
        check_config = CheckConfig(store=address, cluster_key_file=key_file)
        async with running("check", check_config, check_main.build) as check:
            client = StoreClient(check.channels, address)
            matcher = CheckClient(check.channels, check.address)
            first = await matcher.match(match_request(tokens), timeout_s=30)
            for block in blocks_of(first.namespace.root, tokens):
                await client.put(block)
            await client.close()
        # CHECK again, store still there: the snapshot tells it.
        async with running("check", check_config, check_main.build) as check:
            matcher = CheckClient(check.channels, check.address)
            again = await matcher.match(match_request(tokens), timeout_s=30)
            assert again.hit.stored_tokens == 256
            assert again.namespace.root == first.namespace.root
            await store.server.stop(0)
            # The store is away: the copy answers on, and says that it may be behind.
            while True:
                answer = await matcher.match(match_request(token_ids(7, 400)), timeout_s=30)
                if answer.hit.ended_by == "lagging":
                    break
                await asyncio.sleep(0.01)
            assert (
                await matcher.match(match_request(tokens), timeout_s=30)
            ).hit.stored_tokens == 256


async def test_ur_38_another_tenant_never_hits_and_keys_tell_it_nothing(tmp_path) -> None:
    tokens = token_ids(8, 600)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens)
        await s.put_all(blocks)
        await s.stored(match_request(tokens), 384)
        for other in (
            {"tenant": "globex"},
            {"scope": "user", "user_salt": "x"},
            {"scope": "session", "user_salt": "x"},
            {"scope": "global"},
            {"adapter": "x"},
            {"model_id": "x"},
        ):
            answer = await s.check.match(match_request(tokens, **other), timeout_s=30)
            assert (answer.hit.hit_tokens, answer.hit.stored_tokens) == (0, 0), other
            assert not set(_keys(answer)) & {block.key for block in blocks}


def _keys(answer) -> list[bytes]:
    keys = answer.hit.block_keys
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


@pytest.mark.parametrize(
    "missing", [{"tenant": ""}, {"model_id": ""}, {"layout_fingerprint": b""}, {"scope": "x"}]
)
async def test_a_request_without_identity_is_uncacheable(tmp_path, missing) -> None:
    async with stack(tmp_path) as s:
        answer = await s.check.match(match_request(token_ids(9, 600), **missing), timeout_s=30)
        assert (answer.hit.ended_by, answer.hit.block_keys) == ("namespace", b"")
        assert answer.namespace.store_policy == records_pb2.STORE_POLICY_NONE
        with pytest.raises(Failure) as failure:
            await s.check.match(match_request(b"abc"), timeout_s=30)
        assert failure.value.reason is Reason.INVALID_REQUEST


async def test_puts_that_do_not_agree_are_answered_and_store_nothing(tmp_path) -> None:
    tokens = token_ids(10, 600)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens)
        foreign = replace(blocks[0], token_ids=blocks[1].token_ids)
        assert await s.store.put(foreign) is PutStatus.KEY_MISMATCH
        assert await s.store.put(blocks[2]) is PutStatus.NO_PARENT
        assert (await s.store.stat()).blocks == 0
        assert await s.put_all(blocks) == [PutStatus.COMMITTED] * 4


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_block_whose_number_does_not_follow_its_parents_is_refused(
    tmp_path, is_stored: bool
) -> None:
    """Its number decides whether it is evicted before its parent or after it."""
    tokens = token_ids(10, 600)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens)
        odd = [replace(blocks[1], index=index) for index in (1, 3, 1_000)]
        if is_stored:
            assert await s.store.put(blocks[0]) is PutStatus.COMMITTED
        first, *others = await s.put_all([*blocks[:1], *odd])
        assert first.is_stored
        assert others == [PutStatus.KEY_MISMATCH] * 3
        assert await s.store.put(blocks[1]) is PutStatus.COMMITTED


async def test_ur_33_a_slot_that_changed_under_a_put_is_refused(tmp_path) -> None:
    tokens = token_ids(11, 200)
    ring = SlotRing.create("kv-test", 8192, 1)
    try:
        async with stack(tmp_path) as s:
            block = blocks_of(await root_of(s, tokens), tokens)[0]
            slot = ring.allocate()
            ring.view(slot)[:5000] = block.payload
            shared = replace(block, payload=b"", slot=slot, num_bytes=5000)
            put = asyncio.create_task(s.store.put(shared, ring))
            await asyncio.sleep(0)  # the request is made, with the digest of what is there now
            ring.view(slot)[0] ^= 1
            assert await put is PutStatus.STALE_RING
            assert (await s.store.stat()).blocks == 0
    finally:
        ring.close()


async def test_drift_guard_an_exact_block_replaces_an_approximate_one_never_back(tmp_path) -> None:
    tokens = token_ids(12, 200)
    async with stack(tmp_path) as s:
        exact = blocks_of(await root_of(s, tokens), tokens)[0]
        approximate = replace(exact, payload=bytes(5000), approximate=True)
        assert await s.store.put(approximate) is PutStatus.COMMITTED
        assert (await fetch_all(s.store, exact.key))[0].approximate
        assert await s.store.put(approximate) is PutStatus.EXISTS
        assert await s.store.put(exact) is PutStatus.COMMITTED
        assert await s.store.put(approximate) is PutStatus.EXISTS
        part = (await fetch_all(s.store, exact.key))[0]
        assert (part.approximate, part.payload) == (False, exact.payload)
        assert (await s.store.stat()).blocks == 1


async def test_a_ring_of_another_epoch_is_refused(tmp_path) -> None:
    ring = SlotRing.create("kv-test", 8192, 1)
    name_taken = replace(ring.ref, owner_epoch=ring.ref.owner_epoch + 1)
    try:
        async with stack(tmp_path) as s:
            stale = SlotRing(name_taken, ring._mapping, ring._path, is_owner=False)
            async with s.store.fetch(bytes(32), LAYOUT) as parts:
                assert [part.reason async for part in parts] == ["absent"]
            # Not even a slot is touched: the whole fetch is refused, every block is lost.
            async with s.store.fetch(bytes(32), LAYOUT, ring=stale, slots=[0]) as parts:
                assert [part.reason async for part in parts] == ["lost"]
            s.store._stub = _NoCancel(s.store._stub)
            with pytest.raises(Failure):
                await _fetch_and_leave(s.store, stale)
    finally:
        ring.close()


async def _fetch_and_leave(store, ring) -> None:
    async with store.fetch(bytes(32), LAYOUT, ring=ring, slots=[0]):
        pass


class _NoCancel:
    """A store that does not answer CancelFetch: the slots must stay out of use."""

    def __init__(self, stub) -> None:
        self.Fetch = stub.Fetch

    @property
    def CancelFetch(self):
        raise Failure(Reason.BACKEND_LOST, "away")


async def test_leaving_a_fetch_gives_the_slots_back_untouched_from_then_on(tmp_path) -> None:
    tokens = token_ids(13, 128 * 40)
    ring = SlotRing.create("kv-test", 8192, 40)
    try:
        async with stack(tmp_path) as s:
            blocks = blocks_of(await root_of(s, tokens), tokens)
            await s.put_all(blocks)
            keys = b"".join(block.key for block in blocks)
            for num_read in (0, 1, 7):
                async with s.store.fetch(
                    keys, LAYOUT, ring=ring, slots=range(len(blocks))
                ) as parts:
                    for _ in range(num_read):
                        await anext(parts)
                marks = bytes([0xA5]) * 8192
                for slot in range(40):
                    ring.view(slot)[:] = marks
                await fetch_all(s.store, keys)  # time for a late write to show
                assert all(bytes(ring.view(slot)) == marks for slot in range(40))
            runtime = s.store_runtime
            assert runtime.census.snapshot()["kv.fetch"] == {"transfers": 0, "bytes": 0}
    finally:
        ring.close()


async def test_ur_41_the_disk_never_passes_the_limit_and_old_blocks_make_room(tmp_path) -> None:
    limit, payload, slot = 16 << 20, 61_000, 61_440
    document = {"block_tokens": 128, "fmt": 1, "payload_bytes": payload}
    one: dict[str, Any] = {"layout": layout_fingerprint(document), "num_bytes": payload}
    disk = {"capacity_bytes": limit, "segment_bytes": 2 << 20, "payload_bytes": payload}
    async with stack(tmp_path, **disk) as s:
        root = await root_of(s, token_ids(0, 200))
        largest = 0
        statuses = []
        for seed in range(4 * limit // (slot * 4)):
            statuses += await s.put_all(blocks_of(root, token_ids(seed, 512), **one))
            largest = max(largest, _disk_bytes(tmp_path / "kv"))
        assert largest <= limit * 1.05
        # Far more than fits was offered; most of it was taken because eviction made room.
        assert statuses.count(PutStatus.COMMITTED) > 2 * limit // slot
        newest = blocks_of(root, token_ids(9_999, 512), **one)
        await s.put_all(newest)
        stat = await s.store.stat()
        assert 0 < stat.used_bytes <= stat.capacity_bytes <= limit
    async with stack(tmp_path, **disk) as s:
        # Use after a restart is counted from the disk.
        again = await s.store.stat()
        assert abs(again.used_bytes - stat.used_bytes) <= 64 * slot
        assert again.used_bytes > 0


def _disk_bytes(folder) -> int:
    return sum(
        os.stat(os.path.join(where, name)).st_blocks * 512
        for where, _, names in os.walk(folder)
        for name in names
    )


async def test_delete_tenant_leaves_nothing_of_it_and_all_of_others(tmp_path) -> None:
    tokens = token_ids(14, 600)
    async with stack(tmp_path) as s:
        mine = blocks_of(await root_of(s, tokens), tokens, tenant="acme")
        theirs = blocks_of(await root_of(s, tokens, tenant="globex"), tokens, tenant="globex")
        await s.put_all(mine)
        await s.put_all(theirs)
        assert await s.store.delete_tenant("acme") == 4
        assert (await s.store.stat()).blocks == 4
        await s.stored(match_request(tokens), 0)
        await s.stored(match_request(tokens, tenant="globex"), 384)
        fetched = await fetch_all(s.store, b"".join(block.key for block in mine))
        assert not any(part.is_ok for part in fetched.values())


async def test_s_11_the_directory_and_its_files_are_the_owners_only(tmp_path) -> None:
    async with stack(tmp_path) as s:
        await s.put_all(blocks_of(await root_of(s, token_ids(1, 200)), token_ids(1, 200)))
        paths = [tmp_path / "kv" / "segments", *(tmp_path / "kv").rglob("*")]
        assert paths
        for path in paths:
            assert path.stat().st_mode & 0o077 == 0, path
        assert (tmp_path / "cluster.key").stat().st_mode & 0o077 == 0


async def test_p_37_with_the_store_away_everything_is_a_miss_and_nothing_fails(tmp_path) -> None:
    tokens = token_ids(15, 300)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens)
        await s.store_runtime.server.stop(0)
        assert await s.store.put(blocks[0]) is PutStatus.LOST
        async with s.store.fetch(blocks[0].key, LAYOUT) as parts:
            assert [part.reason async for part in parts] == ["lost"]
        assert await s.store.exists(blocks[0].key) == b"\0"
        answer = await s.check.match(match_request(tokens), timeout_s=30)
        assert answer.hit.hit_tokens == 0


async def test_a_hit_by_chat_raises_the_class_of_its_whole_prefix(tmp_path) -> None:
    tokens = token_ids(16, 600)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens, ttl_class=TtlClass.AGENT)
        await s.put_all(blocks)
        await s.stored(match_request(tokens, ttl_class=records_pb2.TTL_CLASS_CHAT), 384)
        table = _node_of(s).meta.table
        await until(lambda: [table.get(b.key[:16])[6] for b in blocks] == [2, 2, 2, 1])


async def test_pins_of_a_hit_hold_its_blocks_and_lapse(tmp_path) -> None:
    tokens = token_ids(17, 600)
    async with stack(tmp_path) as s:
        blocks = blocks_of(await root_of(s, tokens), tokens)
        await s.put_all(blocks)
        answer = await s.stored(match_request(tokens), 384)
        meta = _node_of(s).meta
        wanted = {block.key[:16] for block in blocks[:3]}
        now_s = s.store_runtime.clock.now_s()
        await until(lambda: meta.pinned(now_s) == wanted)
        assert meta.pinned(now_s + 31 + 30) == set()
        await s.check.unpin(answer.hit.pin_id)


def _node_of(s):
    """The node inside the store, reached through the gauges it registered."""
    gauge = s.store_runtime.census._gauges[("kv.meta", "entries")]
    return next(cell.cell_contents for cell in gauge.__closure__)
