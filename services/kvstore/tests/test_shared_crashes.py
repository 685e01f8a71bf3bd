"""A shared folder after kill -9 and damage: never a wrong byte, nothing acknowledged lost."""

import asyncio
import random
import signal
import subprocess
import sys

import pytest

from services.kvstore.tests.backend_suite import is_there, put, shard
from services.kvstore.tests.shared_kit import PosixShared

_WRITER = """
import asyncio, sys
from pathlib import Path
from services.kvstore.backends.posix import PosixMedium
from services.kvstore.backends.segment_writer import SegmentedConfig
from services.kvstore.backends.segmented import SegmentedBackend
from services.kvstore.backends.shared import open_shared
from services.kvstore.config import SharedConfig, StoreConfig
from services.kvstore.tests.backend_suite import put, shard

async def main():
    config = SegmentedConfig("w1", 64 * 4096, 8 * 4096, payload_bytes=3000, batch_shards=4)
    backend = await SegmentedBackend.open(await PosixMedium.open(Path(sys.argv[1])), config)
    async def one(number):
        await put(backend, number)
        print(number, flush=True)
    for first in range(0, 40, 4):
        await asyncio.gather(*(one(number) for number in range(first, first + 4)))
    print("end", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def _write_and_kill(folder, num_acknowledged: int) -> list[int]:
    """Returns what a writer had acknowledged when it was killed."""
    command = [sys.executable, "-c", _WRITER, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        return [int(process.stdout.readline()) for _ in range(num_acknowledged)]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("seed", range(3))
async def test_t_crash_kill_9_of_a_writer_loses_nothing_acknowledged_for_anybody(
    tmp_path, seed
) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    count = random.Random(seed).randrange(5, 38)
    acknowledged = await asyncio.to_thread(_write_and_kill, folder, count)
    shared = PosixShared(folder=folder)
    for name in ("w2", "w1"):
        backend = await shared.writer(name)
        assert [n for n in acknowledged if not await is_there(backend, n)] == []
    await shared.close()


@pytest.mark.parametrize("seed", range(25))
async def test_t_crash_damage_at_random_places_never_gives_wrong_bytes(tmp_path, seed) -> None:
    rng = random.Random(seed)
    shared = PosixShared(folder=tmp_path / "mount")
    shared.folder.mkdir()
    backend = await shared.writer()
    for number in range(20):
        await put(backend, number)
        if rng.random() < 0.2:
            await backend.delete_shards([shard(rng.randrange(number + 1))[0]])
    if rng.random() < 0.5:
        await backend.close()
    for _ in range(rng.randrange(1, 5)):
        files = sorted(path for path in shared.folder.glob("w1/*") if path.stat().st_size)
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data))
        damage = rng.randrange(4)
        if damage == 0:
            file.write_bytes(data[:at])
        elif damage == 1 and len(files) > 1:
            file.unlink()
        elif damage == 2:
            data[at] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
        else:
            data[at : at + 5000] = bytes(len(data[at : at + 5000]))
            file.write_bytes(data)
    for name in ("w1", "w2"):
        again = await shared.writer(name)
        for number in range(20):
            await is_there(again, number)
        assert (await put(again, 99)).is_stored
        assert await is_there(again, 99)
        await again.scrub(0)
        assert (await again.scrub(0)).bad == ()
    await shared.close()
