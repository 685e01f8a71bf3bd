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
_PUT, _DELETE, _SYNC, _CLAIM = 1, 2, 3, 4
_CLAIM_HEAD: Final = struct.Struct("<BB2x")
_SLOTS_PER_CLAIM: Final = 10
# Slots claimed with one write to the log.
_CLAIM_AT_ONCE: Final = 4 * _SLOTS_PER_CLAIM
_ABSENT, _IO, _HEADER, _DATA = 1, 2, 3, 4
_LOG_SLACK: Final = 1024  # records beyond four a shard before the log is written anew
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Id = tuple[bytes, int, int]  # key16, shard, put_id
Place = tuple[int, int, int]  # slot, data length, created_s


def _claims(slots: Sequence[int]) -> list[bytes]:
    """Returns the records that claim these slots."""
    records = []
    for at in range(0, len(slots), _SLOTS_PER_CLAIM):
        some = slots[at : at + _SLOTS_PER_CLAIM]
        names = b"".join(slot.to_bytes(4, "little") for slot in some)
        body = (_CLAIM_HEAD.pack(_CLAIM, len(some)) + names).ljust(44, b"\0")
        records.append(body + crc32c(body).to_bytes(4, "little"))
    return records


def _claimed(record: bytes) -> list[int]:
    """Returns the slots that a claim names; none for a count that no writer makes."""
    count = record[1] if record[1] <= _SLOTS_PER_CLAIM else 0
    return [int.from_bytes(record[at : at + 4], "little") for at in range(4, 4 + 4 * count, 4)]


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
        self._ready: list[int] = []  # slots that the log claims, to be used next
        self._dirty: set[int] = set()
        self._log = -1
        self._base = self._written = self._unsynced = 0
        self._waiting = bytearray()  # records that are not yet in the log's file
        self._is_synced = True
        self._is_log_stale = False
        self._torn, self._rebuilt = 0, False
        num_logged = self._recover()
        for number in reversed(range(max_segments)):
            if self._files[number] is not None:
                first = number * self._per_segment
                slots = range(first + self._per_segment - 1, first - 1, -1)
                self._free += [slot for slot in slots if slot not in self._owners]
        try:
            self._compact()
        except OSError as error:
            # A disk without room must not keep the store from reading what it has (P-34).
            if error.errno not in _NO_ROOM:
                raise
            self._log = os.open(os.path.join(dir, "index.log"), os.O_RDWR | os.O_CREAT, 0o600)
            self._written = num_logged
            self._is_synced = False
            self._is_log_stale = self._rebuilt

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
            try:
                os.truncate(file, size)
            except OSError as error:
                # On a disk without room it stays short: slots past its end are misses.
                if error.errno not in _NO_ROOM:
                    os.close(file)
                    raise
        return file

    def _path(self, number: int) -> str:
        return os.path.join(self._dir, f"seg-{number:04d}")

    # ---- recovery -----------------------------------------------------------------------------

    def _recover(self) -> int:
        """Returns how many records the log has room for."""
        try:
            with open(os.path.join(self._dir, "index.log"), "rb") as file:
                log = file.read()
        except FileNotFoundError:
            log = b""
        num_logged = len(log) // _RECORD_BYTES
        if not num_logged:
            self._rebuilt = any(file is not None for file in self._files)
            self._take_up_unnamed()
            return 0
        records = []
        for number in range(num_logged):
            raw = log[number * _RECORD_BYTES : (number + 1) * _RECORD_BYTES]
            if crc32c(raw[:44]) == int.from_bytes(raw[44:], "little"):
                records.append((number, raw))
        # Every log is begun with what lives and a mark: one without any has lost its beginning.
        marks = [_LOG.unpack(raw[:44])[4] for _, raw in records if raw[0] == _SYNC]
        trusted = max(marks, default=0)
        suspects: list[Id] = []
        # What was claimed and never named: somebody may have written there when the process died.
        unnamed: set[int] = set()
        for number, raw in records:
            if raw[0] == _CLAIM:
                unnamed.update(_claimed(raw))
                continue
            op, shard, slot, key, put_id, length, created = _LOG.unpack(raw[:44])
            place = (slot, length, created)
            if op == _PUT and self._is_usable(place):
                self._assign((key, shard, put_id), place)
                unnamed.discard(slot)
                if number >= trusted:
                    suspects.append((key, shard, put_id))
            elif op == _DELETE:
                self._release((key, shard, put_id))
        for suspect in suspects:
            if suspect in self._index and self._read(suspect, self._index[suspect])[1]:
                self._release(suspect)
                self._torn += 1
        if not marks or sum(number < trusted for number, _ in records) < trusted:
            self._rebuilt = True
            self._take_up_unnamed()
        else:
            self._take_up_unnamed(sorted(unnamed))
        return num_logged

    def _take_up_unnamed(self, slots: Sequence[int] | None = None) -> int:
        """Takes up shards that the index does not name from these slots, or all; returns how
        many."""
        found = 0
        num_slots = self._max_segments * self._per_segment
        for slot in range(num_slots) if slots is None else slots:
            file = self._files[slot // self._per_segment] if slot < num_slots else None
            if file is None:
                continue
            header = ShardHeader.parse(os.pread(file, SHARD_HEADER_BYTES, self._offset(slot)))
            if header is None:
                continue
            shard_id = (header.key16, header.shard, header.put_id)
            place = (slot, header.shard_bytes, header.created_s)
            if shard_id in self._index:
                continue
            if not self._is_usable(place) or self._read(shard_id, place)[1]:
                self._torn += 1
                continue
            self._assign(shard_id, place)
            self._dirty.add(slot // self._per_segment)
            found += 1
        return found

    def rescan(self) -> int:
        """Takes up shards that lie in slots which the log does not name; returns how many."""
        with self._mutex:
            self._freshen_log()
            found = self._take_up_unnamed()
            if found:
                self._free = [slot for slot in self._free if slot not in self._owners]
                self._ready = [slot for slot in self._ready if slot not in self._owners]
                self._compact()
            return found

    def _freshen_log(self) -> None:
        if self._is_log_stale:
            self._compact()

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

    @staticmethod
    def _record(op: int, shard_id: Id, place: Place) -> bytes:
        key, shard, put_id = shard_id
        body = _LOG.pack(op, shard, place[0], key, put_id, place[1], place[2])
        return body + struct.pack("<I", crc32c(body))

    @property
    def _count(self) -> int:
        """Records of this log, those that wait for its file included."""
        return self._written + len(self._waiting) // _RECORD_BYTES

    def _push(self, record: bytes) -> None:
        self._waiting += record
        self._is_synced = False

    def _pop(self, count: int) -> None:
        del self._waiting[len(self._waiting) - count * _RECORD_BYTES :]

    def _flush(self) -> None:
        """Hands all that waits to the kernel. After an error it still waits: writing at the known
        end repairs what a full disk cut short."""
        at = self._written * _RECORD_BYTES
        if os.pwrite(self._log, self._waiting, at) != len(self._waiting):
            raise OSError(errno.ENOSPC, "the log is cut short")
        self._written = self._count
        self._waiting = bytearray()

    def _claim(self) -> None:
        """Notes in the log that the next free slots are going to be written."""
        slots = self._free[-_CLAIM_AT_ONCE:]
        claims = _claims(slots)
        self._push(b"".join(claims))
        try:
            self._flush()
        except OSError:
            self._pop(len(claims))
            raise
        del self._free[-_CLAIM_AT_ONCE:]
        self._ready = slots

    def _add_segment(self) -> None:
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
        os.fsync(file)
        self._sync_folder()
        self._files[number] = file
        first = number * self._per_segment
        self._free += range(first + self._per_segment - 1, first - 1, -1)

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
            self._freshen_log()
            if shard_id in self._index:
                return max(self._base + self._count - 1, 0)
            if not self._ready:
                if not self._free:
                    self._add_segment()
                self._claim()
            slot = self._ready.pop()
            number = slot // self._per_segment
            file = self._files[number]
            assert file is not None
            place = (slot, header.shard_bytes, header.created_s)
            try:
                if os.pwrite(file, data, self._offset(slot)) != len(data):
                    raise OSError(errno.ENOSPC, "the slot is cut short")
            except OSError:
                # Opening must not find there a shard that nobody was told of.
                self._blank(slot, False)
                self._ready.append(slot)
                raise
            self._push(self._record(_PUT, shard_id, place))
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

    def delete(self, ids: Sequence[Id], erase: bool = False) -> int:
        """Returns how many of the shards were there and are freed; overwritten on demand."""
        count = 0
        with self._mutex:
            self._freshen_log()
            for shard_id in ids:
                place = self._index.get(shard_id)
                if place is None:
                    continue
                is_blank = self._blank(place[0], erase)
                self._push(self._record(_DELETE, shard_id, place))
                try:
                    self._flush()
                except OSError:
                    # Either is enough to forget it.
                    if not is_blank:
                        self._pop(1)
                        raise
                if erase and not is_blank:
                    raise OSError(errno.EIO, "a slot cannot be overwritten")
                self._release(shard_id)
                self._free.append(place[0])
                count += 1
            if self._count > 4 * len(self._index) + _LOG_SLACK:
                self._compact()
        return count

    def _blank(self, slot: int, whole: bool) -> bool:
        """Makes a slot's header say nothing, so that no rebuilt log brings a deleted shard back."""
        file = self._files[slot // self._per_segment]
        if file is None:
            return True
        size = self._slot_bytes if whole else SHARD_HEADER_BYTES
        self._dirty.add(slot // self._per_segment)
        self._is_synced = False
        try:
            return os.pwrite(file, bytes(size), self._offset(slot)) == size
        except OSError:
            return False

    # ---- durability ---------------------------------------------------------------------------

    def sync(self) -> int:
        """Returns the number below which every record is on the disk."""
        with self._mutex:
            self._freshen_log()
            covered = self._base + self._count
            if self._is_synced:
                return covered
            for number in self._dirty:
                file = self._files[number]
                if file is not None:
                    os.fdatasync(file)
            self._dirty.clear()
            self._unsynced = 0
            self._push(self._record(_SYNC, (bytes(16), 0, self._count), (0, 0, 0)))
            try:
                self._flush()
                self._is_synced = True
            except OSError:
                # What is flushed is durable: the claims are in the log, and opening reads more
                # than it must.
                self._pop(1)
            os.fdatasync(self._log)
            return covered

    def _compact(self) -> None:
        for file in self._files:
            if file is not None:
                os.fdatasync(file)
        path = os.path.join(self._dir, "index.new")
        records = _claims(self._ready)
        records += [self._record(_PUT, shard_id, place) for shard_id, place in self._index.items()]
        records.append(self._record(_SYNC, (bytes(16), 0, len(records)), (0, 0, 0)))
        new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            data = b"".join(records)
            if os.write(new, data) != len(data):
                raise OSError(errno.ENOSPC, "the log is cut short")
            os.fdatasync(new)
            os.rename(path, os.path.join(self._dir, "index.log"))
        except OSError:
            os.close(new)
            raise
        self._sync_folder()
        if self._log >= 0:
            os.close(self._log)
        self._log = new
        self._base += self._count
        self._written = len(records)
        self._waiting = bytearray()
        self._is_synced, self._unsynced = True, 0
        self._is_log_stale = False

    def _sync_folder(self) -> None:
        folder = os.open(self._dir, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

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
                header = ShardHeader.parse(data)
                shard_id = self._owners.get(slot)
                if header and (header.key16, header.shard, header.put_id) == shard_id:
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
