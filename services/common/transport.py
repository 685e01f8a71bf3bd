"""Bulk bytes between two processes: `Transport`, by shared memory or inside gRPC messages.

The control message is the caller's own (`KvChunk`); a transport turns bytes into the part of it
that carries them, and back:

    writer = ShmWriter(ring)                       # or StreamWriter(credit_bytes)
    part = await writer.stage(data)                # waits for a slot, or for credit
    await stream.write(KvChunk(seq=part.seq, slot=part.slot, data=part.data, crc32c=..., ...))
    writer.acknowledge(ack.seq)                    # for each answer: slots and credit come back

    reader = ShmReader(ring)                       # or StreamReader()
    data = reader.take(part)                       # checked against length and crc32c
    ...; reader.done(part); send the acknowledgement

Same host (`host_id()` equal on both sides): shared memory, 8 to 18 times the bytes per second of
messages; else gRPC streams. A third one, RDMA, can be added beside them.
Source: engine.md, section 7.5; toolbox.md, gRPC 8.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import google_crc32c

from services.common.errors import Failure, Reason
from services.common.shm_ring import SHM_FOLDER, RingRef, SlotRing, SlotState

SHM: Final = "shm"
GRPC: Final = "grpc"
# KV travels in frames of at most this much inside gRPC messages.
MAX_FRAME_BYTES: Final = 1 << 20

Checksum = Callable[[bytes], int]


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Returns the crc32c (Castagnoli) of the bytes: "123456789" gives 0xE3069283."""
    return int(google_crc32c.value(data if isinstance(data, bytes) else bytes(data)))


@dataclass(frozen=True)
class Part:
    """What of a control message carries one payload: a slot number, or the bytes themselves."""

    seq: int
    length_bytes: int
    crc32c: int
    slot: int | None = None
    data: bytes = b""


class BulkWriter(Protocol):
    """The sending end of one transfer."""

    async def stage(self, data: bytes | bytearray | memoryview) -> Part:
        """Returns the part that carries the bytes; waits while all room is in flight.

        Raises: Failure(BACKEND_LOST) once closed; ValueError for more than `max_part_bytes`.
        """
        ...

    def acknowledge(self, seq: int) -> None:
        """Takes back the room of every part up to and with `seq`; again is harmless."""
        ...

    @property
    def max_part_bytes(self) -> int:
        """Returns the most bytes one part may carry."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Returns how many parts are not acknowledged yet."""
        ...

    def close(self) -> None:
        """Ends the transfer: whoever waits in `stage` fails, all room is given back."""
        ...


class BulkReader(Protocol):
    """The receiving end of one transfer."""

    def take(self, part: Part) -> bytes:
        """Returns the part's bytes, checked.

        Raises: Failure(BLOCK_CORRUPT) when length or checksum differ; Failure(STALE_EPOCH) when
            the slot is not this part's any more; Failure(INVALID_REQUEST).
        """
        ...

    def close(self) -> None:
        """Lets go of what it has mapped."""
        ...


def host_id() -> str:
    """Returns what is equal for two processes that see the same /dev/shm.

    Containers on one machine share a kernel but not that folder, hence its own identity too.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        folder = SHM_FOLDER.stat()
    except OSError:
        return ""
    return f"{boot}-{folder.st_dev:x}-{folder.st_ino:x}-{os.geteuid()}"


def choose(offered: Sequence[str], peer_host_id: str, supported: Sequence[str]) -> str:
    """Returns the first transport of the offer that both sides can use.

    Raises: Failure(UNSUPPORTED_FEATURE) when there is none.
    """
    for name in offered:
        same_host = peer_host_id != "" and peer_host_id == host_id()
        if name in supported and (name != SHM or same_host):
            return name
    raise Failure(Reason.UNSUPPORTED_FEATURE, "no common transport", {"offered": ",".join(offered)})


class _Window:
    """Parts in flight in order, and who waits for room. The bound of every writer."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[int, int]] = deque()  # (seq, room it holds)
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._next_seq = 0
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._in_flight)

    def add(self, room: int) -> int:
        """Returns the next sequence number, which now holds that room."""
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._in_flight.append((seq, room))
        return seq

    def release(self, seq: int) -> list[int]:
        """Returns the rooms of all parts up to `seq`, and wakes one waiter for each."""
        rooms: list[int] = []
        while self._in_flight and self._in_flight[0][0] <= seq:
            rooms.append(self._in_flight.popleft()[1])
        self._wake(len(rooms))
        return rooms

    async def wait(self) -> None:
        """Waits until room may have come back. Raises Failure(BACKEND_LOST) once closed."""
        if self.is_closed:
            raise Failure(Reason.BACKEND_LOST, "the transfer is closed")
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._waiters.remove(waiter)
            else:
                self._wake(1)  # it was its turn, and it cannot use it
            raise

    def pass_turn(self) -> None:
        """Wakes the next waiter; for one that could not use its turn."""
        self._wake(1)

    def close(self) -> list[int]:
        """Ends every wait and returns the rooms of all parts."""
        self.is_closed = True
        rooms = [room for _, room in self._in_flight]
        self._in_flight.clear()
        self._wake(len(self._waiters))
        return rooms

    def _wake(self, count: int) -> None:
        while count and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1


