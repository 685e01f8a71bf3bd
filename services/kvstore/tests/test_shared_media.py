"""What is special about a mount, an S3 store and a Redis server, and how each fails."""

import asyncio
import errno
import os
import random
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
from services.kvstore.tests.backend_suite import is_there, listed, put, shard
from services.kvstore.tests.servers import REGION, redis_server
from services.kvstore.tests.shared_kit import PosixShared, RedisShared


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
