"""Twelve storage nodes with 10+2 erasure coding: real servers, real shards, real losses."""

import asyncio
import itertools
import random

from pelagos.kvstore.v1 import storage_pb2, storage_pb2_grpc

from services.common.rpc_client import Channels, stream_call
from services.kvstore.backends.base import ShardRef
from services.kvstore.storage import leader as leader_module
from services.kvstore.tests.cluster_kit import ROOT, cluster, leader_of
from services.kvstore.tests.kit import LAYOUT, blocks_of, token_ids, until


async def test_blocks_are_spread_over_all_nodes_and_read_from_them(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        written = []
        for seed in range(5):
            written += await c.put(seed)
        assert all(await c.read(written))
        stat = await c.store.stat()
        assert (stat.backend, stat.blocks) == ("nodes", 20)
        assert stat.used_bytes == 20 * 12
        led = [len(leader_of(runtime).led) for runtime in c.runtimes.values()]
        assert sum(led) == 64
        assert max(led) - min(led) <= 2
        # Eleven of twelve are asked, so parity takes part in most reads.
        assert c.blocks.counts.reads >= 20


async def test_p_31_any_two_nodes_may_be_away_and_everything_is_read(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        written = []
        for seed in range(4):
            written += await c.put(seed)
        for lost in ((0, 1), (3, 11)):
            for number in lost:
                await c.stop(number)
            await c.settled()
            assert all(await c.read(written)), lost
            # With ten nodes a put is committed as degraded, and read back.
            during = await c.put(100 + lost[0])
            assert all(await c.read(during))
            written += during
            for number in lost:
                await c.start(number)
            await c.settled()
            # What the two missed is written to them from the others.
            await c.repaired()
        assert all(await c.read(written))


async def test_three_nodes_away_make_misses_that_heal_when_one_returns(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        written = await c.put(1)
        for number in (2, 5, 9):
            await c.stop(number)
        await until(lambda: len(c.view.up()) == 9)
        assert not any(await c.read(written))
        refused = blocks_of(ROOT, token_ids(50, 128))[0]
        assert not (await c.store.put(refused)).is_stored
        await c.start(5)
        await c.settled()
        while not all(await c.read(written)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_ur_45_all_nodes_restart_and_everything_is_there(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        written = []
        for seed in range(5):
            written += await c.put(seed)
    async with cluster(tmp_path) as c:
        assert all(await c.read(written))
        await c.repaired()


async def test_metadata_that_is_lost_is_rebuilt_from_shards(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        written = await c.put(1) + await c.put(2, approximate=True)
    for log in tmp_path.glob("node-*/meta.log"):
        log.unlink()
    async with cluster(tmp_path) as c:
        assert all(await c.read(written))
        flags = [c.index.find(block.key[:16])[7] & 4 for block in written]
        assert flags == [0] * 4 + [4] * 4


async def test_p_33_ur_44_one_or_two_bad_shards_are_read_around_named_and_repaired(
    tmp_path,
) -> None:
    rng = random.Random(1)
    async with cluster(tmp_path) as c:
        written = []
        for seed in range(6):
            written += await c.put(seed)
        hurt = {}
        for block in written:
            hurt[block.key] = rng.sample(range(12), rng.randrange(1, 3))
            for shard in hurt[block.key]:
                await _flip(c, block.key, shard, rng)
        assert all(await c.read(written))
        # Scrubbing finds every one of them, whether it was read or not, and tells the primaries.
        found = set()
        channels = Channels()
        for runtime in c.runtimes.values():
            stub = storage_pb2_grpc.StorageServiceStub(channels.get(runtime.address))
            async with stream_call(stub.Scrub, storage_pb2.ScrubRequest(), timeout_s=60) as parts:
                async for part in parts:
                    found |= {(ref.key16, ref.index) for ref in part.bad}
        await channels.close()
        damaged = {(key[:16], shard) for key, shards in hurt.items() for shard in shards}
        assert found == damaged
        await until(lambda: sum(leader_of(r).counts.repaired for r in c.runtimes.values()) > 0)
        await c.repaired()
        for runtime in c.runtimes.values():
            assert (await _backend(runtime).scrub(0)).bad == ()
        assert all(await c.read(written))


async def test_three_bad_shards_are_a_miss_never_bytes_and_the_block_can_be_put_again(
    tmp_path,
) -> None:
    rng = random.Random(2)
    async with cluster(tmp_path) as c:
        block = (await c.put(1, 128))[0]
        for shard in (0, 4, 11):
            await _flip(c, block.key, shard, rng)
        assert await c.read([block]) == [False]
        await until(lambda: sum(leader_of(r).counts.dropped for r in c.runtimes.values()) == 1)
        await until(lambda: c.index.find(block.key[:16]) is None)
        assert (await c.store.put(block)).name == "COMMITTED"
        assert await c.read([block]) == [True]


async def test_t_ec_mix_two_writers_of_one_key_never_give_a_mixed_payload(tmp_path) -> None:
    """Two puts of one key with different payloads, stopped between any two shard writes and the
    commit: a reader gets one of the two, or a miss."""
    block = blocks_of(ROOT, token_ids(1, 128))[0]
    other = type(block)(**{**block.__dict__, "payload": bytes(reversed(block.payload))})
    seen = set()
    async with cluster(tmp_path) as c:
        for stop_a, stop_b in itertools.product((0, 5, 11, 12), (0, 6, 12)):
            for order in ("ab", "ba"):
                await _forget(c, block.key)
                puts = {"a": await _shards(c, block), "b": await _shards(c, other)}
                stops = {"a": stop_a, "b": stop_b}
                for name in order:
                    await _write_some(c, puts[name], stops[name])
                for name in order:
                    if stops[name] == 12:
                        await _commit(c, puts[name])
                await c.settled()
                payload = await _read_raw(c, block.key)
                assert payload in (None, block.payload, other.payload)
                seen.add(payload)
    assert seen == {None, block.payload, other.payload}


async def _shards(c, block):
    from services.kvstore.store.blocks import NewBlock, cut_shards

    new = NewBlock(
        key=block.key, parent=block.parent_key, layout=LAYOUT, block_index=1, num_tokens=128,
        ttl_class=1, payload=block.payload,
    )  # fmt: skip
    put_id = random.randrange(1 << 63)
    return new, put_id, cut_shards(new, put_id, 1_700_000_000, c.view.pgmap.profile)


async def _write_some(c, put, count: int) -> None:
    new, _, shards = put
    answers = []
    for number, shard in list(enumerate(shards))[:count]:
        link = c.blocks._links.get(c.view.pgmap.node_of(new.key, number))
        answers.append(link.put(shard, c.view.pgmap.epoch, False))
    for answer in answers:
        await answer


async def _commit(c, put) -> None:
    new, put_id, shards = put
    c.blocks._written[put_id] = (1 << len(shards)) - 1, c.view.pgmap
    await c.blocks.commit(new, put_id)


async def _read_raw(c, key: bytes) -> bytes | None:
    async with c.store.fetch(key, LAYOUT) as parts:
        return next(iter([part.payload if part.is_ok else None async for part in parts]))


async def _forget(c, key: bytes) -> None:
    for runtime in c.runtimes.values():
        meta = leader_of(runtime).meta
        meta.remove([key[:16]])
        backend = _backend(runtime)
        refs = []
        async for headers in backend.list_headers():
            for at in range(0, len(headers), 128):
                raw = headers[at : at + 128]
                if raw[24:40] == key[:16]:
                    refs.append(ShardRef(key[:16], raw[5], int.from_bytes(raw[56:64], "little")))
        await backend.delete_shards(refs)
    await until(lambda: c.index.find(key[:16]) is None)


async def test_the_first_commit_of_a_key_wins_and_the_other_leaves_no_shards(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        first, second = await _shards(c, block), await _shards(c, block)
        await _write_some(c, first, 12)
        await _write_some(c, second, 12)
        await _commit(c, first)
        await _commit(c, second)
        used = [(await _backend(runtime).stat()).num_used for runtime in c.runtimes.values()]
        assert used == [1] * 12
        assert await c.read([block]) == [True]


async def test_a_commit_that_is_sent_again_keeps_its_shards(tmp_path) -> None:
    """The first answer may be lost; the second try must not read as "somebody else was first"."""
    async with cluster(tmp_path) as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        put = await _shards(c, block)
        await _write_some(c, put, 12)
        await _commit(c, put)
        await _commit(c, put)
        assert await c.read([block]) == [True]


async def test_ur_40_a_writer_that_dies_halfway_blocks_nobody(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        await _write_some(c, await _shards(c, block), 7)
        assert await c.read([block]) == [False]
        assert (await c.store.put(block)).name == "COMMITTED"
        assert await c.read([block]) == [True]


async def test_ur_46_many_reads_of_one_block_at_once_are_one(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        block = (await c.put(1, 128))[0]
        before = c.blocks.counts.reads
        results = await asyncio.gather(*(c.read([block]) for _ in range(64)))
        assert all(result == [True] for result in results)
        counts = c.blocks.counts
        assert counts.reads - before + counts.shared_reads == 64
        assert counts.reads - before < 64


async def test_stale_map_epochs_are_fenced(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        block = blocks_of(ROOT, token_ids(1, 128))[0]
        _, _, shards = await _shards(c, block)
        link = c.blocks._links.get(c.view.pgmap.node_of(block.key, 0))
        assert await link.put(shards[0], c.view.pgmap.epoch - 1, False) is None
        assert await link.put(shards[0], c.view.pgmap.epoch, False) is not None


async def test_a_node_that_stays_away_is_replaced_and_its_shards_rebuilt(tmp_path) -> None:
    async with cluster(tmp_path, num_nodes=13, out_after_s=0.5) as c:
        written = await c.put(1) + await c.put(2)
        epoch = c.view.pgmap.epoch
        gone = sorted(c.view.pgmap.nodes)[0]
        await c.stop(int(gone[1:]))
        await until(lambda: c.view.pgmap.epoch > epoch)
        assert gone not in c.view.pgmap.nodes
        await c.settled()
        await c.repaired()
        assert all(await c.read(written))


async def test_delete_tenant_leaves_no_shard_of_it(tmp_path) -> None:
    async with cluster(tmp_path) as c:
        mine = await c.put(1, tenant="acme")
        theirs = await c.put(2, tenant="globex")
        assert await c.store.delete_tenant("acme") == 4
        await until(lambda: not any(c.index.find(block.key[:16]) for block in mine))
        assert not any(await c.read(mine))
        assert all(await c.read(theirs))
        for runtime in c.runtimes.values():
            keys = set()
            async for headers in _backend(runtime).list_headers():
                keys |= {headers[at + 24 : at + 40] for at in range(0, len(headers), 128)}
            assert keys == {block.key[:16] for block in theirs}


def _backend(runtime):
    """The node's backend, reached through its scrub service."""
    return runtime._stop_hooks[0].__self__


async def _flip(c, key: bytes, shard: int, rng: random.Random) -> None:
    """Flips one bit of a shard on its node's disk."""
    number = c.node_of(key, shard)
    for file in sorted((c.folder / f"node-{number}" / "segments").glob("seg-*")):
        data = file.read_bytes()
        at = 0
        while (at := data.find(b"DKSH", at)) >= 0:
            if at % 4096 == 0 and data[at + 24 : at + 40] == key[:16]:
                spot = at + 128 + rng.randrange(500)
                with file.open("r+b") as handle:
                    handle.seek(spot)
                    handle.write(bytes([data[spot] ^ 1 << rng.randrange(8)]))
                return
            at += 1
    raise AssertionError("the shard is not on its node")


async def test_blocks_of_nodes_that_are_away_are_late_not_damaged(tmp_path) -> None:
    """What an operator is told of a cut in the network must not send him to look at disks."""
    async with cluster(tmp_path, 3, profile="2+1") as c:
        blocks = await c.put(1)
        await c.stop(1)
        await c.stop(2)
        keys = b"".join(block.key for block in blocks)
        async with c.store.fetch(keys, LAYOUT) as parts:
            assert {part.reason async for part in parts} == {"timeout"}
        assert (c.blocks.num_corrupt, (await c.store.stat()).corrupt_blocks) == (0, 0)
        await asyncio.gather(c.start(1), c.start(2))
        await c.settled()
        assert await c.read(blocks) == [True] * len(blocks)


async def test_s_11_a_node_that_was_away_brings_no_shard_of_an_erased_block_back(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(leader_module, "_LEAVINGS_AGE_S", -60)
    async with cluster(tmp_path, 4, profile="2+2") as c:
        mine = await c.put(1, tenant="acme")
        theirs = await c.put(2, tenant="globex")
        away = c.node_of(mine[1].key, 0)
        await c.stop(away)
        await until(lambda: len(c.view.up()) == 3)
        await c.settled()
        assert await c.store.delete_tenant("acme") == len(mine)
        # So long that nobody remembers.
        for runtime in c.runtimes.values():
            meta = leader_of(runtime).meta
            meta.remove([block.key[:16] for block in mine])
        await c.start(away)
        await c.settled()

        def is_clean() -> bool:
            data = b"".join(path.read_bytes() for path in tmp_path.rglob("seg-*"))
            return not any(block.key[:16] in data for block in mine)

        await until(is_clean)
        data = b"".join(path.read_bytes() for path in tmp_path.rglob("seg-*"))
        for block in mine:
            assert not any(block.payload[at : at + 64] in data for at in range(0, 4900, 100))
        await c.repaired()
        assert await c.read(theirs) == [True] * len(theirs)


async def test_messages_between_nodes_are_bounded_by_their_bytes(tmp_path) -> None:
    """64 copies of a megabyte do not fit into one message: each was refused, for ever."""
    size = 1 << 20
    async with cluster(
        tmp_path, 3, profile="1+2", payload_bytes=size, capacity_bytes=128 << 20,
        segment_bytes=16 << 20, store={"payload_bytes": size},
    ) as c:  # fmt: skip
        blocks = await c.put(1, num_tokens=128 * 24, num_bytes=size)
        keys = b"".join(block.key for block in blocks)
        async with c.store.fetch(keys, LAYOUT) as parts:
            found = {part.index: part.payload async for part in parts}
        assert found == {number: block.payload for number, block in enumerate(blocks)}
        link = c.blocks._links.get("n00")
        refs = [ShardRef(bytes(16), 0, number) for number in range(20_000)]
        assert await link.delete(refs, c.view.pgmap.epoch) == 0
