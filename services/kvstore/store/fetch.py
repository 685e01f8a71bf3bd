"""FETCH: blocks from the store into the slots of an engine's ring, checked, in no fixed order.

A fetch never fails for a block: it says which one is missing, and the engine computes from there.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.shm_ring import SlotRing
from services.kvstore.backends.base import ReadStatus, wait_all
from services.kvstore.checksums import Buffer
from services.kvstore.hash_chain import KEY_BYTES
from services.kvstore.store.blocks import BlockRead, BlockStore

log = logging.getLogger(__name__)

# Four prompts of a million tokens; each block costs memory before a byte of it is read.
MAX_FETCH_BLOCKS: Final = 32_768
MAX_FETCHES: Final = 4_096
# Payloads read for one fetch without a ring and not taken by its reader yet.
_MAX_AHEAD_BYTES: Final = 8 << 20
_LOOK_UPS_AT_ONCE: Final = 1_024


class ByteGate:
    """Lets so many bytes through at a time; of those who wait, the higher priority goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._free = max_bytes
        self._max = max_bytes
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def num_bytes(self) -> int:
        """Returns how many bytes are inside."""
        return self._max - self._free

    def enter_at_once(self, num_bytes: int) -> int:
        """Returns what to give back to `leave`; 0 when there is no room now."""
        need = min(num_bytes, self._max)
        if self._waiting or need > self._free:
            return 0
        self._free -= need
        return need

    async def enter(self, num_bytes: int, priority: int) -> int:
        """Waits for room; returns what to give back to `leave`."""
        need = min(num_bytes, self._max)
        if not self._waiting and need <= self._free:
            self._free -= need
            return need
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, next(self._order), need, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(need)
            raise
        return need

    def leave(self, num_bytes: int) -> None:
        """Gives room back."""
        self._free += num_bytes
        while self._waiting:
            _, _, need, turn = self._waiting[0]
            if turn.done():
                heapq.heappop(self._waiting)
                continue
            if need > self._free:
                return
            heapq.heappop(self._waiting)
            self._free -= need
            turn.set_result(None)


@dataclass(frozen=True)
class Fetched:
    """How one block ended. `payload` is set when no ring was given."""

    index: int
    read: BlockRead
    watermark: int
    payload: bytes = b""
    timed_out: bool = False


@dataclass
class _Job:
    """One fetch that runs."""

    keys: bytes
    layout: bytes
    views: Sequence[memoryview]  # a slot per block; empty without a ring
    priority: int
    deadline_s: float
    done: asyncio.Queue[Fetched]
    reads: set[asyncio.Task[None]] = field(default_factory=set)
    ahead: ByteGate = field(default_factory=lambda: ByteGate(_MAX_AHEAD_BYTES))
    # What a payload holds, until it is taken, of `ahead` and of the gate of all such fetches.
    unread: dict[int, tuple[int, int]] = field(default_factory=dict)
    all_taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[object] | None = None

    def key(self, index: int) -> bytes:
        return self.keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]

    def end(self, index: int, read: BlockRead, payload: bytes = b"", late: bool = False) -> None:
        self.done.put_nowait(Fetched(index, read, 0, payload, late))


class _Ticket:
    """Room in a gate, given back once."""

    def __init__(self, gate: ByteGate, num_bytes: int) -> None:
        self._gate = gate
        self._num_bytes = num_bytes

    def leave(self) -> None:
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._gate.leave(num_bytes)

    def leave_after(self, _: object) -> None:
        self.leave()


