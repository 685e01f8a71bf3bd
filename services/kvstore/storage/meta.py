"""Metadata of a node: the table of records, its log on disk, pins, and who follows the log.

All of it runs on the event loop: an edit is a few microseconds in memory and one append to a file.
The log makes records survive a restart; the shards themselves can rebuild everything but the
access epochs, so a log that is lost costs order, never blocks.
Source: kvcache-and-balancing.md, sections 3.3, 5, 7 and 9.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.kvstore.formats import (
    FLAG_APPROXIMATE,
    LOG_ENTRY_BYTES,
    NO_KEY16,
    Record,
    State,
)
from services.kvstore.index_table import (
    EPOCH_S,
    OP_REMOVE,
    OP_SET,
    TTL_S,
    Fields,
    encode_entry,
    fields_of,
    is_expired,
    new_table,
)

_LOG_SLACK: Final = 16_384  # entries beyond four a record before the log is written anew
_MAX_DAMAGES: Final = 4096  # entries skipped before the rest of a log is given up
_MAX_TAIL_BYTES: Final = 8 << 20
_SNAPSHOT_ENTRIES: Final = 8192
_TOMBSTONE_EPOCHS: Final = 2  # at least 600 s, counted in whole epochs
MAX_PINS: Final = 100_000
_MAX_PINNED_BYTES: Final = 256 << 20  # of the keys that pins name
_LAPSE_EVERY_S: Final = 1.0


class CommitOutcome(enum.Enum):
    """How a commit ended."""

    COMMITTED = "committed"
    REPLACED = "replaced"  # an exact block took the place of an approximate one
    EXISTS = "exists"
    NO_PARENT = "no_parent"


@dataclass(frozen=True)
class Commit:
    """Result of a commit: the put in force, and the put it replaced, whose shards must go."""

    outcome: CommitOutcome
    put_id: int
    replaced_put_id: int | None = None


@dataclass(frozen=True)
class LogPart:
    """Some log entries for a follower, with the number after them."""

    log_id: str
    entries: bytes
    next_seq: int
    reset: bool = False
    level: bool = False


class Meta:
    """The records of one node. Open with a file, or without one for tests."""

    def __init__(
        self,
        path: Path | None,
        wall_s: Callable[[], float],
        *,
        num_groups: int = 1024,
        ttl_s: Sequence[int] = TTL_S,
    ) -> None:
        self._path = path
        self._wall_s = wall_s
        self._num_groups = num_groups
        self._ttl_s = tuple(ttl_s)
        self.table = new_table(num_groups)
        # A new incarnation every start: after a power loss numbers may repeat.
        self.log_id = secrets.token_hex(8)
        self.next_seq = 1
        self._tail: deque[tuple[int, bytes]] = deque()
        self._tail_bytes = 0
        self._news = asyncio.Event()
        self._pins: dict[str, tuple[float, bytes]] = {}
        self._pinned_bytes = 0
        self._next_lapse_s = float("-inf")
        self._file = -1
        self._file_entries = 0
        if path is not None:
            self._load(path)

    # ---- the log file -------------------------------------------------------------------------

    def _load(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = path.read_bytes() if path.exists() else b""
        self.next_seq = self._apply(log) + 1
        try:
            self._rewrite()
        except OSError as error:
            # A disk without room must not keep a node from starting (P-34): go on behind the end.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._file_entries = len(log) // LOG_ENTRY_BYTES

    def _apply(self, log: bytes) -> int:
        """Takes over a log, without its damaged entries; returns the last number in it."""
        at = last_seq = 0
        for _ in range(_MAX_DAMAGES):
            consumed, seq = self.table.apply_log(log[at:])
            last_seq = max(last_seq, seq)
            at += consumed + LOG_ENTRY_BYTES
            if at >= len(log):
                break
        return last_seq

    def _rewrite(self) -> None:
        """Writes the log anew with only what is there; also leaves out what is damaged."""
        assert self._path is not None
        new = self._path.with_suffix(".new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        cursor: int | None = 0
        num_bytes = 0
        try:
            while cursor is not None:
                part, cursor = self.table.snapshot(cursor, _SNAPSHOT_ENTRIES, self.next_seq)
                _write_all(file, part, num_bytes)
                num_bytes += len(part)
            os.fdatasync(file)
            os.rename(new, self._path)
        except OSError:
            os.close(file)
            raise
        _sync_folder(self._path.parent)
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        self._file_entries = num_bytes // LOG_ENTRY_BYTES

    def _append(self, entries: bytes) -> None:
        """Makes entries part of the log: file, tail, followers."""
        if not entries:
            return
        count = len(entries) // LOG_ENTRY_BYTES
        if self._file >= 0:
            try:
                _write_all(self._file, entries, self._file_entries * LOG_ENTRY_BYTES)
                self._file_entries += count
                if self._file_entries > 4 * len(self.table) + _LOG_SLACK:
                    self._rewrite()
            except OSError:
                # A full disk loses order of access at worst (P-34); the next append overwrites
                # what was cut short.
                pass
        self._tail.append((self.next_seq, entries))
        self._tail_bytes += len(entries)
        self.next_seq += count
        while self._tail_bytes > _MAX_TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft()[1])
        self.wake_followers()

    def sync(self) -> None:
        """Makes the log durable. For a thread: it waits for the disk."""
        if self._file >= 0:
            os.fdatasync(self._file)

    def close(self) -> None:
        """Lets go of the file."""
        if self._file >= 0:
            os.fdatasync(self._file)
            os.close(self._file)
            self._file = -1

    # ---- records ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Returns the access epoch of now."""
        return int(self._wall_s()) // EPOCH_S

    def get(self, key16: bytes, even_expired: bool = False) -> Fields | None:
        """Returns the record of a block that can be read now, else None."""
        fields = self.table.get(key16)
        if fields is None or fields[5] > State.DEGRADED:
            return None
        if even_expired:
            return fields
        return (
            None if is_expired(fields[3], fields[6], int(self._wall_s()), self._ttl_s) else fields
        )

    def is_of(self, key16: bytes, put_id: int) -> bool:
        """Returns whether the record of a key, whatever its state, is that of a put."""
        fields = self.table.get(key16)
        return fields is not None and fields[0] == put_id

    def has(self, key16: bytes) -> bool:
        """Returns whether the block can be read now."""
        return self.get(key16) is not None

    def num_leading(self, keys: bytes, stride: int) -> int:
        """Returns how many leading keys are stored and alive."""
        return self.table.match_prefix(keys, stride, int(self._wall_s()), self._ttl_s)[0]

    def commit(self, key16: bytes, record: Record) -> Commit:
        """Makes a written block visible; the first commit of a key wins.

        An exact block replaces an approximate one, never the other way round. A child whose
        parent is not stored would be an orphan and is refused.
        """
        old = self.get(key16)
        if old is not None and old[0] == record.put_id:
            # The answer to the first try was lost: "exists" would make the writer free its shards.
            return Commit(CommitOutcome.COMMITTED, old[0])
        if old is not None:
            exact = not record.flags & FLAG_APPROXIMATE
            if not (exact and old[7] & FLAG_APPROXIMATE):
                return Commit(CommitOutcome.EXISTS, old[0])
        if record.parent16 != NO_KEY16 and not self.has(record.parent16):
            return Commit(CommitOutcome.NO_PARENT, 0)
        fields = fields_of(record)
        dead = self.table.get(key16) if old is None else None
        self._set(key16, fields, record.parent16)
        if old is not None:
            return Commit(CommitOutcome.REPLACED, record.put_id, old[0])
        # An expired or evicted record of the same key may still have shards.
        replaced = dead[0] if dead is not None and dead[5] <= State.DEGRADED else None
        return Commit(CommitOutcome.COMMITTED, record.put_id, replaced)

    def _set(self, key16: bytes, fields: Fields, parent16: bytes = NO_KEY16) -> None:
        self.table.set(key16, fields)
        self._append(encode_entry(self.next_seq, OP_SET, key16, fields, parent16, self._num_groups))

    def adopt(self, key16: bytes, record: Record) -> bool:
        """Takes a shard found on disk that no record names; for recovery. False if one does."""
        if self.table.get(key16) is not None:
            return False
        self._set(key16, fields_of(record), record.parent16)
        return True

    def merge(self, entries: bytes) -> list[bytes]:
        """Takes over what another log sets; returns the keys that it removes."""
        ours, removed = self.table.merge(entries, self.next_seq)
        self._append(ours)
        return removed

    def put_fields(self, key16: bytes, fields: Fields) -> None:
        """Sets a record as it is; for copies of other logs."""
        self._set(key16, fields)

    def touch(self, keys: bytes, stride: int, ttl_class: int) -> int:
        """Renews access and raises the class; returns how many records moved."""
        entries = self.table.touch(keys, stride, self.epoch, ttl_class, self.next_seq)
        self._append(entries)
        return len(entries) // LOG_ENTRY_BYTES

    def set_state(self, key16: bytes, state: State) -> Fields | None:
        """Changes the state of a record, with now as its access epoch for tombstones."""
        old = self.table.get(key16)
        if old is None:
            return None
        epoch = self.epoch if state is State.TOMBSTONE else old[3]
        self._set(key16, (old[0], old[1], old[2], epoch, old[4], int(state), old[6], old[7]))
        return old

    def bury(self, key16: bytes, put_id: int) -> None:
        """Makes the record of an evicted put a tombstone, unless another put has come meanwhile."""
        now = self.table.get(key16)
        if now is not None and (now[0], now[5]) == (put_id, State.EVICTING):
            self.set_state(key16, State.TOMBSTONE)

    def set_shards(self, key16: bytes, put_id: int, shards: int, state: State) -> bool:
        """Changes which shards of a put are there; False when another put is in force."""
        old = self.table.get(key16)
        if old is None or old[0] != put_id or old[5] > State.DEGRADED:
            return False
        self._set(key16, (*old[:4], shards, int(state), *old[6:]))
        return True

    def remove(self, keys16: Iterable[bytes]) -> int:
        """Forgets records altogether, no tombstone left."""
        entries, count = [], 0
        for key16 in keys16:
            old = self.table.get(key16)
            if old is not None and self.table.remove(key16):
                seq = self.next_seq + count
                entries.append(encode_entry(seq, OP_REMOVE, key16, old, NO_KEY16, self._num_groups))
                count += 1
        self._append(b"".join(entries))
        return count

    def purge_tombstones(self) -> int:
        """Forgets tombstones that are old enough that nothing can come back past them."""
        return self.remove(
            self.table.stale(State.TOMBSTONE, max(self.epoch - _TOMBSTONE_EPOCHS + 1, 0))
        )

    def eviction_order(self, limit: int, only_expired: bool = False) -> list[tuple[bytes, bool]]:
        """Returns (key, is expired) of what goes first."""
        now_s = int(self._wall_s())
        return self.table.eviction_order(now_s, self._ttl_s, limit, only_expired)

    # ---- pins ---------------------------------------------------------------------------------

    @property
    def num_pins(self) -> int:
        """Returns how many pins are held, lapsed ones included until the next look."""
        return len(self._pins)

    def pin(self, pin_id: str, keys16: bytes, ttl_s: float, now_s: float) -> int:
        """Holds blocks against eviction until `now_s + ttl_s`; no keys release the pin."""
        if now_s >= self._next_lapse_s:  # not each time: all pins are looked at
            self._lapse(now_s)
        self._unpin(pin_id)
        room = _MAX_PINNED_BYTES - self._pinned_bytes
        if not keys16 or len(self._pins) >= MAX_PINS or len(keys16) > room:
            return 0  # a hint, not a promise: eviction goes by age anyway
        self._pins[pin_id] = (now_s + ttl_s, keys16)
        self._pinned_bytes += len(keys16)
        return len(keys16) // 16

    def _unpin(self, pin_id: str) -> None:
        _, keys16 = self._pins.pop(pin_id, (0.0, b""))
        self._pinned_bytes -= len(keys16)

    def renew_pin(self, pin_id: str, ttl_s: float, now_s: float) -> None:
        """Gives a pin that is still held new life."""
        held = self._pins.get(pin_id)
        if held is not None and held[0] > now_s:
            self._pins[pin_id] = (now_s + ttl_s, held[1])

    def pinned(self, now_s: float) -> set[bytes]:
        """Returns the index keys that are pinned now."""
        self._lapse(now_s)
        return {
            keys[at : at + 16] for _, keys in self._pins.values() for at in range(0, len(keys), 16)
        }

    def _lapse(self, now_s: float) -> None:
        self._next_lapse_s = now_s + _LAPSE_EVERY_S
        for pin_id in [name for name, (until_s, _) in self._pins.items() if until_s <= now_s]:
            self._unpin(pin_id)

    # ---- followers ----------------------------------------------------------------------------

    async def follow(
        self, log_id: str, from_seq: int, heartbeat_s: float
    ) -> AsyncGenerator[LogPart, None]:
        """Yields the log from a number on, for ever; a snapshot first where the number is too old
        or of another incarnation. A heartbeat comes when nothing else did."""
        seq = from_seq
        first_kept = self._tail[0][0] if self._tail else self.next_seq
        if log_id != self.log_id or not first_kept <= seq <= self.next_seq:
            cursor: int | None = 0
            # The log goes on from where the snapshot began: what changes meanwhile comes again.
            seq, reset = self.next_seq, True
            while cursor is not None:
                entries, cursor = self.table.snapshot(cursor, _SNAPSHOT_ENTRIES, seq)
                yield LogPart(self.log_id, entries, seq, reset, False)
                reset = False
        while True:
            news = self._news
            if seq < self.next_seq:
                if self._tail and self._tail[0][0] > seq:
                    return  # fell behind the tail: the reader asks again and gets a snapshot
                entries = self._since(seq)
                seq = self.next_seq
                yield LogPart(self.log_id, entries, seq, False, True)
                continue
            yield LogPart(self.log_id, b"", seq, False, True)
            try:
                async with asyncio.timeout(heartbeat_s):
                    await news.wait()
            except TimeoutError:
                pass

    def wake_followers(self) -> None:
        """Makes every follower come round, so that its reader can leave."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _since(self, seq: int) -> bytes:
        parts = []
        for first, entries in reversed(self._tail):
            if first + len(entries) // LOG_ENTRY_BYTES <= seq:
                break
            parts.append(entries[max(seq - first, 0) * LOG_ENTRY_BYTES :])
        return b"".join(reversed(parts))


def _write_all(file: int, data: bytes, offset: int) -> None:
    """Writes all of it. Raises OSError; what was written in part is overwritten by the next."""
    if os.pwrite(file, data, offset) != len(data):
        raise OSError(errno.ENOSPC, "cut short")


def _sync_folder(folder: Path) -> None:
    """Makes a rename in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
