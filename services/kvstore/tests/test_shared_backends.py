"""posix, s3 and redis against the suite, against each other's writers, and against loss."""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from services.common.clock import SYSTEM_CLOCK
from services.common.errors import Failure, Reason
from services.kvstore.backends.base import PutStatus, ReadStatus, StorageAway
from services.kvstore.backends.posix import PosixMedium
from services.kvstore.backends.s3 import S3Config, S3Medium
from services.kvstore.backends.segment_writer import SegmentedConfig
from services.kvstore.backends.segmented import SegmentedBackend
from services.kvstore.backends.shared import open_shared
from services.kvstore.config import SharedConfig, StoreConfig
from services.kvstore.tests.backend_suite import is_there, listed, put, run_suite, shard
from services.kvstore.tests.servers import REGION, make_bucket, redis_server, s3_server
from services.kvstore.tests.shared_kit import SLOT, PosixShared, RedisShared, S3Shared, hook


@pytest.fixture(scope="module")
def redis_process(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def s3_process(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3")) as server:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        make_bucket(server, "kvcache")
        yield server


@pytest.fixture(params=["posix", "s3", "redis"])
async def shared(request, tmp_path):
    prefix = request.node.name.translate(str.maketrans("[]", "__"))
    if request.param == "posix":
        (tmp_path / "mount").mkdir()
        storage = PosixShared(folder=tmp_path / "mount")
    elif request.param == "s3":
        storage = S3Shared(server=request.getfixturevalue("s3_process"), prefix=prefix)
    else:
        storage = RedisShared(server=request.getfixturevalue("redis_process"), prefix=prefix)
    yield storage
    await storage.close()


async def test_the_suite(shared) -> None:
    await run_suite(shared.writer)


async def test_full_is_an_answer_and_room_is_used_again(shared) -> None:
    backend = await shared.writer()
    stored = []
    for number in range(80):
        status = await put(backend, number)
        if status is PutStatus.FULL:
            break
        stored.append(number)
    assert 40 <= len(stored) < 70
    assert await put(backend, 900) is PutStatus.FULL
    for number in stored:
        assert await is_there(backend, number)
    # Every second one goes, so that nowhere a whole segment is empty.
    await backend.delete_shards([shard(number)[0] for number in stored[::2]])
    for number in range(200, 215):
        assert (await put(backend, number)).is_stored, number
    for number in [*stored[1::2], *range(200, 215)]:
        assert await is_there(backend, number), number
    assert (await backend.stat()).num_used == len(stored[1::2]) + 15
    assert (await backend.stat()).disk_bytes <= 64 * SLOT


@pytest.mark.parametrize("at", [3, 200, 3300])
async def test_p_30_a_flipped_bit_is_a_miss_and_scrub_names_it(shared, at) -> None:
    backend = await shared.writer()
    for number in range(6):
        await put(backend, number)
    ref, key, _ = shard(3)
    await shared.damage(backend, ref, at)
    out = bytearray(3000)
    header, status = await backend.get_object(ref, key, bytes([9]) * 32, out)
    assert (header, out) == (None, bytearray(3000))
    assert status.is_damage
    assert [await is_there(backend, number) for number in range(6)] == [
        number != 3 for number in range(6)
    ]
    report = await backend.scrub(0)
    assert [bad for bad, _ in report.bad] == [ref]
    assert report.num_checked == 6
    assert (await backend.scrub(0)).bad == ()
    await backend.delete_shards([shard(number)[0] for number in range(6)], erase=True)


async def test_ur_42_what_is_cut_short_is_a_miss_and_the_rest_is_found_again(shared) -> None:
    backend = await shared.writer()
    for number in range(7):
        await put(backend, number)
    await shared.cut(backend, shard(5)[0])
    assert not await is_there(backend, 5)
    again = await shared.writer("w2")
    found = [await is_there(again, number) for number in range(7)]
    assert found[:4] == [True] * 4
    assert not found[5]


async def test_a_storage_that_is_away_is_named_and_used_again_when_it_is_back(shared) -> None:
    backend = await shared.writer()
    for number in range(4):
        assert (await put(backend, number)).is_stored
    patient = backend._config
    backend._config = replace(patient, timeout_s=0.2)
    shared.go_away()
    try:
        ref, key, _ = shard(1)
        out = bytearray(3000)
        status = (await backend.get_object(ref, key, bytes([9]) * 32, out))[1]
        assert status is ReadStatus.AWAY
        assert not status.is_damage, "nothing is forgotten for it"
        assert await put(backend, 50) is PutStatus.AWAY
        assert (await backend.get_shard(ref))[1] is ReadStatus.AWAY
        with pytest.raises(StorageAway):
            await backend.delete_shards([ref], erase=True)
        with pytest.raises(StorageAway):
            await backend.poll()
        with pytest.raises(StorageAway):
            await shared.writer("w2", timeout_s=0.1)
    finally:
        shared.come_back()
    backend._config = patient

    async def again(ask) -> None:
        """Asks until it succeeds, without the pause after a failure; the test's deadline bounds
        it."""
        while True:
            backend._away_until_s = 0.0
            answer = await ask()
            if answer is True or (isinstance(answer, PutStatus) and answer.is_stored):
                return
            await asyncio.sleep(0.05)

    await again(lambda: put(backend, 51))
    for number in (0, 2, 3, 51):
        await again(lambda number=number: is_there(backend, number))


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


async def test_a_restart_finds_its_own_again_and_what_it_deleted_stays_deleted(shared) -> None:
    backend = await shared.writer()
    for number in range(11):
        await put(backend, number)
    await backend.delete_shards([shard(number)[0] for number in (2, 3, 7)])
    expected = {shard(n)[0] for n in range(11) if n not in (2, 3, 7)}
    for _ in range(2):
        await backend.close()
        backend = await shared.writer()
        assert await listed(backend) == expected
        assert all(backend.owns(ref) for ref in expected)
        assert (await backend.stat()).num_used == len(expected)


async def test_what_is_closed_is_away_for_whoever_still_asks(shared) -> None:
    backend = await shared.writer()
    await put(backend, 1)
    await backend.close()
    with pytest.raises(StorageAway):
        await backend.poll()
    assert (await backend.get_shard(shard(1)[0]))[1] is ReadStatus.AWAY


# ---- what only some have ------------------------------------------------------------------------


@pytest.mark.parametrize("shared", ["posix", "s3"], indirect=True)
async def test_many_blocks_share_a_name_and_small_ones_are_written_together(shared) -> None:
    backend = await shared.writer(
        capacity_bytes=512 * SLOT, segment_bytes=64 * SLOT, batch_shards=16
    )
    for number in range(40):
        await put(backend, number)
    # One at a time, the worst case: still far fewer names than blocks.
    names = {name for name in await backend._medium.names() if "seg-" in name}
    assert len(names) <= 14
    for number in range(40):
        assert await is_there(backend, number)


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


@pytest.mark.parametrize("shared", ["redis"], indirect=True)
async def test_an_unforeseen_failure_leaves_nobody_waiting(shared, monkeypatch) -> None:
    backend = await shared.writer()

    async def broken(batch) -> list[object]:
        raise ValueError("an answer that is none")

    monkeypatch.setattr(backend, "_send", broken)
    assert await put(backend, 1) is PutStatus.AWAY
    assert (await backend.get_shard(shard(1)[0]))[1] is ReadStatus.ABSENT
    monkeypatch.undo()
    assert (await put(backend, 1)).is_stored
    assert await is_there(backend, 1)


@pytest.mark.parametrize("shared", ["redis"], indirect=True)
async def test_a_follower_that_fell_behind_the_log_looks_through_everything(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    for number in range(5):
        await put(one, number)
    await one._client.xtrim(one._stream, maxlen=1)
    await one.delete_shards([shard(2)[0]])
    assert len((await two.poll()).added) == 4 * 128
    assert await listed(two) == {shard(n)[0] for n in (0, 1, 3, 4)}
    await one._client.flushall()
    assert len((await two.poll()).removed) == 4
    assert await listed(two) == set()


@pytest.mark.parametrize("shared", ["redis"], indirect=True)
@pytest.mark.parametrize("scans", [False, True])
async def test_what_a_follower_found_before_the_server_was_away_is_told_later(
    shared, scans
) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    await put(one, 0)
    await two.poll()
    for number in range(1, 7):
        await put(one, number)
    if scans:
        await one._client.xtrim(one._stream, maxlen=1, approximate=False)
    two._config = replace(two._config, max_pipeline_commands=2)
    send, num_looks = two._send, 0

    async def away_in_the_middle(batch):
        nonlocal num_looks
        answers = await send(batch)
        num_looks += batch[0][0] == ("SCAN" if scans else "XRANGE")
        if num_looks == (2 if scans else 3):
            raise StorageAway("no answer")
        # As if there were more keys than one answer names.
        return [[b"1", answers[0][1]]] if batch[0][0] == "SCAN" else answers

    two._send = away_in_the_middle
    with pytest.raises(StorageAway):
        await two.poll()
    two._send = send
    assert len(two._sizes) > 1, "something was found before"
    assert len((await two.poll()).added) == 6 * 128
    assert (await two.poll()).is_nothing


@pytest.mark.parametrize("shared", ["redis"], indirect=True)
async def test_what_a_server_took_without_an_answer_is_erased_when_it_answers(shared) -> None:
    backend = await shared.writer()
    send = backend._send

    async def answer_is_lost(batch):
        await send(batch)
        raise StorageAway("no answer")

    async def no_answer(batch):
        raise StorageAway("no answer")

    ref, _, pieces = shard(1)
    backend._send = answer_is_lost
    assert await put(backend, 1) is PutStatus.AWAY
    backend._send = send
    assert await listed(backend) == {ref}
    backend._send = no_answer
    with pytest.raises(StorageAway):
        await backend.delete_shards([ref], erase=True)
    backend._send = send
    assert await backend.delete_shards([ref], erase=True) == 1
    assert shared.num_places_with(pieces[2]) == 0


@pytest.mark.parametrize("shared", ["redis"], indirect=True)
async def test_p_34_what_others_cannot_be_told_of_for_want_of_memory_is_not_stored(shared) -> None:
    backend = await shared.writer()
    send = backend._send

    async def too_full_for_the_log(batch):
        answers = iter(await send([command for command in batch if command[0] != "XADD"]))
        full = backend._errors.ResponseError("OOM command not allowed")
        return [full if command[0] == "XADD" else next(answers) for command in batch]

    backend._send = too_full_for_the_log
    assert await put(backend, 1) is PutStatus.FULL
    assert shared.num_places_with(shard(1)[2][2]) == 0
    assert not await is_there(backend, 1)


@pytest.mark.parametrize("shared", ["redis"], indirect=True)
async def test_a_stream_that_has_gone_back_is_looked_through_anew(shared) -> None:
    one, two = await shared.writer("w1"), await shared.writer("w2")
    await put(one, 1)
    await two.poll()
    # A replica that lagged has become the server, and its clock is behind.
    await put(one, 2)
    await one._client.delete(one._stream)
    await one._client.xadd(one._stream, {b"r": b"nothing"}, id="1-1")
    assert len((await two.poll()).added) == 128
    assert await is_there(two, 2)


async def test_p_34_a_server_out_of_memory_is_full_and_takes_blocks_when_there_is_room(
    tmp_path,
) -> None:
    with redis_server(tmp_path, "--maxmemory", "8mb") as server:
        shared = RedisShared(server=server, prefix="full:")
        backend = await shared.writer(capacity_bytes=64 << 20, payload_bytes=200_000)
        stored = []
        for number in range(200):
            ref, _, pieces = shard(number, size=200_000)
            if await backend.put_shard(pieces) is PutStatus.FULL:
                break
            stored.append((ref, b"".join(pieces)))
        assert 10 < len(stored) < 200
        assert (await backend.get_shard(stored[0][0]))[0] == stored[0][1]
        await backend.delete_shards([ref for ref, _ in stored[:8]])
        backend._full_until_s = 0.0
        assert (await put(backend, 9000)).is_stored
        assert (await backend.get_shard(stored[-1][0]))[0] == stored[-1][1]
        await shared.close()


async def test_a_large_object_goes_in_parts_and_no_name_is_written_twice(s3_process) -> None:
    place = S3Config.parse(
        "s3://kvcache/parts",
        endpoint=f"http://127.0.0.1:{s3_process.port}",
        region=REGION,
        part_bytes=5 << 20,
    )
    for has_conditions, data in (
        (True, random.Random(1).randbytes((5 << 20) + 1000)),
        (False, random.Random(2).randbytes(2 << 20)),
    ):
        medium = S3Medium(place)
        medium._has_conditions = has_conditions
        name = f"w/seg-0000000{int(has_conditions)}"
        await medium.create(name, [data[: 1 << 20], data[1 << 20 :]])
        assert await medium.tail(name, 1 << 30) == (data, len(data))
        for other in (data, b"short"):
            with pytest.raises(FileExistsError):
                await medium.create(name, [other])
        assert await medium.read(name, len(data) - 4, 10) == data[-4:]
        assert await medium.read(name, 12 << 20, 10) == b""
        with pytest.raises(FileNotFoundError):
            await medium.read("w/seg-00000009", 0, 10)
        await medium.delete(name)
        await medium.delete(name)
        await medium.close()


async def test_a_bucket_that_is_not_there_is_away_and_says_so(s3_process) -> None:
    place = S3Config.parse("s3://nobody", endpoint=f"http://127.0.0.1:{s3_process.port}")
    with pytest.raises(StorageAway, match="NoSuchBucket"):
        await SegmentedBackend.open(S3Medium(place), SegmentedConfig("w1"))


async def test_a_mount_that_is_gone_is_never_taken_for_an_empty_store(tmp_path) -> None:
    with pytest.raises(StorageAway, match="not there"):
        await PosixMedium.open(tmp_path / "kv")
    (tmp_path / "kv").mkdir()
    medium = await PosixMedium.open(tmp_path / "kv")
    mark = medium.mark
    await medium.close()
    assert (await PosixMedium.open(tmp_path / "kv", mark)).mark == mark
    # The folder is there and empty: what a host sees whose mount failed.
    (tmp_path / "kv").rename(tmp_path / "mounted elsewhere")
    (tmp_path / "kv").mkdir()
    with pytest.raises(StorageAway):
        await PosixMedium.open(tmp_path / "kv", mark)
    assert list((tmp_path / "kv").iterdir()) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
async def test_a_mount_that_cannot_be_listed_is_away(tmp_path, monkeypatch, number) -> None:
    shared = PosixShared(folder=tmp_path / "mount")
    shared.folder.mkdir()
    backend = await shared.writer()

    def scandir(path):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(StorageAway):
            await backend.poll()
        with pytest.raises(StorageAway):
            await shared.writer("w2")
    await shared.close()


async def test_p_34_a_mount_without_room_is_full_and_nothing_is_written_over(
    tmp_path, monkeypatch
) -> None:
    shared = PosixShared(folder=tmp_path / "mount")
    shared.folder.mkdir()
    backend = await shared.writer()
    await put(backend, 1)
    real, is_full = os.pwritev, True

    def pwritev(file, pieces, offset):
        if not is_full:
            return real(file, pieces, offset)
        real(file, [b"".join(bytes(piece) for piece in pieces)[:2000]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", pwritev)
    for number in range(2, 6):
        assert await put(backend, number) is PutStatus.FULL
        backend._full_until_s = 0.0
        assert await is_there(backend, 1)
    is_full = False
    assert (await put(backend, 6)).is_stored
    other = await shared.writer("w2")
    for reader in (backend, other):
        assert [await is_there(reader, n) for n in range(1, 7)] == [
            n in (1, 6) for n in range(1, 7)
        ]
    # What was cut short is not kept: one segment with the first block, one with the last.
    assert len({name for name in await backend._medium.names() if "seg-" in name}) == 2
    await shared.close()


async def test_a_mount_that_hangs_is_away_in_time(tmp_path, monkeypatch) -> None:
    shared = PosixShared(folder=tmp_path / "mount")
    shared.folder.mkdir()
    backend = await shared.writer(timeout_s=0.05)
    await put(backend, 1)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        for name in ("read", "append", "create", "names"):
            patch.setattr(backend._medium, name, never)
        ref = shard(1)[0]
        assert (await backend.get_shard(ref))[1] is ReadStatus.AWAY
        backend._away_until_s = 0.0
        assert await put(backend, 2) is PutStatus.AWAY
        backend._away_until_s = 0.0
        with pytest.raises(StorageAway):
            await backend.poll()
    backend._away_until_s = 0.0
    assert await is_there(backend, 1)
    assert (await put(backend, 3)).is_stored
    await shared.close()


def test_a_place_that_cannot_be_is_refused_before_anything_starts() -> None:
    for fields in (
        {"backend": "posix"},
        {"backend": "local", "at": "/mnt"},
        {"backend": "redis", "at": "redis://user:secret@host/0"},
        {"backend": "redis", "at": "redis://host/0", "put_ack": "durable"},
    ):
        with pytest.raises(ValueError, match=r"at|put_ack"):
            StoreConfig(**fields)
    for place in ("http://bucket", "s3://", "s3://bucket?x=1", "bucket/prefix"):
        with pytest.raises(ValueError, match="s3://bucket/prefix"):
            S3Config.parse(place)
    for writer in ("", "a/b", "..", "a b"):
        with pytest.raises(ValueError, match="writer"):
            SegmentedConfig(writer)


async def test_a_password_for_redis_comes_from_its_file_and_a_wrong_one_is_away(tmp_path) -> None:
    with redis_server(tmp_path / "server", "--requirepass", "a-secret") as server:
        (tmp_path / "password").write_text("a-secret\n")
        place = {"backend": "redis", "at": f"redis://127.0.0.1:{server.port}/0"}
        shared = SharedConfig(redis_password_file=str(tmp_path / "password"))
        config = StoreConfig(dir=tmp_path / "kv", payload_bytes=3000, shared=shared, **place)
        opened = await open_shared(config, SYSTEM_CLOCK)
        assert (await put(opened.backend, 1)).is_stored
        await opened.backend.close()
        opened.close()
        (tmp_path / "password").write_text("another\n")
        with pytest.raises(Failure) as failure:
            await open_shared(config, SYSTEM_CLOCK)
        assert failure.value.reason is Reason.BACKEND_LOST
        assert "secret" not in str(failure.value)
        assert "another" not in str(failure.value)


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


@pytest.mark.parametrize("shared", ["posix"], indirect=True)
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


@pytest.mark.parametrize("shared", ["posix"], indirect=True)
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
