"""Blocks that wait for repair, and the pace at which they get it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from services.common.clock import Clock

_PARALLEL: Final = 8
_A_TURN: Final = 1_024
_RETRY_S: Final = 1.0
MAX_REPAIRS: Final = 1_000_000


class RepairQueue:
    """Keys of blocks to be repaired, each once.

    Args:
        repair: moves what is missing; returns (bytes moved, whether there is nothing left to do).
        age: what comes first is smallest.
    """

    def __init__(
        self,
        repair: Callable[[bytes], Awaitable[tuple[int, bool]]],
        age: Callable[[bytes], int],
        bytes_per_s: float,
        clock: Clock,
    ) -> None:
        self._repair = repair
        self._age = age
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._keys: dict[bytes, None] = {}
        self._later: dict[bytes, None] = {}  # could not be done; when all others had a turn
        self._wanted = asyncio.Event()

    def __len__(self) -> int:
        return len(self._keys) + len(self._later)

    def want(self, key16: bytes) -> bool:
        """Queues a block; returns whether it was queued now."""
        if key16 in self._keys or len(self) >= MAX_REPAIRS:
            return False
        self._later.pop(key16, None)
        self._keys[key16] = None
        self._wanted.set()
        return True

    def forget(self, key16: bytes) -> None:
        """Takes a block out of the queue."""
        self._keys.pop(key16, None)
        self._later.pop(key16, None)

    async def run(self) -> None:
        """Repairs what is queued, for ever, no faster than the budget."""
        while True:
            await self._wanted.wait()
            # Many at a time, for looking through a long queue takes long.
            turn = heapq.nsmallest(_A_TURN, self._keys, key=self._age)
            for at in range(0, len(turn), _PARALLEL):
                await self._repair_some(turn[at : at + _PARALLEL])
            if not self._keys:
                if self._later:
                    await self._clock.sleep(_RETRY_S)
                # A full or silent member must not hold up what the others can take.
                self._keys |= self._later
                self._later = {}
            if not self._keys:
                self._wanted.clear()

    async def _repair_some(self, keys16: Sequence[bytes]) -> None:
        batch = [key16 for key16 in keys16 if key16 in self._keys]
        for key16 in batch:
            del self._keys[key16]
        results = await asyncio.gather(*(self._repair(key16) for key16 in batch))
        for key16, (_, is_done) in zip(batch, results, strict=True):
            if not is_done and key16 not in self._keys:
                self._later[key16] = None
        moved = sum(num_bytes for num_bytes, _ in results)
        await self._clock.sleep(moved / self._bytes_per_s)
