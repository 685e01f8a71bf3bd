"""What a storage that is away for a moment breaks off in the middle: nothing is lost, and what was
erased stays so."""

from __future__ import annotations

import asyncio
import contextlib
import errno

import pytest

from services.kvstore.backends.base import PutStatus, StorageAway
from services.kvstore.formats import ShardHeader
from services.kvstore.tests.backend_suite import is_there, put, shard
from services.kvstore.tests.shared_kit import hook

pytestmark = pytest.mark.parametrize("shared", ["posix"], indirect=True)


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


async def test_a_segment_that_was_taken_and_nobody_was_told_is_found(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    for number in range(3):
        assert (await put(one, number)).is_stored
    await two.poll()

    async def without_an_answer(name: str, new: str) -> None:
        await medium.take(name, new)
        raise StorageAway("no answer in time")

    medium = hook(two, take=without_an_answer)
    with pytest.raises(StorageAway):
        await two.delete_shards([shard(1)[0]], erase=True)
    two._away_until_s = 0.0
    await two.poll()
    for backend in (one, two):
        await backend.poll()
        assert await is_there(backend, 0)
        assert await is_there(backend, 2)
    await two.delete_shards([shard(1)[0]], erase=True)
    assert shared.num_places_with(shard(1)[2][2]) == 0


@pytest.mark.parametrize("lands_first", [True, False])
async def test_an_append_that_lands_late_is_left_nowhere(shared, lands_first) -> None:
    backend = await shared.writer()
    assert (await put(backend, 1)).is_stored
    late = _Late(backend)
    late.is_late = True
    assert await put(backend, 2) is PutStatus.AWAY
    late.is_late = False
    backend._away_until_s = 0.0
    if lands_first:
        await late.land()
        assert shared.num_places_with(shard(2)[2][2]) == 1
    # A tenant's erasure: none of its blocks is known here.
    assert await backend.delete_shards([], erase=True) == 0
    await late.land()
    assert shared.num_places_with(shard(2)[2][2]) == 0
    assert await is_there(backend, 1)


async def test_a_segment_that_was_left_without_an_end_is_ended_by_a_poll(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    late = _Late(one)
    late.is_late = True
    with pytest.raises(StorageAway):
        await one._segments.seal()
    late.is_late = False
    one._away_until_s = 0.0
    await one.poll()
    await one._segments.seal()
    await two.poll()
    assert [segment.is_sealed for segment in two._index.segments.values()] == [True]
    assert await is_there(two, 1)


async def test_a_copy_is_compared_with_what_is_announced_when_the_storage_is_back(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    assert (await put(one, 2)).is_stored
    await two.poll()

    async def append(*args) -> None:
        one._medium = one._segments._medium = medium
        await two.delete_shards([shard(1)[0]], erase=True)  # between reading and writing
        hook(one, names=names)
        await medium.append(*args)

    async def names() -> set[str]:
        raise StorageAway("no answer")

    medium = hook(one, append=append)
    with pytest.raises(StorageAway):
        await one._segments.rewrite([_segment_of(one, 1)])
    one._medium = one._segments._medium = medium
    one._away_until_s = 0.0
    await one.poll()
    assert shared.num_places_with(shard(1)[2][2]) == 0
    for backend in (one, two):
        await backend.poll()
        assert [await is_there(backend, number) for number in (1, 2)] == [False, True]


async def test_a_copy_is_compared_with_what_is_announced_after_a_restart(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await two.poll()

    async def append(*args) -> None:
        one._medium = one._segments._medium = medium
        await two.delete_shards([shard(1)[0]], erase=True)
        await medium.append(*args)
        raise asyncio.CancelledError  # its process ends here

    medium = hook(one, append=append)
    with pytest.raises(asyncio.CancelledError):
        await one._segments.rewrite([_segment_of(one, 1)])
    assert shared.num_places_with(shard(1)[2][2]) == 1
    await one.close()
    again = await shared.writer("w1")
    await again.poll()
    assert shared.num_places_with(shard(1)[2][2]) == 0


async def test_who_erased_and_starts_again_is_heard_by_who_copied_meanwhile(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await two.poll()

    async def append(*args) -> None:
        one._medium = one._segments._medium = medium
        await two.delete_shards([shard(1)[0]], erase=True)
        await two.close()
        await shared.writer("w2")
        await medium.append(*args)

    medium = hook(one, append=append)
    await one._segments.rewrite([_segment_of(one, 1)])
    assert shared.num_places_with(shard(1)[2][2]) == 0


async def test_announcements_go_when_they_are_over_whoever_made_them(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await one.delete_shards([shard(1)[0]], erase=True)
    await one.close()  # it never comes back
    await two._segments.rewrite([])
    names = {name for name in await two._medium.names() if name.startswith("w1/era-")}
    assert names
    assert two._segments._erasures
    for now_s in (0.0, 1000.0):
        await two._segments.remove_late(names, now_s)
        assert await two._medium.names() >= names
    await two._segments.remove_late(names, 100_000.0)
    assert not names & await two._medium.names()
    await two.poll()
    assert not two._segments._erasures


async def test_no_name_is_used_again_after_a_restart(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await one._segments.seal()
    await two.poll()
    await one.delete_shards([shard(1)[0]])
    for _ in range(2):  # the first removes what is empty
        await one.close()
        one = await shared.writer("w1")
    assert (await put(one, 2)).is_stored
    await two.poll()
    assert await is_there(two, 2)


async def test_what_a_mount_that_fails_during_a_look_hides_is_found_when_it_is_back(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    assert (await put(two, 2)).is_stored
    await one.poll()

    async def names() -> set[str]:
        return set()

    async def tail(name: str, num_bytes: int) -> tuple[bytes, int]:
        raise FileNotFoundError(name)

    medium = hook(one, names=names, tail=tail)
    assert len((await one.poll()).removed) == 2
    one._medium = one._segments._medium = medium
    assert _keys((await one.poll()).added) == {shard(n)[0].key16 for n in (1, 2)}
    assert one.owns(shard(1)[0])
    assert await is_there(one, 1)
    assert await is_there(one, 2)


async def test_a_clock_of_any_year_gives_names_that_can_be_written_down(shared) -> None:
    one = await shared.writer("w1")
    for wall_s in (-1.0, 0.0, 9e9):
        await one._segments.settle([], wall_s)
        assert (await put(one, int(wall_s) % 97)).is_stored
        await one.delete_shards([shard(int(wall_s) % 97)[0]])
        assert 0 < one._segments._next_number < 1 << 32
    again = await shared.writer("w1")
    assert (await put(again, 200)).is_stored
    assert await is_there(again, 200)


@pytest.mark.parametrize("num_failures", [1, 5])
async def test_a_bad_moment_while_a_segment_is_copied_is_no_damage(shared, num_failures) -> None:
    one = await shared.writer("w1")
    for number in range(3):
        assert (await put(one, number)).is_stored
    left = num_failures

    async def read(name: str, offset: int, num_bytes: int) -> bytes:
        nonlocal left
        if left:
            left -= 1
            raise OSError(errno.EIO, "a bad moment")
        return await medium.read(name, offset, num_bytes)

    medium = hook(one, read=read)
    await one._segments.rewrite([_segment_of(one, 1)])
    assert [await is_there(one, number) for number in range(3)] == [True] * 3


async def test_a_device_that_reads_nothing_is_not_asked_for_ever(shared) -> None:
    one = await shared.writer("w1")
    for number in range(8):
        assert (await put(one, number)).is_stored
    num_reads = 0

    async def read(name: str, offset: int, num_bytes: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        raise OSError(errno.EIO, "the device is gone")

    hook(one, read=read)
    await one._segments.rewrite([_segment_of(one, 1)])
    assert num_reads == 8 + 8  # each block, and eight times again in all
