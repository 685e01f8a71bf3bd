"""Headers of objects and shards, and metadata records, as they lie on disk.

A parser returns None for anything that is not exactly what a writer makes: doubt is a miss.
Source: kvcache-and-balancing.md, sections 3.1 to 3.3. Two uses of reserved bytes are ours
(docs/adr): object header bytes 176..191 hold the tenant tag that deletion looks for, and shard
header bytes 10..11 the block's flags, so that metadata can be rebuilt from shards alone.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from services.kvstore.checksums import crc32c
from services.kvstore.placement import OBJECT_HEADER_BYTES, SHARD_HEADER_BYTES

LOG_ENTRY_BYTES: Final = 80
RECORD_BYTES: Final = 48
NO_KEY16: Final = bytes(16)

FLAG_PREFILL: Final = 1
FLAG_DECODE: Final = 2
FLAG_APPROXIMATE: Final = 4  # computed behind a bounded replay

EC_CAUCHY: Final = 1
EC_REPLICATION: Final = 2


class TtlClass(enum.IntEnum):
    """Retention class; a hit raises it, nothing lowers it."""

    AGENT = 1
    CHAT = 2


class State(enum.IntEnum):
    """State of a block in the metadata."""

    COMMITTED = 1
    DEGRADED = 2
    EVICTING = 3
    TOMBSTONE = 4


_OBJECT: Final = struct.Struct("<8sHHI32s32s32sIHBxI4x16sQQ16s16s60x")
_SHARD: Final = struct.Struct("<4sBBBBBBHIII16s16sQII52x")
_RECORD: Final = struct.Struct("<Q16sIIIBBHHH")
_CRC: Final = struct.Struct("<I")
assert _OBJECT.size == OBJECT_HEADER_BYTES - 4
assert _SHARD.size == SHARD_HEADER_BYTES - 4


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(crc32c(body))


def _is_sealed(data: bytes) -> bool:
    return bool(_CRC.unpack_from(data, len(data) - 4)[0] == crc32c(data[:-4]))


@dataclass(frozen=True)
class ObjectHeader:
    """Header of a stored block, 256 bytes in front of its payload."""

    key: bytes
    parent: bytes
    layout: bytes
    block_index: int  # 1-based
    num_tokens: int
    ttl_class: int
    payload_bytes: int
    payload_digest: bytes  # xxh3-128
    put_id: int
    created_ms: int  # since the epoch
    writer: bytes = bytes(16)
    tenant_tag: bytes = bytes(16)
    flags: int = 0

    def pack(self) -> bytes:
        """Returns the 256 bytes."""
        return _sealed(
            _OBJECT.pack(
                b"DIKVBLK1",
                OBJECT_HEADER_BYTES,
                1,
                self.flags,
                self.key,
                self.parent,
                self.layout,
                self.block_index,
                self.num_tokens,
                self.ttl_class,
                self.payload_bytes,
                self.payload_digest,
                self.put_id,
                self.created_ms,
                self.writer,
                self.tenant_tag,
            )
        )

    @classmethod
    def parse(cls, data: bytes) -> ObjectHeader | None:
        """Returns the header, or None for damaged, cut or foreign bytes."""
        if len(data) != OBJECT_HEADER_BYTES or not _is_sealed(data):
            return None
        (magic, size, version, flags, key, parent, layout, index, tokens, ttl, length) = (
            _OBJECT.unpack_from(data)[:11]
        )
        digest, put_id, created, writer, tag = _OBJECT.unpack_from(data)[11:]
        if magic != b"DIKVBLK1" or size != OBJECT_HEADER_BYTES or version != 1:
            return None
        return cls(
            key=key,
            parent=parent,
            layout=layout,
            block_index=index,
            num_tokens=tokens,
            ttl_class=ttl,
            payload_bytes=length,
            payload_digest=digest,
            put_id=put_id,
            created_ms=created,
            writer=writer,
            tenant_tag=tag,
            flags=flags,
        )


@dataclass(frozen=True)
class ShardHeader:
    """Header of one shard, 128 bytes in front of its data."""

    shard: int
    k: int
    m: int
    algorithm: int
    ttl_class: int
    shard_bytes: int
    object_bytes: int  # before padding
    block_index: int
    key16: bytes
    parent16: bytes  # zero for the first block
    put_id: int
    created_s: int
    data_crc: int
    flags: int = 0

    def pack(self) -> bytes:
        """Returns the 128 bytes."""
        return _sealed(
            _SHARD.pack(
                b"DKSH",
                1,
                self.shard,
                self.k,
                self.m,
                self.algorithm,
                self.ttl_class,
                self.flags,
                self.shard_bytes,
                self.object_bytes,
                self.block_index,
                self.key16,
                self.parent16,
                self.put_id,
                self.created_s,
                self.data_crc,
            )
        )

    @classmethod
    def parse(cls, data: bytes) -> ShardHeader | None:
        """Returns the header, or None for damaged, cut or foreign bytes."""
        if len(data) != SHARD_HEADER_BYTES or not _is_sealed(data):
            return None
        fields = _SHARD.unpack_from(data)
        if fields[0] != b"DKSH" or fields[1] != 1:
            return None
        shard, k, m, algorithm, ttl_class, flags = fields[2:8]
        length, object_bytes, index, key16, parent16, put_id, created, crc = fields[8:]
        return cls(
            shard, k, m, algorithm, ttl_class,
            length, object_bytes, index, key16, parent16, put_id, created, crc, flags,
        )  # fmt: skip


@dataclass(frozen=True)
class Record:
    """Metadata of one block."""

    put_id: int
    block_index: int
    created_s: int
    access_epoch: int  # units of 600 s
    shards: int  # bitmap
    state: int
    ttl_class: int
    flags: int = 0
    parent16: bytes = NO_KEY16

    def pack(self, group: int) -> bytes:
        """Returns the 48 bytes."""
        return _sealed(
            _RECORD.pack(
                self.put_id,
                self.parent16,
                self.block_index,
                self.created_s,
                self.access_epoch,
                self.ttl_class,
                self.state,
                self.shards,
                group,
                self.flags,
            )
        )

    @classmethod
    def parse(cls, data: bytes) -> Record | None:
        """Returns the record, or None for damaged or cut bytes."""
        if len(data) != RECORD_BYTES or not _is_sealed(data):
            return None
        put_id, parent, index, created, epoch, ttl, state, shards, _, flags = _RECORD.unpack_from(
            data
        )
        if not State.COMMITTED <= state <= State.TOMBSTONE:
            return None
        return cls(put_id, index, created, epoch, shards, state, ttl, flags, parent)
