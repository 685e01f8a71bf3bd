"""posix, s3 and redis against the suite, and against loss of what they stand on."""

import asyncio
from dataclasses import replace

import pytest

from services.kvstore.backends.base import PutStatus, ReadStatus, StorageAway
from services.kvstore.tests.backend_suite import is_there, listed, put, run_suite, shard
from services.kvstore.tests.shared_kit import SLOT


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
