"""The tools as an operator runs them: export and import, repair, bench, live traces, the plot."""

import asyncio
import errno
import io
import os
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest

from services.common.errors import Failure
from services.kvstore import cli
from services.kvstore.checksums import xxh3_128
from services.kvstore.client import PutStatus, StoreClient
from services.kvstore.config import StoreConfig
from services.kvstore.formats import ObjectHeader, ShardHeader
from services.kvstore.tests.cluster_kit import cluster
from services.kvstore.tests.kit import LAYOUT, blocks_of, match_request, stack, token_ids, until
from services.kvstore.tests.test_seal import encrypted, fetched
from services.kvstore.tests.test_trace import folder
from services.kvstore.tools import transfer
from services.kvstore.tools.archive import ArchiveError, ArchiveWriter, check_archive, read_archive
from services.kvstore.tools.live_trace import replay_on_store
from services.kvstore.tools.over_nodes import over_nodes
from services.kvstore.tools.selection import prefix_of
from services.kvstore.trace import read_trace, replay

SMALL = {"capacity_bytes": 8 << 20, "segment_bytes": 1 << 20, "payload_bytes": 5000}


def config_of(path, **more) -> StoreConfig:
    return StoreConfig(dir=path, **(SMALL | more))


def flags_of(path) -> list[str]:
    return [f"--dir={path}", *(f"--{name}={value}" for name, value in SMALL.items())]


async def filled(path, *, seeds=(1, 2), **more):
    """Returns the blocks of two tenants in a store that has stopped."""
    blocks = []
    async with stack(path, **more) as s:
        for seed, tenant in zip(seeds, ("acme", "globex"), strict=True):
            tokens = token_ids(seed, 640)
            request = match_request(tokens, tenant=tenant)
            root = (await s.check.match(request, timeout_s=30)).namespace.root
            blocks.append(blocks_of(root, tokens, tenant=tenant))
            assert set(await s.put_all(blocks[-1])) == {PutStatus.COMMITTED}
    return blocks


async def test_export_and_import_carry_a_tenant_to_another_store(tmp_path) -> None:
    mine, theirs = await filled(tmp_path / "a")
    archive = tmp_path / "acme.kv"
    done = await transfer.export_blocks(config_of(tmp_path / "a" / "kv"), archive, tenant="acme")
    assert (done.num_blocks, done.num_damaged) == (5, 0)
    assert archive.stat().st_mode & 0o077 == 0
    assert [header.block_index for header, _ in read_archive(archive)] == [1, 2, 3, 4, 5]
    assert [payload for _, payload in read_archive(archive)] == [b.payload for b in mine]
    to = config_of(tmp_path / "b" / "kv")
    first = await transfer.import_blocks(to, archive)
    assert (first.stored, first.known, first.without_parent, first.no_room) == (5, 0, 0, 0)
    again = await transfer.import_blocks(to, archive)
    assert (again.stored, again.known) == (0, 5)
    (tmp_path / "b" / "cluster.key").write_bytes((tmp_path / "a" / "cluster.key").read_bytes())
    (tmp_path / "b" / "cluster.key").chmod(0o600)
    async with stack(tmp_path / "b") as s:
        answer = await s.stored(match_request(token_ids(1, 640)), 384)
        assert answer.hit.block_keys == b"".join(block.key for block in mine)
        assert await fetched(s, mine) == [block.payload for block in mine]
        assert await fetched(s, theirs) == [None] * 5
        # Whose they are came along.
        assert await s.store.delete_tenant("acme") == 5


async def test_a_prompts_prefix_is_exported_with_all_its_parents(tmp_path) -> None:
    mine, _ = await filled(tmp_path)
    archive = tmp_path / "prefix.kv"
    config = config_of(tmp_path / "kv")
    done = await transfer.export_blocks(config, archive, chain=mine[2].key[:4])
    assert done.num_blocks == 3
    assert [header.key for header, _ in read_archive(archive)] == [b.key for b in mine[:3]]
    for bad in ({"chain": bytes(4)}, {"tenant": "nobody"}):
        with pytest.raises(ValueError, match="block"):
            await transfer.export_blocks(config, tmp_path / "none.kv", **bad)
    assert not list(tmp_path.glob("*none*")), "what fails leaves no file"


