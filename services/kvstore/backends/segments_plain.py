"""Twin of the native segment store: the same files, in plain Python.

For machines without the built crate; either implementation opens what the other has written.
The rules are in native/src/segment.rs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Sequence
from typing import Final

from services.kvstore.checksums import Buffer, crc32c, xxh3_128
from services.kvstore.formats import ObjectHeader, ShardHeader
from services.kvstore.placement import OBJECT_HEADER_BYTES, PAGE_BYTES, SHARD_HEADER_BYTES

_LOG: Final = struct.Struct("<BB2xI16sQII4x")
_RECORD_BYTES: Final = 48
_PUT, _DELETE, _SYNC = 1, 2, 3
_ABSENT, _IO, _HEADER, _DATA = 1, 2, 3, 4

Id = tuple[bytes, int, int]  # key16, shard, put_id
Place = tuple[int, int, int]  # slot, data length, created_s


class PlainSegmentStore:
    """Same methods as the native `SegmentStore`; one lock around all of them."""

    def __init__(self, dir: str, slot_bytes: int, segment_bytes: int, max_segments: int) -> None:
        if slot_bytes <= 0 or slot_bytes % PAGE_BYTES or segment_bytes < slot_bytes:
            raise ValueError("slot_bytes: whole pages, at most a segment")
        os.makedirs(dir, mode=0o700, exist_ok=True)
        self._dir = dir
        self._slot_bytes = slot_bytes
        self._per_segment = segment_bytes // slot_bytes
        self._max_segments = max_segments
        self._mutex = threading.RLock()
        self._lock_file = os.open(os.path.join(dir, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_file)
            raise
        self._files: list[int | None] = [self._open_segment(n) for n in range(max_segments)]
        self._index: dict[Id, Place] = {}
        self._owners: dict[int, Id] = {}
        self._free: list[int] = []
        self._dirty: set[int] = set()
        self._log = -1
        self._base = self._count = self._unsynced = 0
        self._is_synced = True
        self._torn, self._rebuilt = 0, False
        self._recover()
        for number in reversed(range(max_segments)):
            if self._files[number] is not None:
                first = number * self._per_segment
                slots = range(first + self._per_segment - 1, first - 1, -1)
                self._free += [slot for slot in slots if slot not in self._owners]
        self._compact()

    def __del__(self) -> None:
        for file in [*self._files, self._log, self._lock_file]:
            if file is not None and file >= 0:
                os.close(file)

    def _open_segment(self, number: int) -> int | None:
        try:
            file = os.open(self._path(number), os.O_RDWR)
        except FileNotFoundError:
            return None
        size = self._per_segment * self._slot_bytes
        if os.fstat(file).st_size < size:
            os.truncate(file, size)
        return file

    def _path(self, number: int) -> str:
        return os.path.join(self._dir, f"seg-{number:04d}")

    # ---- recovery -----------------------------------------------------------------------------

    def _recover(self) -> None:
        try:
            with open(os.path.join(self._dir, "index.log"), "rb") as file:
                log = file.read()
        except FileNotFoundError:
            log = b""
        if len(log) < _RECORD_BYTES:
            self._rebuild()
            return
        records = []
        for at in range(0, len(log) - _RECORD_BYTES + 1, _RECORD_BYTES):
            raw = log[at : at + _RECORD_BYTES]
            if crc32c(raw[:44]) != int.from_bytes(raw[44:], "little"):
                break
            records.append(_LOG.unpack(raw[:44]))
        trusted = next((r[4] for r in reversed(records) if r[0] == _SYNC), 0)
        suspects: list[Id] = []
        for number, (op, shard, slot, key, put_id, length, created) in enumerate(records):
            place = (slot, length, created)
            if op == _PUT and self._is_usable(place):
                self._assign((key, shard, put_id), place)
                if number >= trusted:
                    suspects.append((key, shard, put_id))
            elif op == _DELETE:
                self._release((key, shard, put_id))
        for suspect in suspects:
            if suspect in self._index and self._read(suspect, self._index[suspect])[1]:
                self._release(suspect)
                self._torn += 1

    def _rebuild(self) -> None:
        for slot in range(self._max_segments * self._per_segment):
            file = self._files[slot // self._per_segment]
            if file is None:
                continue
            self._rebuilt = True
            header = ShardHeader.parse(os.pread(file, SHARD_HEADER_BYTES, self._offset(slot)))
            if header is None:
                continue
            shard_id = (header.key16, header.shard, header.put_id)
            place = (slot, header.shard_bytes, header.created_s)
            if not self._is_usable(place) or self._read(shard_id, place)[1]:
                self._torn += 1
                continue
            self._assign(shard_id, place)

    def _is_usable(self, place: Place) -> bool:
        slot, length, _ = place
        return (
            slot < self._max_segments * self._per_segment
            and self._files[slot // self._per_segment] is not None
            and length + SHARD_HEADER_BYTES <= self._slot_bytes
        )

    def unlock(self) -> None:
        """Lets another process open the directory; nothing may be written after it."""
        fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def recovery(self) -> tuple[int, int, bool]:
        """Returns (shards found, torn ones freed, whether rebuilt from headers)."""
        return len(self._index), self._torn, self._rebuilt

    # ---- slots --------------------------------------------------------------------------------

    def _offset(self, slot: int) -> int:
        return slot % self._per_segment * self._slot_bytes

    def _assign(self, shard_id: Id, place: Place) -> None:
        former = self._owners.pop(place[0], None)
        if former is not None:
            self._index.pop(former, None)
        old = self._index.get(shard_id)
        if old is not None:
            self._owners.pop(old[0], None)
        self._index[shard_id] = place
        self._owners[place[0]] = shard_id

    def _release(self, shard_id: Id) -> int | None:
        place = self._index.pop(shard_id, None)
        if place is None:
            return None
        self._owners.pop(place[0], None)
        return place[0]

    def _append(self, op: int, shard_id: Id, place: Place) -> None:
        key, shard, put_id = shard_id
        body = _LOG.pack(op, shard, place[0], key, put_id, place[1], place[2])
        record = body + struct.pack("<I", crc32c(body))
        if os.pwrite(self._log, record, self._count * _RECORD_BYTES) != _RECORD_BYTES:
            raise OSError(errno.ENOSPC, "the log is cut short")
        self._count += 1
        self._is_synced = False

    def _add_segment(self) -> int:
        number = next((n for n, file in enumerate(self._files) if file is None), None)
        if number is None:
            raise OSError(errno.ENOSPC, "no free slot")
        path = self._path(number)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(file, 0, self._per_segment * self._slot_bytes)
        except OSError:
            os.close(file)
            os.unlink(path)
            raise
        self._files[number] = file
        first = number * self._per_segment
        self._free += range(first + self._per_segment - 1, first, -1)
        return first

    def put(self, pieces: Sequence[Buffer]) -> int:
        """Returns the number of the log record of a stored shard."""
        data = b"".join(bytes(piece) for piece in pieces)
        header = ShardHeader.parse(data[:SHARD_HEADER_BYTES])
        if header is None or len(data) != SHARD_HEADER_BYTES + header.shard_bytes:
            raise ValueError("length does not fit the header or the slot")
        if len(data) > self._slot_bytes:
            raise ValueError("length does not fit the header or the slot")
        shard_id = (header.key16, header.shard, header.put_id)
        with self._mutex:
            if shard_id in self._index:
                return max(self._base + self._count - 1, 0)
            slot = self._free.pop() if self._free else self._add_segment()
            number = slot // self._per_segment
            file = self._files[number]
            assert file is not None
            place = (slot, header.shard_bytes, header.created_s)
            try:
                if os.pwrite(file, data, self._offset(slot)) != len(data):
                    raise OSError(errno.ENOSPC, "the slot is cut short")
                self._append(_PUT, shard_id, place)
            except OSError:
                self._free.append(slot)
                raise
            self._assign(shard_id, place)
            self._dirty.add(number)
            self._unsynced += len(data)
            return self._base + self._count - 1

    def _read(self, shard_id: Id, place: Place) -> tuple[bytes | None, int]:
        slot, length, _ = place
        file = self._files[slot // self._per_segment]
        size = SHARD_HEADER_BYTES + length
        try:
            data = os.pread(file, size, self._offset(slot)) if file is not None else b""
        except OSError:
            return None, _IO
        if len(data) < size:
            return None, _IO
        header = ShardHeader.parse(data[:SHARD_HEADER_BYTES])
        if header is None or (header.key16, header.shard, header.put_id) != shard_id:
            return None, _HEADER
        if header.shard_bytes != length:
            return None, _HEADER
        if crc32c(data[SHARD_HEADER_BYTES:]) != header.data_crc:
            return None, _DATA
        return data, 0

    def get_shard(self, key: bytes, shard: int, put_id: int) -> tuple[bytes | None, int]:
        """Returns (shard, 0), or (None, the reason)."""
        with self._mutex:
            place = self._index.get((key, shard, put_id))
            return (None, _ABSENT) if place is None else self._read((key, shard, put_id), place)

    def get_object(
        self, key: bytes, shard: int, put_id: int, layout: bytes, out: Buffer
    ) -> tuple[bytes | None, int]:
        """Returns (object header, 0) with the payload in `out`, or (None, the reason)."""
        data, why = self.get_shard(key[:16], shard, put_id)
        if data is None:
            return None, why
        head = data[SHARD_HEADER_BYTES : SHARD_HEADER_BYTES + OBJECT_HEADER_BYTES]
        payload = data[SHARD_HEADER_BYTES + OBJECT_HEADER_BYTES :]
        if len(payload) != len(out):
            return None, _HEADER
        header = ObjectHeader.parse(head)
        if header is None:
            return None, 5
        if header.key != key:
            return None, 6
        if header.layout != layout:
            return None, 7
        if header.payload_bytes != len(payload) or header.payload_digest != xxh3_128(payload):
            return None, 8
        memoryview(out)[:] = payload
        return head, 0

    def len_of(self, key: bytes, shard: int, put_id: int) -> int | None:
        """Returns the length of a shard's data, or None."""
        place = self._index.get((key, shard, put_id))
        return None if place is None else place[1]

    def delete(self, ids: Sequence[Id]) -> int:
        """Returns how many of the shards were there and are freed."""
        count = 0
        with self._mutex:
            for shard_id in ids:
                place = self._index.get(shard_id)
                if place is None:
                    continue
                self._append(_DELETE, shard_id, place)
                self._release(shard_id)
                self._free.append(place[0])
                count += 1
            if self._count > 4 * len(self._index) + 4096:
                self._compact()
        return count

    # ---- durability ---------------------------------------------------------------------------

    def sync(self) -> int:
        """Returns the number below which every record is on the disk."""
        with self._mutex:
            covered = self._base + self._count
            if self._is_synced:
                return covered
            for number in self._dirty:
                file = self._files[number]
                if file is not None:
                    os.fdatasync(file)
            self._dirty.clear()
            self._unsynced = 0
            self._append(_SYNC, (bytes(16), 0, self._count), (0, 0, 0))
            os.fdatasync(self._log)
            self._is_synced = True
            return covered

    def _compact(self) -> None:
        for file in self._files:
            if file is not None:
                os.fdatasync(file)
        new = os.path.join(self._dir, "index.new")
        if self._log >= 0:
            os.close(self._log)
        self._base += self._count
        self._count = 0
        self._log = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        for shard_id, place in self._index.items():
            self._append(_PUT, shard_id, place)
        self._append(_SYNC, (bytes(16), 0, self._count), (0, 0, 0))
        os.fdatasync(self._log)
        os.rename(new, os.path.join(self._dir, "index.log"))
        folder = os.open(self._dir, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._is_synced, self._unsynced = True, 0

    # ---- views --------------------------------------------------------------------------------

    def _from(self, slot: int, limit: int) -> tuple[list[int], int | None]:
        with self._mutex:
            slots = sorted(owned for owned in self._owners if owned >= slot)
        part = slots[:limit]
        return part, (part[-1] + 1 if len(slots) > limit else None)

    def headers(self, from_slot: int, limit: int) -> tuple[bytes, int | None]:
        """Returns (headers of shards, next slot or None)."""
        slots, after = self._from(from_slot, limit)
        headers = []
        for slot in slots:
            file = self._files[slot // self._per_segment]
            if file is not None:
                data = os.pread(file, SHARD_HEADER_BYTES, self._offset(slot))
                if ShardHeader.parse(data) is not None:
                    headers.append(data)
        return b"".join(headers), after

    def scrub(
        self, from_slot: int, num_slots: int
    ) -> tuple[list[tuple[bytes, int, int, int]], int, int | None]:
        """Returns (bad shards, now freed; shards read; next slot or None)."""
        end = from_slot + num_slots
        bad, checked = [], 0
        with self._mutex:
            for slot in sorted(s for s in self._owners if from_slot <= s < end):
                shard_id = self._owners[slot]
                _, why = self._read(shard_id, self._index[shard_id])
                checked += 1
                if why:
                    self.delete([shard_id])
                    bad.append((*shard_id, why))
        total = self._max_segments * self._per_segment
        return bad, checked, end if end < total else None

    def stat(self) -> tuple[int, int, int, int, int]:
        """Returns (slots, used, slot bytes, bytes on disk, bytes not yet durable)."""
        segments = sum(file is not None for file in self._files)
        disk = segments * self._per_segment * self._slot_bytes + self._count * _RECORD_BYTES
        total = self._max_segments * self._per_segment
        return total, len(self._index), self._slot_bytes, disk, self._unsynced
