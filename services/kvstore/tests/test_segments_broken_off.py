"""What a storage that is away for a moment breaks off in the middle: nothing is lost, and what was
erased stays so."""

from __future__ import annotations

import asyncio

import pytest

from services.kvstore.backends.base import StorageAway
from services.kvstore.formats import ShardHeader
from services.kvstore.tests.backend_suite import put, shard
from services.kvstore.tests.shared_kit import PosixShared, hook


@pytest.fixture
async def shared(tmp_path):
    (tmp_path / "mount").mkdir()
    storage = PosixShared(folder=tmp_path / "mount")
    yield storage
    await storage.close()


def _segment_of(backend, number: int) -> str:
    (name,) = backend._index.holders([shard(number)[0]])
    return name


def _keys(added: bytes) -> set[bytes]:
    headers = [ShardHeader.parse(added[at : at + 128]) for at in range(0, len(added), 128)]
    return {header.key16 for header in headers if header is not None}


async def test_what_a_look_found_before_it_failed_is_told_by_the_next(shared) -> None:
    one, two, three = [await shared.writer(f"w{number}") for number in range(1, 4)]
    assert (await put(one, 1)).is_stored
    assert (await put(two, 2)).is_stored
    await one.close()  # sealed: it is not looked at once more
    is_away = True

    async def tail(name: str, num_bytes: int) -> tuple[bytes, int]:
        if is_away and name.startswith("w2"):
            await asyncio.sleep(0.05)  # the other segment has been read meanwhile
            raise StorageAway("no answer")
        return await medium.tail(name, num_bytes)

    medium = hook(three, tail=tail)
    with pytest.raises(StorageAway):
        await three.poll()
    is_away = False
    assert _keys((await three.poll()).added) == {shard(n)[0].key16 for n in (1, 2)}