async def test_encrypted_blocks_travel_encrypted(tmp_path) -> None:
    mine, _ = await filled(tmp_path / "a", **encrypted(tmp_path))
    archive = tmp_path / "all.kv"
    await transfer.export_blocks(config_of(tmp_path / "a" / "kv"), archive)
    data = archive.read_bytes()
    assert not any(block.payload[:32] in data for block in mine)
    await transfer.import_blocks(config_of(tmp_path / "b" / "kv"), archive)
    async with stack(tmp_path / "b", **encrypted(tmp_path)) as s:
        assert await fetched(s, mine) == [block.payload for block in mine]


async def test_blocks_travel_out_of_storage_nodes_and_into_others(tmp_path, monkeypatch) -> None:
    archive = tmp_path / "acme.kv"
    config = config_of(tmp_path / "tool", backend="nodes")
    with pytest.raises(ValueError, match="etcd"):
        await transfer.export_blocks(config, archive)
    async with cluster(tmp_path / "a", 4, profile="2+2", store=encrypted(tmp_path)) as c:
        monkeypatch.setattr(transfer, "over_nodes", lambda c_: over_nodes(c_, c.members))
        mine = await c.put(1, tenant="acme")
        await c.put(2, tenant="globex")
        # One node is away: blocks are put together without it.
        await c.stop(2)
        done = await transfer.export_blocks(config, archive, tenant="acme")
        assert (done.num_blocks, done.num_damaged) == (4, 0)
    assert [header.key for header, _ in read_archive(archive)] == [b.key for b in mine]
    async with cluster(tmp_path / "b", 3, profile="2+1", store=encrypted(tmp_path)) as c:
        monkeypatch.setattr(transfer, "over_nodes", lambda c_: over_nodes(c_, c.members))
        first = await transfer.import_blocks(config, archive)
        assert (first.stored, first.known, first.no_room) == (4, 0, 0)
        await until(lambda: all(c.index.find(block.key[:16]) for block in mine))
        assert await c.read(mine) == [True] * 4
        again = await transfer.import_blocks(config, archive)
        assert (again.stored, again.known) == (0, 4)


def an_archive(path, count: int = 4) -> None:
    with ArchiveWriter(path) as archive:
        for number in range(count):
            payload = random.Random(number).randbytes(3000)
            header = ObjectHeader(
                key=bytes([number]) * 32, parent=bytes(32), layout=LAYOUT, block_index=number + 1,
                num_tokens=128, ttl_class=1, payload_bytes=3000, payload_digest=xxh3_128(payload),
                put_id=number, created_ms=1,
            )  # fmt: skip
            archive.add(header.pack() + payload)


@pytest.mark.parametrize("seed", range(60))
def test_an_archive_that_was_cut_or_changed_anywhere_is_refused_whole(tmp_path, seed) -> None:
    path = tmp_path / "a.kv"
    an_archive(path)
    assert check_archive(path) == 4
    data = bytearray(path.read_bytes())
    rng = random.Random(seed)
    at = rng.randrange(len(data))
    damage = rng.randrange(4)
    block = (len(data) - 8 - 44) // 4
    if damage == 0:
        del data[at:]
    elif damage == 1:
        data[at] ^= 1 << rng.randrange(8)
    elif damage == 2:  # a block is missing, though each is sound
        del data[8 + block : 8 + 2 * block]
    else:  # two have changed places
        one, two = data[8 : 8 + block], data[8 + block : 8 + 2 * block]
        data[8 : 8 + 2 * block] = two + one
    path.write_bytes(data)
    with pytest.raises(ArchiveError):
        check_archive(path)
    with pytest.raises(ArchiveError):
        asyncio.run(transfer.import_blocks(config_of(tmp_path / "kv"), path))
    assert not (tmp_path / "kv").exists(), "nothing is changed for an archive that is not whole"


