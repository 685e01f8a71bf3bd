"""Several writers on one shared storage: what each may do to the others' shards, and what not."""

import asyncio
import random

import pytest

from services.common.clock import SYSTEM_CLOCK
from services.kvstore.backends.base import PutStatus, StorageAway
from services.kvstore.tests.backend_suite import is_there, listed, put, shard
from services.kvstore.tests.shared_kit import PosixShared, hook


async def test_what_one_writes_another_finds_and_reads(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    for number in range(10):
        await put(one, number)
    changes = await two.poll()
    assert len(changes.added) == 10 * 128
    assert changes.removed == ()
    assert (await two.poll()).is_nothing
    assert [await is_there(two, number) for number in range(10)] == [True] * 10
    await put(two, 20)
    await put(one, 10)
    assert len((await one.poll()).added) == 128
    assert len((await two.poll()).added) == 128
    assert await is_there(one, 20)
    assert await is_there(two, 10)
    assert (one.owns(shard(0)[0]), one.owns(shard(20)[0])) == (True, False)
    assert ((await one.stat()).num_used, (await two.stat()).num_used) == (11, 1)
    third = await shared.writer("w3")
    assert await listed(third) == {shard(n)[0] for n in [*range(11), 20]}


async def test_only_its_writer_deletes_a_shard_but_anybody_erases_it(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    for number in range(6):
        await put(one, number)
    await two.poll()
    assert await two.delete_shards([shard(0)[0]]) == 1
    assert not await is_there(two, 0)
    assert await is_there(one, 0)
    needle = shard(3)[2][2]
    assert shared.num_places_with(needle) == 1
    assert await two.delete_shards([shard(3)[0]], erase=True) == 1
    assert shared.num_places_with(needle) == 0
    assert not await is_there(one, 3)
    await one.poll()
    # The others are as before, and the writer goes on writing.
    for number in (1, 2, 4, 5):
        assert await is_there(one, number), number
    assert (await put(one, 30)).is_stored
    assert await is_there(one, 30)
    await two.poll()
    assert await is_there(two, 30)
    for number in (1, 2, 4, 5):
        assert await is_there(two, number), number


async def test_what_was_left_out_here_is_erased_with_the_rest(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    for number in range(9):  # the first eight fill a segment, which is sealed then
        assert (await put(one, number)).is_stored
    await two.poll()
    ref, _, pieces = shard(3)
    assert await two.delete_shards([ref]) == 1
    refs = [shard(number)[0] for number in range(9)]
    assert await listed(two) == set(refs)
    await two.delete_shards(refs, erase=True)
    assert shared.num_places_with(pieces[2]) == 0


async def test_two_that_write_at_once_lose_nothing(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    statuses = await asyncio.gather(
        *(put(one, number) for number in range(12)), *(put(two, n) for n in range(100, 112))
    )
    assert all(status.is_stored for status in statuses)
    # The same block by both is two shards, and each reads its own.
    assert (await put(one, 500)).is_stored
    await two.put_shard(shard(500, put_id=2)[2])
    await one.poll()
    await two.poll()
    for backend in (one, two):
        for number in [*range(12), *range(100, 112), 500]:
            assert await is_there(backend, number), number
        assert await is_there(backend, 500, put_id=2)


async def _as_it_likes(backend, rng, mine, ended) -> None:
    """One writer's random life: puts its own numbers, deletes some, erases anybody's, looks."""
    for _ in range(25):
        what = rng.random()
        if what < 0.5:
            number = mine.pop()
            if (await put(backend, number)).is_stored:
                ended.setdefault(number, "stored")
        elif what < 0.65:
            number = rng.choice([*ended, 0])
            if backend.owns(shard(number)[0]):
                ended[number] = "deleted"
                await backend.delete_shards([shard(number)[0]])
        elif what < 0.75:
            number = rng.choice([*ended, 0])
            if backend.object_bytes(shard(number)[0]) is not None:
                ended[number] = "erased"
                await backend.delete_shards([shard(number)[0]], erase=True)
        elif what < 0.9:
            await is_there(backend, rng.choice([*ended, 0]))
        else:
            await backend.poll()


async def _check_random_lives(shared, seed: int) -> None:
    ended: dict[int, str] = {}
    # A slow answer is no part of this: to whom a storage is away, an erasure says so by failing.
    backends = [await shared.writer(f"w{number}", timeout_s=60.0) for number in range(3)]
    lives = (
        _as_it_likes(
            backend, random.Random(f"{seed} {n}"), list(range(1000 * n, 1000 * n + 50)), ended
        )
        for n, backend in enumerate(backends)
    )
    await asyncio.gather(*lives)
    for _ in range(2):
        for backend in backends:
            await backend.poll()
    again = await shared.writer("w9", timeout_s=60.0)
    for number, fate in ended.items():
        for backend in (*backends, again):
            there = await is_there(backend, number)
            if fate == "stored":
                assert there, (number, fate)
            elif fate == "erased":
                assert not there, (number, fate)
            # Others may still read what its writer merely deleted.
        if fate == "erased":
            assert shared.num_places_with(shard(number)[2][2]) == 0, number


# Each request to moto takes tens of milliseconds, so these three seeds are most of its share.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.timeout(300)
async def test_whatever_three_writers_do_at_once_nothing_is_wrong_lost_or_left(
    shared, seed
) -> None:
    await _check_random_lives(shared, seed)


class _LateCreates:
    """A medium that, while `is_late`, gives a new name no answer and writes it later."""

    def __init__(self, medium) -> None:
        self._medium = medium
        self.is_late = False
        self._late: list[tuple[str, list[bytes]]] = []

    def __getattr__(self, name):
        return getattr(self._medium, name)

    async def create(self, name, pieces) -> None:
        if self.is_late:
            self._late.append((name, [bytes(piece) for piece in pieces]))
            raise StorageAway("no answer in time")
        await self._medium.create(name, pieces)

    async def land(self) -> None:
        """Does what was asked for, as a storage does that has only been slow."""
        for name, pieces in self._late:
            await self._medium.create(name, pieces)
        self._late.clear()


@pytest.mark.parametrize("shared", ["s3"], indirect=True)
async def test_a_write_that_was_given_up_and_lands_late_is_removed_and_not_found_by_others(
    shared,
) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    slow = _LateCreates(one._medium)
    one._medium = one._segments._medium = slow
    assert (await put(one, 1)).is_stored
    slow.is_late = True
    assert await put(one, 2) is PutStatus.AWAY
    slow.is_late = False
    one._away_until_s = 0.0
    await slow.land()
    assert shared.num_places_with(shard(2)[2][2]) == 1
    await one.poll()
    await two.poll()
    assert shared.num_places_with(shard(2)[2][2]) == 0
    for backend in (one, two):
        assert await is_there(backend, 1)
        assert not await is_there(backend, 2)
    assert (await put(one, 2)).is_stored
    assert await is_there(one, 2)
    # A segment that is written anew while its writer is told nothing brings nobody's block back.
    slow.is_late = True
    await one.delete_shards([shard(1)[0]])
    with pytest.raises(StorageAway):
        await one.delete_shards([shard(2)[0]], erase=True)
    slow.is_late = False
    one._away_until_s = 0.0
    await one.delete_shards([shard(2)[0]], erase=True)
    await slow.land()
    await one.poll()
    assert shared.num_places_with(shard(2)[2][2]) == 0


@pytest.mark.parametrize("seed", range(10, 30))
async def test_many_random_lives_on_one_folder(tmp_path, seed) -> None:
    shared = PosixShared(folder=tmp_path / "mount")
    shared.folder.mkdir()
    await _check_random_lives(shared, seed)
    await shared.close()


@pytest.mark.parametrize("shared", ["s3"], indirect=True)
async def test_a_write_that_is_tried_again_and_was_done_the_first_time_is_erased_too(
    shared,
) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    is_lost = True

    async def answer_is_lost(name, pieces) -> None:
        nonlocal is_lost
        await medium.create(name, pieces)
        if is_lost:
            is_lost = False
            raise FileExistsError("412")  # what the client's second try is told

    medium = hook(one, create=answer_is_lost)
    assert (await put(one, 1)).is_stored
    await two.poll()
    assert await one.delete_shards([shard(1)[0]], erase=True) == 1
    assert shared.num_places_with(shard(1)[2][2]) == 0
    await two.poll()
    assert not await is_there(two, 1)


@pytest.mark.parametrize("shared", ["posix", "s3"], indirect=True)
async def test_segments_of_a_writer_that_never_came_back_are_removed_when_all_expired(
    shared,
) -> None:
    one = await shared.writer("w1")
    for number in range(1, 5):
        await put(one, number)  # made in 1970, as the suite's headers say
    await one.close()
    two = await shared.writer("w2", reap_after_s=86_400.0)
    assert await is_there(two, 1)
    await two.poll()
    changes = await two.poll()
    assert await listed(two) == set()
    assert not changes.added
    assert not {name for name in await two._medium.names() if name.startswith("w1/")}


@pytest.mark.parametrize("shared", ["posix", "s3"], indirect=True)
async def test_old_segments_of_a_writer_that_still_writes_are_left_to_it(shared) -> None:
    one = await shared.writer("w1")
    now_s = int(SYSTEM_CLOCK.wall_s())
    for number in (1, 2, 3, 4, 5, 6, 7, 8, now_s):  # eight fill a segment
        await put(one, number)
    two = await shared.writer("w2", reap_after_s=86_400.0)
    for _ in range(2):
        await two.poll()
    assert await is_there(one, 1)
    assert await is_there(two, 1)


@pytest.mark.parametrize("shared", ["posix"], indirect=True)
async def test_what_a_writer_that_comes_back_writes_last_is_not_removed_with_the_old(
    shared,
) -> None:
    one = await shared.writer("w1")
    for number in range(1, 5):
        await put(one, number)
    two = await shared.writer("w2", reap_after_s=86_400.0)
    now_s = int(SYSTEM_CLOCK.wall_s())

    async def he_comes_back(do, *args) -> None:
        if args[0].startswith("w1/seg"):
            assert (await put(one, now_s)).is_stored
        await do(*args)

    medium = hook(
        two,
        delete=lambda *args: he_comes_back(medium.delete, *args),
        take=lambda *args: he_comes_back(medium.take, *args),
    )
    for _ in range(2):
        await two.poll()
    for backend in (two, one):
        await backend.poll()
        assert await is_there(backend, now_s)