class Fetcher:
    """Runs fetches over one block store."""

    def __init__(
        self, blocks: BlockStore, max_inflight_bytes: int, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._blocks = blocks
        self._gate = ByteGate(max_inflight_bytes)
        # Of payloads that wait for readers: a slow one takes nothing from those who have rings.
        self._unread = ByteGate(max_inflight_bytes)
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self.num_running = 0

    @property
    def num_inflight_bytes(self) -> int:
        """Returns how many bytes are being read."""
        return self._gate.num_bytes

    @property
    def num_unread_bytes(self) -> int:
        """Returns how many bytes are read without a ring, or about to be, and not taken yet; the
        one block that each fetch may always have is not counted."""
        return self._unread.num_bytes

    async def fetch(
        self,
        keys: bytes,
        layout: bytes,
        *,
        ring: SlotRing | None,
        slots: Sequence[int],
        priority: int = 0,
        deadline_s: float = float("inf"),
        fetch_id: int = 0,
    ) -> AsyncGenerator[Fetched, None]:
        """Yields every block once.

        When the iterator is closed, or the fetch is cancelled by `cancel`, reads in progress are
        waited for: nothing is written into a slot after the fetch has ended. Without a ring no
        more is read ahead of the reader than a bound; how slow it is costs nobody else anything.
        Raises: Failure(INVALID_REQUEST) for keys, slots or a layout that do not fit together, or
            too many of them; Failure(ENGINE_FULL) when too many fetches run.
        """
        if len(keys) % KEY_BYTES or len(layout) != KEY_BYTES:
            raise Failure(Reason.INVALID_REQUEST, "keys, and a layout, have 32 bytes each")
        count = len(keys) // KEY_BYTES
        if count > MAX_FETCH_BLOCKS:
            raise Failure(
                Reason.INVALID_REQUEST,
                f"{count} blocks in one fetch, the limit is {MAX_FETCH_BLOCKS}",
                {"num_blocks": str(count), "max_blocks": str(MAX_FETCH_BLOCKS)},
            )
        if ring is not None and (len(slots) != count or len(set(slots)) != count):
            raise Failure(Reason.INVALID_REQUEST, "one slot of its own for each block")
        if self.num_running >= MAX_FETCHES:
            raise Failure(
                Reason.ENGINE_FULL,
                f"{MAX_FETCHES} fetches are running",
                {"max_fetches": str(MAX_FETCHES)},
            )
        views = [ring.view(slot) for slot in slots] if ring is not None else []
        job = _Job(keys, layout, views, priority, deadline_s, asyncio.Queue())
        job.task = asyncio.current_task()
        job.all_taken.set()
        if fetch_id:
            if fetch_id in self._jobs:
                raise Failure(Reason.CONFLICT, "a fetch of that id is running")
            self._jobs[fetch_id] = job
        self.num_running += 1
        starter = asyncio.create_task(self._start_reads(job), name="kv fetch")
        is_ok = bytearray(count)
        watermark = 0
        try:
            for _ in range(count):
                part = await job.done.get()
                is_ok[part.index] = part.read.status is ReadStatus.OK
                while watermark < count and is_ok[watermark]:
                    watermark += 1
                yield replace(part, watermark=watermark)
                self._taken(job, part.index)
        finally:
            starter.cancel()  # from here on it begins no read
            for task in job.reads:
                task.cancel()
            try:
                # Reads that have begun end by themselves; a slot is given back only then.
                await wait_all([starter, *job.reads])
            finally:
                # Also when it is cancelled once more, by `cancel` behind a reader that has left.
                del views, job.views
                for index in list(job.unread):
                    self._taken(job, index)
                self.num_running -= 1
                self._jobs.pop(fetch_id, None)
                job.ended.set()

    def _taken(self, job: _Job, index: int) -> None:
        if index in job.unread:
            ahead, unread = job.unread.pop(index)
            job.ahead.leave(ahead)
            self._unread.leave(unread)
            if not job.unread:
                job.all_taken.set()

    async def cancel(self, fetch_id: int) -> bool:
        """Ends a fetch; returns once nothing is written any more, and whether it was running."""
        job = self._jobs.get(fetch_id)
        if job is None:
            return False
        if job.task is not None:
            job.task.cancel()
        await job.ended.wait()
        return True

    async def _start_reads(self, job: _Job) -> None:
        """Says at once what is absent, then begins the reads as there is room for them.

        One place in the queue for each fetch, so that a long one does not put itself in front of
        all others; and no task before there is room for its bytes.
        """
        found: list[tuple[int, int]] = []
        for index in range(len(job.keys) // KEY_BYTES):
            try:
                size = self._blocks.block_bytes(job.key(index))
            except Exception:
                log.exception("look-up failed")  # as for a read that fails unforeseen
                size = None
            if size is None:
                job.end(index, BlockRead(ReadStatus.ABSENT))
            else:
                found.append((index, size))
            if index % _LOOK_UPS_AT_ONCE == _LOOK_UPS_AT_ONCE - 1:
                await asyncio.sleep(0)
        for index, size in found:
            if not job.views:
                ahead = await job.ahead.enter(size, 0)
                unread = self._unread.enter_at_once(size)
                if not unread:
                    # One block each may always be under way: who stands still holds up nobody.
                    await job.all_taken.wait()
                job.unread[index] = ahead, unread
                job.all_taken.clear()
            entered = await self._gate.enter(size, job.priority)
            ticket = _Ticket(self._gate, entered)
            read = asyncio.create_task(self._read(job, index, ticket), name="kv read")
            job.reads.add(read)
            read.add_done_callback(job.reads.discard)
            # A task that is cancelled before its first step runs no `finally` of its own.
            read.add_done_callback(ticket.leave_after)

    async def _read(self, job: _Job, index: int, ticket: _Ticket) -> None:
        try:
            if self._clock.now_s() >= job.deadline_s:
                job.end(index, BlockRead(ReadStatus.IO), late=True)
                return
            slot = job.views[index] if job.views else None
            own = bytearray()

            def room(num_bytes: int) -> Buffer | None:
                if slot is not None:
                    return slot[:num_bytes] if num_bytes <= len(slot) else None
                own.extend(bytes(num_bytes))
                return own

            try:
                read = await self._blocks.get(job.key(index), job.layout, room)
            except Exception:
                # The fetch waits for every block: one that fails in a way that nobody thought of
                # is a miss, or the whole fetch would stand still until its deadline.
                log.exception("read failed")
                read = BlockRead(ReadStatus.IO)
            inline = bytes(own) if slot is None and read.status is ReadStatus.OK else b""
            job.end(index, read, inline)
        finally:
            ticket.leave()