async def test_import_into_a_shared_folder_is_taken_up_by_the_stores_that_run(tmp_path) -> None:
    mine, _ = await filled(tmp_path / "a")
    archive = tmp_path / "acme.kv"
    await transfer.export_blocks(config_of(tmp_path / "a" / "kv"), archive, tenant="acme")
    (tmp_path / "mount").mkdir()
    shared = {"backend": "posix", "at": str(tmp_path / "mount")}
    async with stack(tmp_path / "b", **shared) as s:
        with pytest.raises(Failure, match="another STORE"):
            await transfer.import_blocks(config_of(tmp_path / "b" / "kv", **shared), archive)
        beside = config_of(tmp_path / "tool", **shared)
        assert (await transfer.import_blocks(beside, archive)).stored == 5
        keys = b"".join(block.key for block in mine)
        while not all(await s.store.exists(keys)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await fetched(s, mine) == [block.payload for block in mine]
        # And out again, while the store runs.
        await transfer.export_blocks(config_of(tmp_path / "x", **shared), tmp_path / "again.kv")
    assert [p for _, p in read_archive(tmp_path / "again.kv")] == [b.payload for b in mine]


def test_repair_lets_damage_go_and_then_finds_none(tmp_path, capsys) -> None:
    mine, _ = asyncio.run(filled(tmp_path))
    (segment, *_) = sorted((tmp_path / "kv" / "segments").glob("seg-*"))
    data = bytearray(segment.read_bytes())
    at = data.index(mine[1].payload)
    data[at] ^= 1
    segment.write_bytes(data)
    (tmp_path / "kv" / "segments" / "index.log").unlink()
    assert cli.main(["verify", str(tmp_path / "kv")]) == 1
    assert cli.main(["repair", *flags_of(tmp_path / "kv")]) == 0
    assert "1 records without a block" in capsys.readouterr().out
    assert cli.main(["repair", *flags_of(tmp_path / "kv")]) == 0
    assert capsys.readouterr().out.startswith("9 shards read, 0 damaged")
    assert cli.main(["repair", "--backend=nodes"]) == 1
    assert "--node" in capsys.readouterr().err


def test_the_tools_say_what_is_wrong_in_one_line(tmp_path, capsys) -> None:
    for argv, status in (
        (["stat", "127.0.0.1:1"], 1),
        (["stat", "127.0.0.1:1", "--what"], 2),
        (["export", str(tmp_path / "x"), "--dir", str(tmp_path / "none")], 1),
        (["export", str(tmp_path / "x"), "--chain", "abc"], 1),
        (["import", str(tmp_path / "none")], 1),
        (["repair", "--backend=posix", f"--at={tmp_path / 'none'}", f"--dir={tmp_path}"], 1),
        (["repair", "--no_such_flag=1"], 1),
        (["bench", "127.0.0.1:1"], 1),
    ):
        assert cli.main(argv) == status, argv
        assert capsys.readouterr().err.count("\n") == 1, argv


@pytest.mark.parametrize(
    "argv",
    [
        ["stat", ""],
        ["stat", "abc"],
        ["stat", ":1"],
        ["stat", "localhost:99999"],
        ["bench", "localhost:0"],
        ["bench", "127.0.0.1:1", "--blocks=0"],
        ["bench", "127.0.0.1:1", "--rounds=0"],
        ["bench", "127.0.0.1:1", "--payload=-5"],
        ["repair", "--node=127.0.0.1:1", "--bytes_per_s=-1"],
        ["export", "x", "--chain=zzzzzzzz"],
        ["export", "x", "--chain=abcdef123"],
        ["trace", "t", "--capacities=-1"],
        ["trace", "t", "--capacities=x"],
        ["trace", "t", "--ttls=nan"],
        ["trace", "t", "--ttls=-5"],
        ["trace", "t", "--requests=-1"],
        ["trace", "t", "--store=nowhere"],
    ],
)
def test_a_value_that_no_flag_takes_is_named_in_one_line(argv, capsys) -> None:
    assert cli.main(argv) == 1
    said = capsys.readouterr().err
    value = argv[-1].rpartition("=")[2]
    assert said.startswith("pelagos kv: ")
    assert said.count("\n") == 1
    assert repr(value) in said


@pytest.mark.parametrize(
    "line",
    [
        b'{"timestamp":1e400,"input_length":1,"hash_ids":[1]}',
        b'{"timestamp":1,"input_length":-1,"hash_ids":[1]}',
        b'{"timestamp":1,"input_length":1,"hash_ids":[[1]]}',
        b'{"timestamp":1,"input_length":1,"hash_ids":[-1]}',
        b'{"timestamp":1,"input_length":1,"hash_ids":[true]}',
        b'{"timestamp":1,"input_length":1,"hash_ids":"12"}',
        b"[" * 100_000,
        b"\xff\xfe",
        b"[]",
    ],
)
def test_a_line_that_is_no_request_is_named(line, tmp_path, capsys) -> None:
    good = b'{"timestamp":1,"input_length":600,"hash_ids":[1,2]}\n'
    (tmp_path / "trace").write_bytes(good + line + b"\n")
    assert cli.main(["trace", str(tmp_path / "trace")]) == 1
    assert capsys.readouterr().err == "pelagos kv: trace, line 2: not a request\n"
    (tmp_path / "trace").write_bytes(b"")
    assert cli.main(["trace", str(tmp_path / "trace")]) == 1
    assert "holds no request" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_folders_pipes_and_links_among_segments_are_passed_over(tmp_path, capsys) -> None:
    (tmp_path / "seg-0001").mkdir()
    os.mkfifo(tmp_path / "seg-0002")
    (tmp_path / "seg-0003").symlink_to("/dev/zero")
    for tool in ("ls", "verify"):
        assert cli.main([tool, str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith("0 shards")
    assert cli.main(["import", str(tmp_path / "seg-0002"), *flags_of(tmp_path / "kv")]) == 1
    assert "no file" in capsys.readouterr().err


def test_a_shard_whose_length_lies_is_a_fault_not_memory(tmp_path, capsys) -> None:
    header = ShardHeader(0, 1, 0, 2, 2, 0xFFFF_FF00, 1000, 1, bytes(16), bytes(16), 1, 1, 0)
    (tmp_path / "seg-0001").write_bytes(header.pack() + bytes(8192))
    tracemalloc.start()
    try:
        assert cli.main(["verify", str(tmp_path)]) == 1
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert "FAULT: cut short" in capsys.readouterr().out


async def test_a_reader_that_leaves_early_gets_no_trace_of_ours(tmp_path) -> None:
    await filled(tmp_path)
    command = f"'{sys.executable}' -m services.common.cli kv ls '{tmp_path}' | true"
    for _ in range(3):
        done = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", command], capture_output=True, text=True, check=True
        )
        assert done.stderr == ""


async def test_bench_leaves_nothing_either_when_it_fails(tmp_path, capsys) -> None:
    async with stack(tmp_path) as s:
        argv = ["bench", s.store_runtime.address, "--blocks=8", "--payload=4096", "--rounds=2"]
        real = StoreClient.exists

        async def exists(self, keys: bytes) -> bytes:
            return bytes(len(await real(self, keys)))

        StoreClient.exists = exists
        try:
            assert await asyncio.to_thread(cli.main, argv) == 1
        finally:
            StoreClient.exists = real
        assert "came back" in capsys.readouterr().err
        assert (await s.store.stat()).blocks == 0


async def test_an_export_into_a_folder_of_others_is_ours_alone(tmp_path) -> None:
    await filled(tmp_path / "a")
    config = config_of(tmp_path / "a" / "kv")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".out.kv.part").symlink_to(victim)
    # Two at a time are two files; the last that is whole stays.
    out = tmp_path / "out.kv"
    await asyncio.gather(*(transfer.export_blocks(config, out) for _ in range(2)))
    assert victim.read_text() == "precious"
    assert check_archive(out) == 10
    assert sorted(path.name for path in tmp_path.glob(".*.part")) == [".out.kv.part"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        await transfer.export_blocks(config, tmp_path / "folder")
    with pytest.raises(OSError, match="nowhere/x"):
        await transfer.export_blocks(config, tmp_path / "nowhere" / "x")
    assert sorted(path.name for path in tmp_path.glob(".*.part")) == [".out.kv.part"]


def test_an_export_that_the_disk_has_no_room_for_leaves_no_file(tmp_path) -> None:
    class Full(io.BufferedWriter):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write() -> None:
        with ArchiveWriter(tmp_path / "x") as archive:
            archive._file = Full(archive._file.detach(), 1 << 20)
            archive.add(bytes(5000))

    with pytest.raises(OSError, match="No space"):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "odd",
    [
        {"ttl_class": 0},
        {"ttl_class": 200},
        {"block_index": 0},
        {"num_tokens": 0},
        {"flags": 1 << 9},
    ],
)
async def test_an_archive_of_blocks_that_no_store_writes_changes_nothing(tmp_path, odd) -> None:
    await filled(tmp_path / "a")
    archive = tmp_path / "all.kv"
    await transfer.export_blocks(config_of(tmp_path / "a" / "kv"), archive)
    found = list(read_archive(archive))
    with ArchiveWriter(tmp_path / "odd.kv") as writer:
        for number, (header, payload) in enumerate(found):
            writer.add(replace(header, **(odd if number == 3 else {})).pack() + payload)
    with pytest.raises(ArchiveError, match="block 4"):
        await transfer.import_blocks(config_of(tmp_path / "b"), tmp_path / "odd.kv")
    assert not (tmp_path / "b").exists()


def test_blocks_that_are_each_others_parents_end_an_export() -> None:
    one, two = b"1" * 32, b"2" * 32
    header = ObjectHeader(one, two, LAYOUT, 2, 128, 2, 1, bytes(16), 1, 1)
    blocks = {one: (header, None), two: (replace(header, key=two, parent=one), None)}
    with pytest.raises(ValueError, match="ring"):
        prefix_of(blocks, one)


async def test_a_service_of_another_kind_and_a_block_too_large_are_said_so(
    tmp_path, capsys
) -> None:
    async with stack(tmp_path) as s:
        other, store = s.check_runtime.address, s.store_runtime.address
        assert await asyncio.to_thread(cli.main, ["stat", other]) == 1
        assert "another kind" in capsys.readouterr().err
        argv = ["bench", store, "--payload=200000", "--blocks=2"]
        assert await asyncio.to_thread(cli.main, argv) == 1
        assert "payload_bytes" in capsys.readouterr().err


async def test_bench_measures_a_store_and_leaves_nothing(tmp_path, capsys) -> None:
    async with stack(tmp_path) as s:
        argv = ["bench", s.store_runtime.address, "--blocks=8", "--payload=4096", "--rounds=2"]
        assert await asyncio.to_thread(cli.main, argv) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
            "put", "exists", "fetch",
        ]  # fmt: skip
        assert (await s.store.stat()).blocks == 0


async def test_a_trace_on_a_running_store_hits_what_the_model_says(tmp_path) -> None:
    requests = read_trace(folder() / "conversation_trace.jsonl")[:40]
    async with stack(tmp_path, capacity_bytes=64 << 20) as s:
        found = await replay_on_store(s.store_runtime.address, requests)
        assert found == replay(requests)
        assert found.num_hit_blocks > 0
        assert (await s.store.stat()).blocks == 0


def test_the_plot_of_two_traces_is_a_picture_and_always_the_same(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    pictures = []
    for name in ("one.png", "two.png"):
        files = [str(folder() / f"{trace}_trace.jsonl") for trace in ("conversation", "synthetic")]
        flags = ["--capacities=1000,10000", "--ttls=60,300", "--requests=300"]
        assert cli.main(["trace", *files, *flags, f"--plot={tmp_path / name}"]) == 0
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0].startswith(b"\x89PNG")
    assert pictures[0] == pictures[1]


def test_a_store_loads_no_package_of_a_backend_that_it_does_not_use() -> None:
    code = (
        "import sys, services.kvstore.store.main, services.kvstore.cli;"
        "print([m for m in ('boto3', 'redis', 'cryptography', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
