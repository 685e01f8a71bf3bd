"""Headers of objects and shards, and metadata records, as they lie on disk.

A parser returns None for anything that is not exactly what a writer makes: doubt is a miss.
Source: kvcache-and-balancing.md, sections 3.1 to 3.3. Three uses of reserved bytes are ours
(docs/adr): object header bytes 176..191 hold the tenant tag that deletion looks for, 192..219 the
nonce and tag of an encrypted payload, and shard header bytes 10..11 the block's flags, so that
metadata can be rebuilt from shards alone.
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
MAX_SHARDS: Final = 16  # of a stripe; a record has a bit for each
MAX_FLAGS: Final = 0xFF  # what a table's record holds of them

FLAG_PREFILL: Final = 1
FLAG_DECODE: Final = 2
FLAG_APPROXIMATE: Final = 4  # computed behind a bounded replay
FLAG_SEALED: Final = 8  # the payload is encrypted; checksums are over what is stored
SEAL_BYTES: Final = 28  # nonce, then tag
NO_SEAL: Final = bytes(SEAL_BYTES)

EC_CAUCHY: Final = 1
EC_REPLICATION: Final = 2


class TtlClass(enum.IntEnum):
    """Retention class; a hit raises it, nothing lowers it."""

    AGENT = 1
    CHAT = 2


def is_class(number: int) -> bool:
    """Returns whether the number is a retention class. Any other would expire at once."""
    return TtlClass.AGENT <= number <= TtlClass.CHAT


class State(enum.IntEnum):
    """State of a block in the metadata."""

    COMMITTED = 1
    DEGRADED = 2
    EVICTING = 3
    TOMBSTONE = 4


_OBJECT: Final = struct.Struct("<8sHHI32s32s32sIHBxI4x16sQQ16s16s28s32x")
_SHARD: Final = struct.Struct("<4sBBBBBBHIII16s16sQII52x")
_RECORD: Final = struct.Struct("<Q16sIIIBBHHH")
_CRC: Final = struct.Struct("<I")
assert _OBJECT.size == OBJECT_HEADER_BYTES - 4
assert _SHARD.size == SHARD_HEADER_BYTES - 4


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(crc32c(body))


def _is_sealed(data: bytes) -> bool:
    return bool(_CRC.unpack_from(data, len(data) - 4)[0] == crc32c(data[:-4]))


# Two functions of plain values, for a put makes both headers and reads neither: a frozen instance
# of so many fields costs 4 to 5 µs, a twentieth of all that a put does for a block.


def pack_object_header(
    key: bytes,
    parent: bytes,
    layout: bytes,
    block_index: int,
    num_tokens: int,
    ttl_class: int,
    payload_bytes: int,
    payload_digest: bytes,
    put_id: int,
    created_ms: int,
    writer: bytes,
    tenant_tag: bytes,
    flags: int,
    seal: bytes,
) -> bytes:
    """Returns the 256 bytes of an `ObjectHeader` with these fields."""
    return _sealed(
        _OBJECT.pack(
            b"DIKVBLK1",
            OBJECT_HEADER_BYTES,
            1,
            flags,
            key,
            parent,
            layout,
            block_index,
            num_tokens,
            ttl_class,
            payload_bytes,
            payload_digest,
            put_id,
            created_ms,
            writer,
            tenant_tag,
            seal,
        )
    )


def pack_shard_header(
    shard: int,
    k: int,
    m: int,
    algorithm: int,
    ttl_class: int,
    shard_bytes: int,
    object_bytes: int,
    block_index: int,
    key16: bytes,
    parent16: bytes,
    put_id: int,
    created_s: int,
    data_crc: int,
    flags: int,
) -> bytes:
    """Returns the 128 bytes of a `ShardHeader` with these fields."""
    return _sealed(
        _SHARD.pack(
            b"DKSH",
            1,
            shard,
            k,
            m,
            algorithm,
            ttl_class,
            flags,
            shard_bytes,
            object_bytes,
            block_index,
            key16,
            parent16,
            put_id,
            created_s,
            data_crc,
        )
    )


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
    seal: bytes = NO_SEAL

    @property
    def is_usable(self) -> bool:
        """Returns whether a writer of ours makes such a block; as of `ShardHeader`."""
        is_counted = self.block_index >= 1 and self.num_tokens >= 1 and self.payload_bytes >= 1
        return is_counted and is_class(self.ttl_class) and self.flags <= MAX_FLAGS

    def pack(self) -> bytes:
        """Returns the 256 bytes."""
        return pack_object_header(
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
            self.flags,
            self.seal,
        )

    @classmethod
    def parse(cls, data: bytes) -> ObjectHeader | None:
        """Returns the header, or None for damaged, cut or foreign bytes."""
        if len(data) != OBJECT_HEADER_BYTES or not _is_sealed(data):
            return None
        (magic, size, version, flags, key, parent, layout, index, tokens, ttl, length) = (
            _OBJECT.unpack_from(data)[:11]
        )
        digest, put_id, created, writer, tag, seal = _OBJECT.unpack_from(data)[11:]
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
            seal=seal,
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

    @property
    def is_usable(self) -> bool:
        """Returns whether a writer of ours makes such a shard.

        A checksum says that the bytes are as they were written, not that they make sense: what is
        read from a disk or the wire is taken into records only when this holds.
        """
        is_in_stripe = self.k >= 1 and self.shard < self.k + self.m <= MAX_SHARDS
        return is_in_stripe and is_class(self.ttl_class) and self.flags <= MAX_FLAGS

    def pack(self) -> bytes:
        """Returns the 128 bytes."""
        return pack_shard_header(
            self.shard,
            self.k,
            self.m,
            self.algorithm,
            self.ttl_class,
            self.shard_bytes,
            self.object_bytes,
            self.block_index,
            self.key16,
            self.parent16,
            self.put_id,
            self.created_s,
            self.data_crc,
            self.flags,
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
