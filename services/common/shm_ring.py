"""A ring of fixed slots in shared memory, owned by one process and seen by its peers.

One file under /dev/shm, mode 0600: a header page (owner, epoch, sizes), a table of slot states,
then the slots, page-aligned. The owner creates, allocates and unlinks; a peer attaches by name and
epoch and reads or writes the slots it was told of by a control message. When an owner dies, its
file is found by its process id and start time and removed by `reclaim_orphans` (S-11, P-36).
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import re
import secrets
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.common.errors import Failure, Reason

SHM_FOLDER: Final = Path("/dev/shm")
PREFIX: Final = "pelagos-"
MAX_RING_BYTES: Final = 1 << 40
_PAGE: Final = 4096
_MAGIC: Final = b"PLGSRNG1"
# magic, slot bytes, slots, owner epoch, owner pid, owner's start time in clock ticks
_HEADER: Final = struct.Struct("<8sQQQQQ")
# state, length, crc32c, reserved, sequence number
_SLOT: Final = struct.Struct("<IIIIQ")
_STATE_BYTES: Final = 32
_NAME: Final = re.compile(rf"{PREFIX}[a-z0-9-]{{1,80}}")


class SlotState(enum.IntEnum):
    """Where a slot is in its life."""

    FREE = 0
    WRITING = 1  # allocated; somebody may write it
    READY = 2  # written and published


@dataclass(frozen=True)
class RingRef:
    """How a peer finds a ring; fits `kvstore.v1.ShmRing`."""

    name: str
    slot_bytes: int
    num_slots: int
    owner_epoch: int


@dataclass(frozen=True)
class SlotInfo:
    """What the shared table says of a slot."""

    state: SlotState
    length_bytes: int
    crc32c: int
    seq: int


class SlotRing:
    """A mapped ring. Make it by `create` (owner) or `attach` (peer); not thread-safe."""

    def __init__(self, ref: RingRef, mapping: mmap.mmap, path: Path, is_owner: bool) -> None:
        self.ref = ref
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._path = path
        self._is_owner = is_owner
        self._first_slot = _slots_offset(ref.num_slots)
        self._stride = _round_up(ref.slot_bytes)
        self._free: deque[int] = deque(range(ref.num_slots) if is_owner else ())

    @classmethod
    def create(cls, label: str, slot_bytes: int, num_slots: int, epoch: int = 0) -> SlotRing:
        """Returns a new ring of this process.

        Args:
            label: lower-case word that says whose it is ("prefill-fetch").
            epoch: fencing epoch; random when 0.
        Raises: Failure(ENGINE_FULL) when shared memory has no room; ValueError for bad sizes.
        """
        total = _slots_offset(num_slots) + num_slots * _round_up(slot_bytes)
        if slot_bytes < 1 or num_slots < 1 or total > MAX_RING_BYTES:
            raise ValueError(f"{num_slots} slots of {slot_bytes} bytes are no ring")
        name = f"{PREFIX}{label}-{secrets.token_hex(6)}"
        if not _NAME.fullmatch(name):
            raise ValueError(f"{label!r} is not a lower-case word")
        ref = RingRef(name, slot_bytes, num_slots, epoch or secrets.randbits(63) | 1)
        path = SHM_FOLDER / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Room is taken now: a sparse file would end a writer by SIGBUS when memory runs out.
            os.posix_fallocate(descriptor, 0, total)
            mapping = mmap.mmap(descriptor, total)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise Failure(
                    Reason.ENGINE_FULL,
                    f"no room for {total} bytes of shared memory",
                    {"num_bytes": str(total)},
                ) from None
            raise
        finally:
            os.close(descriptor)
        pid = os.getpid()
        _HEADER.pack_into(
            mapping, 0, _MAGIC, slot_bytes, num_slots, ref.owner_epoch, pid, _start_time(pid)
        )
        return cls(ref, mapping, path, is_owner=True)

    @classmethod
    def attach(cls, ref: RingRef) -> SlotRing:
        """Returns a peer's ring, mapped.

        Raises: Failure(STALE_EPOCH) when it is gone or another life's; Failure(INVALID_REQUEST)
            for a name or size that is not a ring's.
        """
        if not _NAME.fullmatch(ref.name):
            raise Failure(Reason.INVALID_REQUEST, "not the name of a ring")
        path = SHM_FOLDER / ref.name
        try:
            # No following of links: the name came from another process.
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            raise Failure(Reason.STALE_EPOCH, "the ring is gone") from None
        try:
            total = _slots_offset(ref.num_slots) + ref.num_slots * _round_up(ref.slot_bytes)
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or status.st_size != total:
                raise Failure(Reason.INVALID_REQUEST, "the ring has another size or owner")
            mapping = mmap.mmap(descriptor, total)
        finally:
            os.close(descriptor)
        magic, slot_bytes, num_slots, epoch, _, _ = _HEADER.unpack_from(mapping, 0)
        sizes = (slot_bytes, num_slots)
        if magic != _MAGIC or sizes != (ref.slot_bytes, ref.num_slots):
            mapping.close()
            raise Failure(Reason.INVALID_REQUEST, "not a ring of these sizes")
        if epoch != ref.owner_epoch:
            mapping.close()
            raise Failure(Reason.STALE_EPOCH, "the ring belongs to another epoch")
        return cls(ref, mapping, path, is_owner=False)

    # ---- owner --------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Returns how many slots the owner can allocate."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Returns how many slots are allocated; a row of the census."""
        return self.ref.num_slots - len(self._free)

    def allocate(self) -> int | None:
        """Returns a slot to write, None when all are in use. Owner only."""
        assert self._is_owner, "only the owner allocates"
        if not self._free:
            return None
        slot = self._free.popleft()
        self._set(slot, SlotInfo(SlotState.WRITING, 0, 0, 0))
        return slot

    def free(self, slot: int) -> None:
        """Takes a slot back. Owner only, and only once no peer may write it any more."""
        assert self._is_owner, "only the owner frees"
        if self.info(slot).state is SlotState.FREE:
            raise ValueError(f"slot {slot} is freed twice")
        self._set(slot, SlotInfo(SlotState.FREE, 0, 0, 0))
        self._free.append(slot)

    # ---- both ---------------------------------------------------------------------------------

    def view(self, slot: int) -> memoryview:
        """Returns the slot's bytes, writable. Drop it before `close`."""
        self._check(slot)
        start = self._first_slot + slot * self._stride
        return self._view[start : start + self.ref.slot_bytes]

    def info(self, slot: int) -> SlotInfo:
        """Returns the slot's row of the shared table."""
        self._check(slot)
        state, length, crc, _, seq = _SLOT.unpack_from(self._mapping, _PAGE + slot * _STATE_BYTES)
        known = SlotState(state) if state in SlotState.__members__.values() else SlotState.FREE
        return SlotInfo(known, length, crc, seq)

    def publish(self, slot: int, length_bytes: int, crc32c: int, seq: int) -> None:
        """Says that the slot holds `length_bytes` good bytes. The writer's last act on it.

        Raises: Failure(STALE_EPOCH) when the slot is not open for writing: it was taken back.
        """
        if self.info(slot).state is not SlotState.WRITING:
            raise Failure(Reason.STALE_EPOCH, "the slot is not open for writing")
        if not 0 <= length_bytes <= self.ref.slot_bytes:
            raise ValueError(f"{length_bytes} bytes do not fit a slot")
        self._set(slot, SlotInfo(SlotState.READY, length_bytes, crc32c, seq))

    @property
    def is_owner_alive(self) -> bool:
        """Returns whether the process that made the ring still runs."""
        _, _, _, _, pid, start_time = _HEADER.unpack_from(self._mapping, 0)
        return _is_alive(pid, start_time)

    def close(self) -> None:
        """Unmaps the ring; the owner also unlinks it. Views still held keep the mapping."""
        if self._is_owner:
            self._path.unlink(missing_ok=True)
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:
            pass  # a view is still in use; the mapping goes with it

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.ref.num_slots:
            raise Failure(
                Reason.INVALID_REQUEST,
                f"slot {slot} is outside of the ring's {self.ref.num_slots}",
                {"slot": str(slot), "num_slots": str(self.ref.num_slots)},
            )

    def _set(self, slot: int, info: SlotInfo) -> None:
        _SLOT.pack_into(
            self._mapping,
            _PAGE + slot * _STATE_BYTES,
            *(info.state, info.length_bytes, info.crc32c, 0, info.seq),
        )


def reclaim_orphans(folder: Path = SHM_FOLDER) -> int:
    """Removes rings of this user whose owner has died, and returns how many.

    Called at the start of every process that makes rings, and by the local launcher.
    """
    num_removed = 0
    for path in folder.glob(f"{PREFIX}*"):
        try:
            if path.stat().st_uid != os.geteuid():
                continue
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                continue
            magic, _, _, _, pid, start_time = _HEADER.unpack(header)
            if magic == _MAGIC and not _is_alive(pid, start_time):
                path.unlink()
                num_removed += 1
        except OSError:
            continue  # somebody else was faster
    return num_removed


def _is_alive(pid: int, start_time: int) -> bool:
    return start_time != 0 and _start_time(pid) == start_time


def _start_time(pid: int) -> int:
    """Returns when the process started, in clock ticks since boot; 0 when there is none.

    With the pid it names one process for good: pids come round again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    # A zombie's memory is gone although its entry stands.
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def _slots_offset(num_slots: int) -> int:
    return _PAGE + _round_up(num_slots * _STATE_BYTES)


def _round_up(num_bytes: int) -> int:
    return (num_bytes + _PAGE - 1) // _PAGE * _PAGE