class ShmWriter:
    """Writes into a ring of its own; the reader attaches to it by `ring.ref`.

    Freeing follows the acknowledgements alone: a slot is written again only after its reader has
    said that it is done, or after `close`, when nobody is told of slots any more.
    """

    def __init__(self, ring: SlotRing, checksum: Checksum = crc32c) -> None:
        self._ring = ring
        self._checksum = checksum
        self._window = _Window()

    @classmethod
    def create(cls, label: str, slot_bytes: int, num_slots: int) -> ShmWriter:
        """Returns a writer with a new ring. Raises Failure(ENGINE_FULL)."""
        return cls(SlotRing.create(label, slot_bytes, num_slots))

    @property
    def ref(self) -> RingRef:
        """Returns how the reader finds the ring."""
        return self._ring.ref

    @property
    def max_part_bytes(self) -> int:
        """Returns the bytes of a slot."""
        return self._ring.ref.slot_bytes

    @property
    def num_in_flight(self) -> int:
        """Returns how many slots are not acknowledged."""
        return len(self._window)

    async def stage(self, data: bytes | bytearray | memoryview) -> Part:
        """Copies the bytes into a slot and publishes it."""
        if len(data) > self.max_part_bytes:
            raise ValueError(f"{len(data)} bytes do not fit a slot of {self.max_part_bytes}")
        while True:
            if self._window.is_closed:
                raise Failure(Reason.BACKEND_LOST, "the transfer is closed")
            slot = self._ring.allocate()
            if slot is not None:
                break
            await self._window.wait()
        payload = data if isinstance(data, bytes) else bytes(data)
        checksum = self._checksum(payload)
        view = self._ring.view(slot)
        view[: len(payload)] = payload
        view.release()
        seq = self._window.add(slot)
        self._ring.publish(slot, len(payload), checksum, seq)
        return Part(seq, len(payload), checksum, slot=slot)

    def acknowledge(self, seq: int) -> None:
        """Frees the slots of every part up to `seq`."""
        for slot in self._window.release(seq):
            self._ring.free(slot)

    def close(self) -> None:
        """Unlinks the ring: a reader that is still attached keeps its mapping, nobody's memory."""
        if not self._window.is_closed:
            self._window.close()
            self._ring.close()


class ShmReader:
    """Reads from a writer's ring."""

    def __init__(self, ring: SlotRing, checksum: Checksum = crc32c) -> None:
        self._ring = ring
        self._checksum = checksum

    @classmethod
    def attach(cls, ref: RingRef) -> ShmReader:
        """Returns a reader of a peer's ring. Raises Failure(STALE_EPOCH)."""
        return cls(SlotRing.attach(ref))

    def take(self, part: Part) -> bytes:
        """Returns a copy of the slot: what is checked is what is used, whatever the peer does."""
        if part.slot is None:
            raise Failure(Reason.INVALID_REQUEST, "the part names no slot")
        info = self._ring.info(part.slot)
        if info.state is not SlotState.READY or info.seq != part.seq:
            raise Failure(Reason.STALE_EPOCH, "the slot is not this part's any more")
        if part.length_bytes > self._ring.ref.slot_bytes:
            raise Failure(Reason.INVALID_REQUEST, "the part is longer than a slot")
        view = self._ring.view(part.slot)
        data = bytes(view[: part.length_bytes])
        view.release()
        return _checked(data, part, self._checksum)

    def close(self) -> None:
        """Unmaps the ring."""
        self._ring.close()


class StreamWriter:
    """Carries bytes inside the messages, at most `credit_bytes` of them in flight."""

    def __init__(
        self,
        credit_bytes: int,
        max_part_bytes: int = MAX_FRAME_BYTES,
        checksum: Checksum = crc32c,
    ) -> None:
        if credit_bytes < max_part_bytes:
            raise ValueError(f"credit of {credit_bytes} bytes is less than one part")
        self._credit_bytes = credit_bytes
        self._max_part_bytes = max_part_bytes
        self._checksum = checksum
        self._window = _Window()

    @property
    def max_part_bytes(self) -> int:
        """Returns the most bytes of one message."""
        return self._max_part_bytes

    @property
    def num_in_flight(self) -> int:
        """Returns how many messages are not acknowledged."""
        return len(self._window)

    async def stage(self, data: bytes | bytearray | memoryview) -> Part:
        """Takes credit for the bytes and returns them as a part."""
        if len(data) > self._max_part_bytes:
            raise ValueError(f"{len(data)} bytes do not fit a part of {self._max_part_bytes}")
        while self._window.is_closed or self._credit_bytes < len(data):
            await self._window.wait()
        self._credit_bytes -= len(data)
        if self._credit_bytes:
            self._window.pass_turn()  # a smaller part behind may fit what is left
        payload = data if isinstance(data, bytes) else bytes(data)
        seq = self._window.add(len(payload))
        return Part(seq, len(payload), self._checksum(payload), data=payload)

    def acknowledge(self, seq: int) -> None:
        """Gives the credit of every part up to `seq` back."""
        self._credit_bytes += sum(self._window.release(seq))

    def grant(self, num_bytes: int) -> None:
        """Raises the credit, as an answer with `credit_bytes` asks for."""
        self._credit_bytes += num_bytes
        self._window.pass_turn()

    def close(self) -> None:
        """Ends every wait."""
        self._window.close()


class StreamReader:
    """Takes bytes out of messages."""

    def __init__(self, checksum: Checksum = crc32c) -> None:
        self._checksum = checksum

    def take(self, part: Part) -> bytes:
        """Returns the message's bytes, checked."""
        return _checked(part.data, part, self._checksum)

    def close(self) -> None:
        """Does nothing: the messages own their bytes."""


def _checked(data: bytes, part: Part, checksum: Checksum) -> bytes:
    if len(data) != part.length_bytes or checksum(data) != part.crc32c:
        raise Failure(
            Reason.BLOCK_CORRUPT,
            f"part {part.seq} does not have the bytes it was announced with",
            {"seq": str(part.seq)},
        )
    return data
