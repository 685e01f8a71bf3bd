"""FETCH: blocks from the store into the slots of an engine's ring, checked, in no fixed order.

A fetch never fails for a block: it says which one is missing, and the engine computes from there.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.shm_ring import SlotRing
from services.kvstore.backends.base import ReadStatus, wait_all
from services.kvstore.checksums import Buffer
from services.kvstore.store.blocks import BlockRead, BlockStore


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
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[object] | None = None


class Fetcher:
    """Runs fetches over one block store."""

    def __init__(
        self, blocks: BlockStore, max_inflight_bytes: int, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._blocks = blocks
        self._gate = ByteGate(max_inflight_bytes)
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self.num_running = 0

    @property
    def num_inflight_bytes(self) -> int:
        """Returns how many bytes are being read."""
        return self._gate.num_bytes

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
        waited for: nothing is written into a slot after the fetch has ended.
        Raises: Failure(INVALID_REQUEST) for keys or slots that do not fit together.
        """
        if len(keys) % 32:
            raise Failure(Reason.INVALID_REQUEST, "keys have 32 bytes each")
        count = len(keys) // 32
        if ring is not None and (len(slots) != count or len(set(slots)) != count):
            raise Failure(Reason.INVALID_REQUEST, "one slot of its own for each block")
        views = [ring.view(slot) for slot in slots] if ring is not None else []
        job = _Job(task=asyncio.current_task())
        if fetch_id:
            if fetch_id in self._jobs:
                raise Failure(Reason.CONFLICT, "a fetch of that id is running")
            self._jobs[fetch_id] = job
        self.num_running += 1
        done: asyncio.Queue[tuple[int, BlockRead, bytes, bool]] = asyncio.Queue()
        reads = [
            asyncio.create_task(
                self._read(
                    keys[32 * i : 32 * i + 32],
                    layout,
                    views[i] if views else None,
                    priority,
                    deadline_s,
                    i,
                    done,
                )
            )
            for i in range(count)
        ]
        is_ok = bytearray(count)
        watermark = 0
        try:
            for _ in range(count):
                index, read, payload, timed_out = await done.get()
                is_ok[index] = read.status is ReadStatus.OK
                while watermark < count and is_ok[watermark]:
                    watermark += 1
                yield Fetched(index, read, watermark, payload, timed_out)
        finally:
            for task in reads:
                task.cancel()
            # Reads that have begun end by themselves; a slot is given back only then.
            await wait_all(reads)
            del views
            self.num_running -= 1
            self._jobs.pop(fetch_id, None)
            job.ended.set()

    async def cancel(self, fetch_id: int) -> bool:
        """Ends a fetch; returns once nothing is written any more, and whether it was running."""
        job = self._jobs.get(fetch_id)
        if job is None:
            return False
        if job.task is not None:
            job.task.cancel()
        await job.ended.wait()
        return True

    async def _read(
        self,
        key: bytes,
        layout: bytes,
        slot: memoryview | None,
        priority: int,
        deadline_s: float,
        index: int,
        done: asyncio.Queue[tuple[int, BlockRead, bytes, bool]],
    ) -> None:
        size = self._blocks.block_bytes(key)
        if size is None:
            done.put_nowait((index, BlockRead(ReadStatus.ABSENT), b"", False))
            return
        entered = await self._gate.enter(size, priority)
        try:
            if self._clock.now_s() >= deadline_s:
                done.put_nowait((index, BlockRead(ReadStatus.IO), b"", True))
                return
            own = bytearray()

            def room(num_bytes: int) -> Buffer | None:
                if slot is not None:
                    return slot[:num_bytes] if num_bytes <= len(slot) else None
                own.extend(bytes(num_bytes))
                return own

            read = await self._blocks.get(key, layout, room)
            inline = bytes(own) if slot is None and read.status is ReadStatus.OK else b""
            done.put_nowait((index, read, inline, False))
        finally:
            self._gate.leave(entered)
