"""What a storage that is away for a moment breaks off in the middle: nothing is lost, and what was
erased stays so."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.kvstore.backends.base import PutStatus, StorageAway
from services.kvstore.formats import ShardHeader
from services.kvstore.tests.backend_suite import is_there, put, shard
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


class _Late:
    """Appends that get no answer while `is_late`, and are done later all the same."""

    def __init__(self, backend) -> None:
        self.is_late = False
        self._late: list[tuple] = []
        self._medium = hook(backend, append=self._append)

    async def _append(self, name, offset, pieces) -> None:
        if self.is_late:
            self._late.append((name, offset, [bytes(piece) for piece in pieces]))
            raise StorageAway("no answer in time")
        await self._medium.append(name, offset, pieces)

    async def land(self) -> None:
        """Does what was asked for, as a storage does that has only been slow."""
        for args in self._late:
            with contextlib.suppress(FileNotFoundError):
                await self._medium.append(*args)
        self._late.clear()


async def _small_segments(backend, count: int) -> None:
    """Writes a block at a time, each into a segment of its own."""
    for number in range(count):
        assert (await put(backend, number)).is_stored
        await backend._segments.seal()


async def test_copies_that_land_late_write_over_nothing(shared) -> None:
    backend = await shared.writer()
    await _small_segments(backend, 4)
    assert (await put(backend, 4)).is_stored
    late = _Late(backend)
    late.is_late = True
    with pytest.raises(StorageAway):
        await backend._segments.rewrite([_segment_of(backend, number) for number in range(4)])
    late.is_late = False
    backend._away_until_s = 0.0
    for number in range(5, 8):
        assert (await put(backend, number)).is_stored
    await late.land()
    for number in range(8):
        assert await is_there(backend, number), number


async def test_deletes_that_land_late_write_over_nothing(shared) -> None:
    backend = await shared.writer()
    for number in range(6):
        assert (await put(backend, number)).is_stored
    await backend.delete_shards([shard(0)[0]])
    late = _Late(backend)
    late.is_late = True
    await backend.delete_shards([shard(1)[0]])
    late.is_late = False
    await backend.delete_shards([shard(2)[0]])
    await late.land()
    await backend.close()
    again = await shared.writer()
    assert [await is_there(again, n) for n in range(6)] == [False] * 3 + [True] * 3


async def test_a_segment_that_is_taken_while_empty_ones_are_removed_stops_nobody(shared) -> None:
    backend = await shared.writer()
    await _small_segments(backend, 3)
    last = max(backend._index.segments)

    async def taken_meanwhile(name: str) -> None:
        await medium.delete(name)
        if last in backend._index.segments:
            await medium.take(last, "w2/seg-00000001")
            await backend.poll()

    medium = hook(backend, delete=taken_meanwhile)
    assert await backend.delete_shards([shard(0)[0]]) == 1
    assert (await put(backend, 9)).is_stored
    for number in (1, 2, 9):
        assert await is_there(backend, number), number


async def test_a_put_after_the_end_is_away_and_is_not_waited_for(shared) -> None:
    backend = await shared.writer()
    await backend.close()
    assert await asyncio.wait_for(put(backend, 1), 10) is PutStatus.AWAY


async def test_what_waits_behind_a_write_without_an_answer_is_answered_at_once(shared) -> None:
    backend = await shared.writer()
    calls = []

    async def no_answer(name, offset, pieces) -> None:
        calls.append(name)
        raise StorageAway("no answer in time")

    hook(backend, append=no_answer)
    statuses = await asyncio.gather(*(put(backend, number) for number in range(20)))
    assert statuses == [PutStatus.AWAY] * 20
    assert len(calls) == 1


async def test_what_is_deleted_is_not_remembered_for_ever(shared) -> None:
    backend = await shared.writer()
    assert (await put(backend, 1)).is_stored
    await backend._segments.rewrite([_segment_of(backend, 1)])
    await backend.delete_shards([shard(1)[0]])
    assert not backend._index.buried
