"""Segments that move while somebody looks, copies or erases: whatever meets, nothing is lost."""

from __future__ import annotations

import asyncio
import errno

import pytest

from services.kvstore.backends.base import ReadStatus, StorageAway
from services.kvstore.backends.posix import PosixMedium
from services.kvstore.backends.segment_writer import SegmentedConfig
from services.kvstore.backends.segmented import SegmentedBackend
from services.kvstore.formats import ShardHeader
from services.kvstore.tests.backend_suite import is_there, put, shard
from services.kvstore.tests.shared_kit import SEGMENTED, Hooked, hook

pytestmark = pytest.mark.parametrize("shared", ["posix"], indirect=True)


async def _open_hooked(shared, writer: str, hooks) -> SegmentedBackend:
    medium = await PosixMedium.open(shared.folder, shared.mark)
    backend = await SegmentedBackend.open(
        Hooked(medium, **hooks(medium)), SegmentedConfig(writer, **SEGMENTED)
    )
    shared.opened.append(backend)
    return backend


def _keys(added: bytes) -> set[bytes]:
    headers = [ShardHeader.parse(added[at : at + 128]) for at in range(0, len(added), 128)]
    return {header.key16 for header in headers if header is not None}


def _segment_of(backend, number: int) -> str:
    (name,) = backend._index.holders([shard(number)[0]])
    return name


async def _copy(backend, number: int) -> str:
    """Writes what somebody else has once more into a segment of this writer; returns its name."""
    ref, _, pieces = shard(number)
    header = ShardHeader.parse(pieces[0])
    assert header is not None
    await backend._segments.append([(header, b"".join(pieces))])
    return backend._index.place(ref).segment


