"""Index of blocks: 16-byte key to metadata record, fed by commit-log entries.

`new_table()` gives the native table (at most 64 bytes per block, look-ups overlap their cache
misses) or its plain twin; both pass the same tests. A log entry has 80 bytes, the same on disk and
on the wire: `seq u64, op u8, 3 zero bytes, key16, record of 48 bytes, crc32c`.
Source: kvcache-and-balancing.md, sections 3.3, 5 and 9; cases T-MATCH, T-GC-1 to T-GC-3.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, Protocol, cast

from services.kvstore.checksums import HAS_NATIVE, Buffer, crc32c, native
from services.kvstore.formats import (
    LOG_ENTRY_BYTES,
    NO_KEY16,
    Record,
    State,
)
from services.kvstore.placement import placement_group

EPOCH_S: Final = 600
OP_SET: Final = 1
OP_REMOVE: Final = 2
# Time to live by class number; 0 is no class.
TTL_S: Final = (0, 259_200, 604_800)

# (put_id, block_index, created_s, access_epoch, shards, state, ttl_class, flags)
Fields = tuple[int, int, int, int, int, int, int, int]

_HEAD: Final = struct.Struct("<QB3x16s")
_CRC: Final = struct.Struct("<I")


class Stop(enum.IntEnum):
    """Why a search ended."""

    ALL = 0
    ABSENT = 1
    EVICTED = 2  # tombstone, being evicted, or expired


class IndexTable(Protocol):
    """What native table and twin offer. All of it is safe for threads in the native one."""

    def __len__(self) -> int: ...
    def memory_bytes(self) -> int: ...
    def get(self, key: bytes) -> Fields | None: ...
    def set(self, key: bytes, record: Fields) -> None: ...
    def remove(self, key: bytes) -> bool: ...
    def match_prefix(
        self, keys: Buffer, stride: int, now_s: int, ttl_s: Sequence[int]
    ) -> tuple[int, int]: ...
    def touch(
        self, keys: Buffer, stride: int, epoch: int, class_: int, first_seq: int, /
    ) -> bytes: ...
    def eviction_order(
        self, now_s: int, ttl_s: Sequence[int], limit: int, only_expired: bool = False
    ) -> list[tuple[bytes, bool]]: ...
    def stale(self, state: int, epoch: int) -> list[bytes]: ...
    def apply_log(self, log: Buffer) -> tuple[int, int]: ...
    def merge(self, log: Buffer, first_seq: int, /) -> tuple[bytes, list[bytes]]: ...
    def snapshot(self, cursor: int, limit: int, seq: int) -> tuple[bytes, int | None]: ...
    def census(self) -> list[tuple[int, int, int]]: ...


def new_table(num_groups: int = 1024) -> IndexTable:
    """Returns an empty table, native when the crate is built."""
    if HAS_NATIVE:
        return cast(IndexTable, native.IndexTable(num_groups))
    return PlainIndexTable(num_groups)


def fields_of(record: Record) -> Fields:
    """Returns the record as the table takes it."""
    return (
        record.put_id,
        record.block_index,
        record.created_s,
        record.access_epoch,
        record.shards,
        record.state,
        record.ttl_class,
        record.flags,
    )


def is_expired(access_epoch: int, ttl_class: int, now_s: int, ttl_s: Sequence[int] = TTL_S) -> bool:
    """Returns whether a block's life is over, counted from the end of its last epoch of access."""
    ttl = ttl_s[ttl_class] if ttl_class < len(ttl_s) else 0
    return now_s > (access_epoch + 1) * EPOCH_S + ttl


def encode_entry(
    seq: int, op: int, key: bytes, record: Fields, parent: bytes = NO_KEY16, num_groups: int = 1024
) -> bytes:
    """Returns one log entry."""
    packed = _record(record, parent).pack(placement_group(key, num_groups))
    body = _HEAD.pack(seq, op, key) + packed
    return body + _CRC.pack(crc32c(body))


def decode_entry(data: bytes) -> tuple[int, int, bytes, Record] | None:
    """Returns (seq, op, key, record), or None for a damaged entry or an unknown kind."""
    if len(data) != LOG_ENTRY_BYTES or _CRC.unpack_from(data, 76)[0] != crc32c(data[:76]):
        return None
    seq, op, key = _HEAD.unpack_from(data)
    record = Record.parse(data[28:76])
    if record is None or op not in (OP_SET, OP_REMOVE):
        return None
    return seq, op, key, record


def _record(fields: Fields, parent: bytes) -> Record:
    put_id, index, created, epoch, shards, state, ttl_class, flags = fields
    return Record(put_id, index, created, epoch, shards, state, ttl_class, flags, parent)


