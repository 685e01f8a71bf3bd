"""The embedded backend, native and plain, against the suite and against a hostile disk."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

from services.kvstore.backends import local
from services.kvstore.backends.base import PutStatus, ReadStatus
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.backends.segments_plain import PlainSegmentStore
from services.kvstore.checksums import native
from services.kvstore.tests.backend_suite import is_there, listed, put, run_suite, shard

STORES = {"native": native.SegmentStore, "plain": PlainSegmentStore}


@pytest.fixture(params=STORES)
def open_local(request, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_segment_store", lambda: STORES[request.param])

    async def opened(**more):
        fields = {
            "dir": tmp_path / "segments",
            "capacity_bytes": 32 * 4096,
            "segment_bytes": 8 * 4096,
            "payload_bytes": 3000,
        }
        return await LocalBackend.open(LocalBackendConfig(**(fields | more)))

    return opened


async def test_the_suite(open_local) -> None:
    await run_suite(open_local)


async def test_either_implementation_opens_what_the_other_wrote(tmp_path, monkeypatch) -> None:
    config = LocalBackendConfig(tmp_path / "s", 32 * 4096, 8 * 4096, payload_bytes=3000)
    written = set()
    for turn in range(4):
        monkeypatch.setattr(local, "_segment_store", lambda t=turn: list(STORES.values())[t % 2])
        backend = await LocalBackend.open(config)
        for number in written:
            assert await is_there(backend, number)
        for number in range(5 * turn, 5 * turn + 5):
            await put(backend, number)
            written.add(number)
        await backend.delete_shards([shard(5 * turn)[0]])
        written.discard(5 * turn)
        await backend.close()


async def test_full_is_an_answer_and_room_is_used_again(open_local) -> None:
    backend = await open_local()
    statuses = [await put(backend, n) for n in range(40)]
    assert statuses[:32].count(PutStatus.BUFFERED) == 32
    assert set(statuses[32:]) == {PutStatus.FULL}
    await backend.delete_shards([shard(0)[0]])
    assert await put(backend, 40) is PutStatus.BUFFERED
    assert await is_there(backend, 40)
    await backend.close()


async def test_ur_42_deleted_and_cut_files_are_misses_and_nothing_fails(
    open_local, tmp_path
) -> None:
    backend = await open_local()
    for number in range(24):
        await put(backend, number)
    await backend.sync()
    (tmp_path / "segments" / "seg-0001").unlink()
    os.truncate(tmp_path / "segments" / "seg-0000", 2 * 4096)
    found = [await is_there(backend, n) for n in range(24)]
    assert found[:8] == [True] * 2 + [False] * 6
    assert all(found[16:])
    await backend.delete_shards([shard(n)[0] for n in range(24)])
    await backend.close()
    backend = await open_local()
    assert await listed(backend) == set()
    assert await put(backend, 1) is PutStatus.BUFFERED
    await backend.close()


async def test_ur_39_a_reader_with_an_old_ref_gets_a_miss_not_the_new_owner(open_local) -> None:
    backend = await open_local(capacity_bytes=4096, segment_bytes=4096)
    ref, key, _ = shard(1)
    await put(backend, 1)
    await backend.delete_shards([ref])
    await put(backend, 2)
    out = bytearray(3000)
    assert (await backend.get_object(ref, key, bytes([9]) * 32, out))[1] is ReadStatus.ABSENT
    assert await is_there(backend, 2)
    await backend.close()


def flip(file, at: int, bit: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 1 << bit]))


async def test_scrub_finds_every_flipped_bit_and_names_it(open_local, tmp_path) -> None:
    backend = await open_local()
    for number in range(24):
        await put(backend, number)
    rng = random.Random(7)
    hurt = sorted(rng.sample(range(24), 6))
    for number in hurt:
        file = tmp_path / "segments" / f"seg-{number // 8:04d}"
        flip(file, number % 8 * 4096 + rng.randrange(128 + 256 + 3000), rng.randrange(8))
    report = await backend.scrub(0)
    assert report.num_checked == 24
    assert {ref for ref, _ in report.bad} == {shard(n)[0] for n in hurt}
    assert all(status.is_damage for _, status in report.bad)
    assert [await is_there(backend, n) for n in range(24)] == [n not in hurt for n in range(24)]
    assert (await backend.scrub(0)).bad == ()
    await backend.close()


async def test_p_34_a_full_device_is_a_miss_and_writes_come_back(open_local, monkeypatch) -> None:
    backend = await open_local()
    await put(backend, 1)
    real = backend._store

    class FullDevice:
        def put(self, pieces):
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(real, name)

    backend._store = FullDevice()
    assert await put(backend, 2) is PutStatus.FULL
    assert await is_there(backend, 1)
    backend._store = real
    assert backend._full_until_s <= backend._clock.now_s() + 30
    backend._full_until_s = 0
    assert await put(backend, 2) is PutStatus.BUFFERED
    await backend.close()


_WRITER = """
import asyncio, sys
from pathlib import Path
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.tests.backend_suite import put