async def test_an_erasure_met_late_takes_nothing_that_its_writer_still_writes(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await two.poll()
    mine = await _copy(two, 1)
    assert (await put(one, 2)).is_stored  # beside block 1, and two does not know

    append = two._medium.append

    async def announced_during_the_copy(*args) -> None:
        await append(*args)
        await one._segments.announce([shard(1)[0]])

    hook(two, append=announced_during_the_copy)
    await two._segments.rewrite([mine])
    await one.poll()
    for backend in (one, await shared.writer("w3")):
        assert await is_there(backend, 2)
    assert shared.num_places_with(shard(1)[2][2]) == 0


async def test_what_is_found_in_a_taken_segment_is_told_by_the_next_poll(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await two.poll()
    take = two._medium.take

    async def written_before_it_is_taken(name: str, new: str) -> None:
        assert (await put(one, 2)).is_stored
        await take(name, new)

    hook(two, take=written_before_it_is_taken)
    await two.delete_shards([shard(1)[0]], erase=True)
    added = (await two.poll()).added
    assert len(added) == 128
    assert ShardHeader.parse(added).key16 == shard(2)[0].key16
    assert two.owns(shard(2)[0])


async def test_what_one_left_out_is_still_there_for_its_writer_after_an_erasure_beside_it(
    shared,
) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    for number in range(9):  # the first eight fill a segment, which is sealed then
        assert (await put(one, number)).is_stored
    await two.poll()
    assert await two.delete_shards([shard(3)[0]]) == 1
    await two.delete_shards([shard(4)[0]], erase=True)
    await one.poll()
    for number in (0, 1, 2, 3, 5, 6, 7, 8):
        assert await is_there(one, number), number


async def test_what_moves_while_a_storage_is_opened_is_found(shared) -> None:
    one = await shared.writer("w1")
    assert (await put(one, 1)).is_stored
    name = _segment_of(one, 1)
    is_first = True

    def hooks(medium):
        async def moved_after_the_listing() -> set[str]:
            nonlocal is_first
            names = await medium.names()
            if is_first:
                is_first = False
                await one._segments.rewrite([name])
            return names

        return {"names": moved_after_the_listing}

    two = await _open_hooked(shared, "w2", hooks)
    assert await is_there(two, 1)


@pytest.mark.parametrize("whose", ["w1", "w2"])
async def test_a_name_that_a_listing_leaves_out_is_not_gone(shared, whose) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    assert (await put(two, 2)).is_stored
    await one.poll()
    names = one._medium.names

    async def without_some() -> set[str]:
        return {name for name in await names() if not name.startswith(whose)}

    hook(one, names=without_some)
    assert (await one.poll()).removed == ()
    assert await is_there(one, 1)
    assert await is_there(one, 2)


async def test_a_storage_that_is_away_while_it_is_opened_loses_nothing(shared) -> None:
    one = await shared.writer("w1")
    for number in range(3):
        assert (await put(one, number)).is_stored
    # Its process died: the segment has no end, and is read whole by the next life.
    one._segments.abandon()
    await one.close()

    def hooks(medium):
        async def read(name: str, offset: int, num_bytes: int) -> bytes:
            if num_bytes > 128:
                raise StorageAway("no answer")
            return await medium.read(name, offset, num_bytes)

        return {"read": read}

    with pytest.raises(StorageAway):
        await _open_hooked(shared, "w1", hooks)
    again = await shared.writer("w1")
    for number in range(3):
        assert await is_there(again, number), number


async def test_what_was_found_and_is_gone_again_before_the_poll_is_not_told(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await two._refresh()
    await one.delete_shards([shard(1)[0]], erase=True)
    changes = await two.poll()
    assert changes.added == b""
    # What only moved was never gone.
    assert (await put(one, 2)).is_stored
    assert len((await two.poll()).added) == 128
    await one._segments.rewrite([_segment_of(one, 2)])
    assert (await two.poll()).removed == ()


async def test_two_that_erase_beside_each_other_both_come_to_an_end(shared) -> None:
    writers = [await shared.writer(f"w{number}", timeout_s=60.0) for number in range(3)]
    for number in range(12):
        assert (await put(writers[number % 3], number)).is_stored
    for writer in writers:
        await writer.poll()
    going = [[0, 1, 2], [3, 4], [5]]
    await asyncio.gather(
        *(
            writer.delete_shards([shard(number)[0]], erase=True)
            for writer, numbers in zip(writers, going, strict=True)
            for number in numbers
        )
    )
    for writer in writers:
        await writer.poll()
        assert [await is_there(writer, number) for number in range(12)] == [False] * 6 + [True] * 6


async def test_what_moves_again_and_again_while_it_is_read_is_not_taken_for_damaged(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await two.poll()
    num_moves = 0

    async def moved_before_it_is_read(name: str, offset: int, num_bytes: int) -> bytes:
        nonlocal num_moves
        if num_bytes > 128 and num_moves < 9:
            num_moves += 1
            await one._segments.rewrite([_segment_of(one, 1)])
        return await medium.read(name, offset, num_bytes)

    medium = hook(two, read=moved_before_it_is_read)
    for _ in range(4):
        _, status = await two.get_shard(shard(1)[0])
        assert not status.is_damage
        await two.poll()
    assert await is_there(two, 1)


async def test_what_moves_twice_while_its_writer_reads_it_is_found(shared) -> None:
    one = await shared.writer("w1")
    assert (await put(one, 1)).is_stored
    num_moves = 0

    async def moved_before_it_is_read(name: str, offset: int, num_bytes: int) -> bytes:
        nonlocal num_moves
        if num_moves < 2:
            num_moves += 1
            one._medium = one._segments._medium = medium
            await one._segments.rewrite([_segment_of(one, 1)])
            hook(one, read=moved_before_it_is_read)
        return await medium.read(name, offset, num_bytes)

    medium = hook(one, read=moved_before_it_is_read)
    assert await is_there(one, 1)


async def test_a_look_that_cannot_list_is_no_error_for_who_reads(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    assert (await put(one, 1)).is_stored
    await two.poll()
    await one._segments.rewrite([_segment_of(one, 1)])

    async def names() -> set[str]:
        raise OSError(errno.EIO, "the folder cannot be read")

    medium = hook(two, names=names)
    assert (await two.get_shard(shard(1)[0]))[1] is ReadStatus.AWAY
    two._medium = two._segments._medium = medium
    assert await is_there(two, 1)


@pytest.mark.parametrize("mover", ["w1", "w2"])
async def test_what_moves_while_all_is_listed_is_listed(shared, mover) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    writers = {"w1": one, "w2": two}
    for number in range(17):
        assert (await put(one, number)).is_stored
        assert (await put(two, 20 + number)).is_stored
    await one.poll()
    moving = writers[mover]
    found = set()
    is_first = True
    async for headers in one.list_headers():
        found |= _keys(headers)
        if is_first:
            is_first = False
            names = [n for n in moving._segments.own() if moving._index.segments[n].is_sealed]
            await moving._segments.rewrite(names)
    assert found == {shard(n + more)[0].key16 for n in range(17) for more in (0, 20)}


async def test_what_is_left_out_while_its_segment_is_copied_is_there_for_its_writer(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    for number in range(9):
        assert (await put(one, number)).is_stored
    await two.poll()
    is_first = True

    async def left_out_meanwhile(name: str, offset: int, num_bytes: int) -> bytes:
        nonlocal is_first
        if is_first and num_bytes > 128:  # a block, no header
            is_first = False
            await two.delete_shards([shard(number)[0] for number in (1, 6)])
        return await medium.read(name, offset, num_bytes)

    medium = hook(two, read=left_out_meanwhile)
    await two.delete_shards([shard(3)[0]], erase=True)
    await one.poll()
    for number in range(9):
        assert await is_there(one, number) == (number != 3), number


class _Vanishing:
    """A medium in which one name is listed and never read: whoever looks comes too late."""

    def __init__(self, medium, name: str) -> None:
        self._medium = medium
        self._name = name

    def __getattr__(self, name):
        return getattr(self._medium, name)

    async def read(self, name, offset, num_bytes):
        if name == self._name:
            raise FileNotFoundError(name)
        return await self._medium.read(name, offset, num_bytes)


async def test_a_segment_written_anew_is_copied_from_itself_and_not_from_a_twin(shared) -> None:
    one = await shared.writer("w1")
    assert (await put(one, 1)).is_stored
    assert (await put(one, 2)).is_stored
    (segment,) = one._index.holders([shard(1)[0]])
    # Another writer has a copy, which will be gone when it is read.
    _, _, pieces = shard(1)
    twin = "w2/seg-00000001"
    (shared.folder / "w2").mkdir(exist_ok=True)
    (shared.folder / twin).write_bytes(b"".join(pieces))
    await one.poll()
    assert one._index.place(shard(1)[0]).segment == twin
    one._medium = one._segments._medium = _Vanishing(one._medium, twin)
    await one._segments.rewrite([segment])
    (shared.folder / twin).unlink()
    for backend in (one, await shared.writer("w3")):
        await backend.poll()
        assert await is_there(backend, 1)
        assert await is_there(backend, 2)


async def test_a_segment_that_is_taken_while_it_is_copied_is_left_to_who_took_it(shared) -> None:
    one = await shared.writer("w1")
    assert (await put(one, 1)).is_stored
    (segment,) = one._index.holders([shard(1)[0]])
    taken = "w2/seg-00000007"
    (shared.folder / "w2").mkdir(exist_ok=True)
    (shared.folder / segment).rename(shared.folder / taken)
    await one._segments.rewrite([segment])
    assert segment not in one._index.segments
    await one.poll()
    assert await is_there(one, 1)
    assert (await put(one, 2)).is_stored