class PlainIndexTable:
    """The table as a dict; for machines without the crate, and to check the native one."""

    def __init__(self, num_groups: int = 1024) -> None:
        self._num_groups = num_groups
        self._records: dict[bytes, Fields] = {}

    def __len__(self) -> int:
        return len(self._records)

    def memory_bytes(self) -> int:
        """Returns an estimate: dict entry, key and tuple."""
        return 300 * len(self._records)

    def get(self, key: bytes) -> Fields | None:
        """Returns the record's fields, or None."""
        return self._records.get(bytes(key))

    def set(self, key: bytes, record: Fields) -> None:
        """Inserts or replaces. Raises ValueError for a record without a state."""
        if not State.COMMITTED <= record[5] <= State.TOMBSTONE or not 0 <= record[6] <= 15:
            raise ValueError("state: 1 to 4, class: at most 15")
        self._records[bytes(key)] = record

    def remove(self, key: bytes) -> bool:
        """Returns whether the key was there."""
        return self._records.pop(bytes(key), None) is not None

    def match_prefix(
        self, keys: Buffer, stride: int, now_s: int, ttl_s: Sequence[int]
    ) -> tuple[int, int]:
        """Returns (stored and alive leading keys, why the next is not)."""
        raw, records = bytes(keys), self._records
        count = len(raw) // stride
        for number in range(count):
            fields = records.get(raw[number * stride : number * stride + 16])
            if fields is None:
                return number, Stop.ABSENT
            if fields[5] > State.DEGRADED or is_expired(fields[3], fields[6], now_s, ttl_s):
                return number, Stop.EVICTED
        return count, Stop.ALL

    def touch(self, keys: Buffer, stride: int, epoch: int, class_: int, first_seq: int, /) -> bytes:
        """Returns the log entries of the records that change, numbered from `first_seq`.

        Raises: ValueError for a class that a record has no room for.
        """
        if class_ > 15:
            raise ValueError("class: at most 15")
        raw = bytes(keys)
        log: list[bytes] = []
        for at in range(0, len(raw), stride):
            key = raw[at : at + 16]
            old = self._records.get(key)
            if old is None or old[5] > State.DEGRADED or (old[3] >= epoch and old[6] >= class_):
                continue
            new = (*old[:3], max(old[3], epoch), *old[4:6], max(old[6], class_), old[7])
            self._records[key] = new
            seq = first_seq + len(log)
            log.append(encode_entry(seq, OP_SET, key, new, NO_KEY16, self._num_groups))
        return b"".join(log)

    def eviction_order(
        self, now_s: int, ttl_s: Sequence[int], limit: int, only_expired: bool = False
    ) -> list[tuple[bytes, bool]]:
        """Returns (key, is expired): expired first, then oldest epoch, leaves before parents."""
        ranks = sorted(
            (not is_expired(f[3], f[6], now_s, ttl_s), f[3], -f[1], key)
            for key, f in self._records.items()
            if f[5] <= State.DEGRADED
        )
        return [(rank[3], not rank[0]) for rank in ranks if not (only_expired and rank[0])][:limit]

    def stale(self, state: int, epoch: int) -> list[bytes]:
        """Returns the keys in `state` whose access epoch is before `epoch`."""
        return [key for key, f in self._records.items() if f[5] == state and f[3] < epoch]

    def apply_log(self, log: Buffer) -> tuple[int, int]:
        """Returns (bytes consumed, number of the last entry applied or 0)."""
        raw, consumed, last = bytes(log), 0, 0
        while consumed + LOG_ENTRY_BYTES <= len(raw):
            entry = decode_entry(raw[consumed : consumed + LOG_ENTRY_BYTES])
            if entry is None:
                break
            last, op, key, record = entry
            if op == OP_SET:
                self._records[key] = fields_of(record)
            else:
                self._records.pop(key, None)
            consumed += LOG_ENTRY_BYTES
        return consumed, last

    def merge(self, log: Buffer, first_seq: int, /) -> tuple[bytes, list[bytes]]:
        """Returns (entries of our own log for what the other sets, keys that it removes)."""
        raw = bytes(log)
        entries: list[bytes] = []
        removed: list[bytes] = []
        for at in range(0, len(raw) - LOG_ENTRY_BYTES + 1, LOG_ENTRY_BYTES):
            entry = decode_entry(raw[at : at + LOG_ENTRY_BYTES])
            if entry is None:
                break
            _, op, key, record = entry
            if op != OP_SET:
                removed.append(key)
                continue
            fields = self._records[key] = fields_of(record)
            seq = first_seq + len(entries)
            entries.append(encode_entry(seq, OP_SET, key, fields, NO_KEY16, self._num_groups))
        return b"".join(entries), removed

    def snapshot(self, cursor: int, limit: int, seq: int) -> tuple[bytes, int | None]:
        """Returns (log entries, next cursor or None), in the order of the keys' hashes."""

        def hash_of(key: bytes) -> int:
            return int.from_bytes(key[8:16], "little")

        keys = sorted((k for k in self._records if hash_of(k) >= cursor), key=hash_of)
        part = keys[:limit]
        while len(part) < len(keys) and hash_of(keys[len(part)]) == hash_of(part[-1]):
            part.append(keys[len(part)])
        log = b"".join(
            encode_entry(seq, OP_SET, key, self._records[key], NO_KEY16, self._num_groups)
            for key in part
        )
        return log, hash_of(keys[len(part)]) if len(part) < len(keys) else None

    def census(self) -> list[tuple[int, int, int]]:
        """Returns (state, class, records) of each pair that occurs."""
        counts: dict[tuple[int, int], int] = {}
        for fields in self._records.values():
            pair = (fields[5], fields[6])
            counts[pair] = counts.get(pair, 0) + 1
        return [(state, ttl, count) for (state, ttl), count in sorted(counts.items())]
