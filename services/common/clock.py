"""Time as an argument: a `Clock` is injected wherever a shell needs to wait or to stamp.

Durations and deadlines use `now_s()`, which is monotonic; the wall clock is only for timestamps
and for times compared across processes (P-23).
"""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import Final, Protocol


class Clock(Protocol):
    """What a shell may know about time."""

    def now_s(self) -> float:
        """Returns monotonic seconds; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Returns seconds since the epoch; may jump."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits that long on this clock."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Returns the monotonic clock."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Returns the wall clock."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Waits on the event loop."""
        await asyncio.sleep(seconds)


SYSTEM_CLOCK: Final[Clock] = SystemClock()


class VirtualClock:
    """A clock that a test or a simulation moves by hand; sleepers wake in order of their time."""

    def __init__(self, now_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._wall_offset_s = wall_s - now_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._num_sleeps = 0

    def now_s(self) -> float:
        """Returns virtual monotonic seconds."""
        return self._now_s

    def wall_s(self) -> float:
        """Returns virtual wall seconds, jumps included."""
        return self._now_s + self._wall_offset_s

    def jump_wall(self, seconds: float) -> None:
        """Moves the wall clock alone, as an operator or NTP would."""
        self._wall_offset_s += seconds

    async def sleep(self, seconds: float) -> None:
        """Waits until `advance` has passed that time."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_sleeps += 1
        heapq.heappush(self._sleepers, (self._now_s + seconds, self._num_sleeps, future))
        await future

    async def advance(self, seconds: float, *, settle_turns: int = 20) -> None:
        """Moves time forward, waking each sleeper at its own moment.

        Between wake-ups the loop gets `settle_turns` turns, so that whoever woke up can act and
        sleep again inside the same advance.
        """
        end_s = self._now_s + seconds
        await self._settle(settle_turns)
        while self._sleepers and self._sleepers[0][0] <= end_s:
            wake_s, _, future = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, wake_s)
            if not future.done():
                future.set_result(None)
            await self._settle(settle_turns)
        self._now_s = end_s

    @property
    def num_sleepers(self) -> int:
        """Returns how many tasks wait on this clock."""
        return sum(not future.done() for _, _, future in self._sleepers)

    @staticmethod
    async def _settle(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
