"""Checks of what a storage gave back; whatever fails one is a miss, never a byte for the engine.

The native segment files check while they read; every other backend reads into memory of its own
and checks here before anything is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.backends.base import ReadStatus, ShardRef
from services.kvstore.checksums import HAS_NATIVE, Buffer, crc32c, native, xxh3_128
from services.kvstore.formats import ObjectHeader, ShardHeader
from services.kvstore.placement import OBJECT_HEADER_BYTES, SHARD_HEADER_BYTES


def ref_of(header: ShardHeader) -> ShardRef:
    """Returns the name of the shard that a header describes."""
    return ShardRef(header.key16, header.shard, header.put_id)


def joined(pieces: Sequence[Buffer]) -> tuple[ShardHeader, bytes]:
    """Returns a shard as one piece, with its header parsed.

    Raises: ValueError for a header that is damaged or does not describe the data.
    """
    data = b"".join(bytes(piece) for piece in pieces)
    header = ShardHeader.parse(data[:SHARD_HEADER_BYTES])
    if header is None or len(data) != SHARD_HEADER_BYTES + header.shard_bytes:
        raise ValueError("the length does not fit the header")
    return header, data


def check_shard(data: Buffer, ref: ShardRef, check_data: bool = True) -> ReadStatus:
    """Returns whether the bytes are exactly the shard asked for.

    The checksum over the data is left out with `check_data` False, for callers with a stronger one.
    """
    if len(data) < SHARD_HEADER_BYTES:
        return ReadStatus.IO
    header = ShardHeader.parse(bytes(data[:SHARD_HEADER_BYTES]))
    if header is None or ref_of(header) != ref:
        return ReadStatus.REUSED
    if len(data) != SHARD_HEADER_BYTES + header.shard_bytes:
        return ReadStatus.IO
    if check_data and crc32c(memoryview(data)[SHARD_HEADER_BYTES:]) != header.data_crc:
        return ReadStatus.DATA
    return ReadStatus.OK


def check_object(header: bytes, payload: Buffer, key: bytes, layout: bytes) -> ReadStatus:
    """Returns whether a whole block's header and payload are those of the key and layout."""
    if HAS_NATIVE and len(header) == OBJECT_HEADER_BYTES:
        return ReadStatus(native.verify_object(header, payload, key, layout))
    found = ObjectHeader.parse(header)
    if found is None:
        return ReadStatus.OBJECT_HEADER
    if found.key != key:
        return ReadStatus.WRONG_KEY
    if found.layout != layout:
        return ReadStatus.WRONG_LAYOUT
    is_right = found.payload_bytes == len(payload) and found.payload_digest == xxh3_128(payload)
    return ReadStatus.OK if is_right else ReadStatus.PAYLOAD


def take_object(
    shard: Buffer, ref: ShardRef, key: bytes, layout: bytes, out: Buffer
) -> tuple[bytes | None, ReadStatus]:
    """Checks a block stored whole; only then copies its payload to `out` and returns its header."""
    status = check_shard(shard, ref, check_data=False)
    if status is not ReadStatus.OK:
        return None, status
    view = memoryview(shard)[SHARD_HEADER_BYTES:]
    header, payload = bytes(view[:OBJECT_HEADER_BYTES]), view[OBJECT_HEADER_BYTES:]
    if len(payload) != len(out):
        return None, ReadStatus.REUSED
    status = check_object(header, payload, key, layout)
    if status is not ReadStatus.OK:
        return None, status
    memoryview(out)[:] = payload
    return header, ReadStatus.OK