async def main():
    backend = await LocalBackend.open(
        LocalBackendConfig(Path(sys.argv[1]), 64 * 4096, 8 * 4096, payload_bytes=3000)
    )
    number = int(sys.argv[2])
    for number in range(number, number + 1000):
        status = await put(backend, number, durable=number % 3 == 0)
        print(number, status.value, flush=True)
        if number % 40 == 39:
            from services.kvstore.tests.backend_suite import shard
            await backend.delete_shards([shard(n)[0] for n in range(number - 39, number + 1)])

asyncio.run(main())
"""


def _write_and_kill(folder, num_acknowledged: int) -> list[int]:
    """Returns what a writer had acknowledged when it was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder), "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        return [int(process.stdout.readline().split()[0]) for _ in range(num_acknowledged)]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("seed", range(3))
async def test_t_crash_kill_9_loses_nothing_acknowledged_and_never_gives_wrong_bytes(
    tmp_path, seed
) -> None:
    folder = tmp_path / "segments"
    rng = random.Random(seed)
    acknowledged = await asyncio.to_thread(_write_and_kill, folder, rng.randrange(15, 39))
    backend = await LocalBackend.open(
        LocalBackendConfig(folder, 64 * 4096, 8 * 4096, payload_bytes=3000)
    )
    lost = [number for number in acknowledged if not await is_there(backend, number)]
    assert lost == []
    await backend.close()


@pytest.mark.parametrize("seed", range(25))
async def test_t_crash_damage_at_random_places_never_gives_wrong_bytes(
    open_local, tmp_path, seed
) -> None:
    rng = random.Random(seed)
    backend = await open_local()
    for number in range(20):
        await put(backend, number)
        if rng.random() < 0.2:
            await backend.sync()
        if rng.random() < 0.2:
            await backend.delete_shards([shard(rng.randrange(number + 1))[0]])
    await backend.close()
    folder = tmp_path / "segments"
    for _ in range(rng.randrange(1, 5)):
        file = rng.choice([*sorted(folder.glob("seg-*")), folder / "index.log"])
        if not file.exists() or not (size := file.stat().st_size):
            continue
        damage = rng.randrange(4)
        if damage == 0:
            os.truncate(file, rng.randrange(size))
        elif damage == 1:
            file.unlink()
        else:
            data = bytearray(file.read_bytes())
            at = rng.randrange(size)
            if damage == 2:
                data[at] ^= 1 << rng.randrange(8)
            else:
                data[at : at + 5000] = bytes(len(data[at : at + 5000]))
            file.write_bytes(data)
    backend = await open_local()
    for number in range(20):
        await is_there(backend, number)
    assert await put(backend, 99) is PutStatus.BUFFERED
    assert await is_there(backend, 99)
    await backend.scrub(0)
    assert (await backend.scrub(0)).bad == ()
    await backend.close()


async def test_a_cancelled_read_has_ended_before_its_buffer_is_free(open_local) -> None:
    backend = await open_local()
    await put(backend, 1)
    ref, key, pieces = shard(1)
    for _ in range(30):
        out = bytearray(3000)
        read = asyncio.create_task(backend.get_object(ref, key, bytes([9]) * 32, out))
        await asyncio.sleep(0)
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)
        frozen = bytes(out)
        await is_there(backend, 1)
        assert bytes(out) == frozen
        assert frozen in (bytes(3000), pieces[2])
    await backend.close()


async def test_a_durable_put_waits_for_the_group_commit(open_local) -> None:
    backend = await open_local(sync_every_s=0.01)
    assert await put(backend, 1, durable=True) is PutStatus.DURABLE
    assert backend._store.stat()[4] == 0
    await backend.close()


async def test_the_directory_can_be_moved(open_local, tmp_path) -> None:
    backend = await open_local()
    await put(backend, 1)
    await backend.close()
    shutil.move(tmp_path / "segments", tmp_path / "elsewhere")
    backend = await open_local(dir=tmp_path / "elsewhere")
    assert await is_there(backend, 1)
    await backend.close()
