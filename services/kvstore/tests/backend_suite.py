"""What every backend must do; each backend's test runs all of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from services.kvstore.backends.base import BlockBackend, PutStatus, ReadStatus, ShardRef
from services.kvstore.checksums import crc32c, xxh3_128
from services.kvstore.formats import EC_REPLICATION, ObjectHeader, ShardHeader

LAYOUT = bytes([9]) * 32
Open = Callable[[], Coroutine[Any, Any, BlockBackend]]


def shard(number: int, put_id: int = 1, size: int = 3000) -> tuple[ShardRef, bytes, list[bytes]]:
    """Returns a ref, its full key, and the pieces of a block stored whole."""
    rng = random.Random(f"{number} {put_id}")
    key = random.Random(number).randbytes(32)
    payload = rng.randbytes(size)
    header = ObjectHeader(
        key=key, parent=bytes(32), layout=LAYOUT, block_index=1, num_tokens=128, ttl_class=1,
        payload_bytes=size, payload_digest=xxh3_128(payload), put_id=put_id, created_ms=number,
    ).pack()  # fmt: skip
    outer = ShardHeader(
        shard=0, k=1, m=0, algorithm=EC_REPLICATION, ttl_class=1, shard_bytes=256 + size,
        object_bytes=256 + size, block_index=1, key16=key[:16], parent16=bytes(16), put_id=put_id,
        created_s=number, data_crc=crc32c(payload, crc32c(header)),
    ).pack()  # fmt: skip
    return ShardRef(key[:16], 0, put_id), key, [outer, header, payload]


async def put(backend: BlockBackend, number: int, **more: Any) -> PutStatus:
    """Puts a shard."""
    return await backend.put_shard(shard(number)[2], **more)


async def is_there(backend: BlockBackend, number: int, put_id: int = 1) -> bool:
    """Reads a shard; anything but the right bytes or a miss is an error."""
    ref, _, pieces = shard(number, put_id)
    data, status = await backend.get_shard(ref)
    assert (data is None) == (status is not ReadStatus.OK)
    assert data in (None, b"".join(pieces)), f"wrong bytes for {number}"
    return data is not None


async def listed(backend: BlockBackend) -> set[ShardRef]:
    """Returns the refs of all shards."""
    refs = set()
    async for headers in backend.list_headers():
        assert len(headers) % 128 == 0
        for at in range(0, len(headers), 128):
            header = ShardHeader.parse(headers[at : at + 128])
            assert header is not None
            refs.add(ShardRef(header.key16, header.shard, header.put_id))
    return refs


async def run_suite(open_backend: Open) -> None:
    """Runs the whole contract against a backend that starts empty and holds 24 shards or more."""
    backend = await open_backend()
    await _put_and_get(backend)
    await _delete_and_list(backend)
    await _erases(backend)
    await _many_at_once(backend)
    await _refuses_nonsense(backend)
    if backend.capabilities.durable_ack:
        assert await put(backend, 400, durable=True) is PutStatus.DURABLE
    await backend.sync()
    kept = await listed(backend)
    await backend.close()
    backend = await open_backend()
    assert await listed(backend) == kept
    for number in range(100, 112):
        assert await is_there(backend, number)
    report = await backend.scrub(0)
    assert (report.num_checked, report.bad) == (len(kept), ())
    await backend.close()


async def _put_and_get(backend: BlockBackend) -> None:
    assert not await is_there(backend, 1)
    assert await put(backend, 1) in (PutStatus.BUFFERED, PutStatus.DURABLE)
    assert await is_there(backend, 1)
    before = (await backend.stat()).num_used
    assert await put(backend, 1) is not PutStatus.FULL
    assert (await backend.stat()).num_used == before, "a put is idempotent"
    # Another put of the same key is another shard; neither is ever read for the other.
    ref, key, pieces = shard(1, put_id=2)
    assert not await is_there(backend, 1, put_id=2)
    await backend.put_shard(pieces)
    assert await is_there(backend, 1, put_id=2)
    assert await is_there(backend, 1)
    out = bytearray(3000)
    header, status = await backend.get_object(ref, key, LAYOUT, out)
    assert (status, bytes(out)) == (ReadStatus.OK, pieces[2])
    assert header == pieces[1]
    assert backend.object_bytes(ref) == 3256
    wrong_key = key[:16] + bytes(16)
    assert (await backend.get_object(ref, wrong_key, LAYOUT, out))[1] is ReadStatus.WRONG_KEY
    assert (await backend.get_object(ref, key, bytes(32), out))[1] is ReadStatus.WRONG_LAYOUT
    short = bytearray(2999)
    assert (await backend.get_object(ref, key, LAYOUT, short))[1] is not ReadStatus.OK


async def _delete_and_list(backend: BlockBackend) -> None:
    await put(backend, 2)
    refs = [shard(2)[0], shard(3)[0]]
    assert await backend.delete_shards(refs) == 1
    assert await backend.delete_shards(refs) == 0
    assert not await is_there(backend, 2)
    assert backend.object_bytes(refs[0]) is None
    await put(backend, 2)
    assert await is_there(backend, 2)
    assert await listed(backend) == {shard(1)[0], shard(1, 2)[0], shard(2)[0]}


async def _erases(backend: BlockBackend) -> None:
    before = await listed(backend)
    for number in (50, 51, 52):
        await put(backend, number)
    ref, _, pieces = shard(51)
    assert await backend.object_header(ref) == pieces[1]
    assert await backend.delete_shards([ref, shard(53)[0]], erase=True) == 1
    assert not await is_there(backend, 51)
    assert await backend.object_header(ref) is None
    assert await is_there(backend, 50)
    assert await is_there(backend, 52)
    assert await listed(backend) == before | {shard(50)[0], shard(52)[0]}
    assert await put(backend, 51) is not PutStatus.FULL
    assert await is_there(backend, 51)
    await backend.delete_shards([shard(number)[0] for number in (50, 51, 52)])
    assert await listed(backend) == before


async def _many_at_once(backend: BlockBackend) -> None:
    statuses = await asyncio.gather(*(put(backend, n) for n in range(100, 112)))
    assert PutStatus.FULL not in statuses
    found = await asyncio.gather(*(is_there(backend, n) for n in range(100, 112)))
    assert all(found)


async def _refuses_nonsense(backend: BlockBackend) -> None:
    _, _, pieces = shard(300)
    for bad in ([pieces[0]], pieces[1:], [bytes(128)], [pieces[0], pieces[1], pieces[2][1:]]):
        try:
            await backend.put_shard(bad)
        except ValueError:
            continue
        raise AssertionError("a header that does not describe its data was taken")
    assert not await is_there(backend, 300)
