"""One pass of garbage collection over one node: expired blocks, the waterlines, tombstones.

The same pass runs inside an embedded store and in the worker beside a storage node; what differs
is the target it is given. Source: kvcache-and-balancing.md, section 9.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from services.common.clock import SYSTEM_CLOCK, Clock
from services.kvstore.gc.policy import ClockGuard, Waterlines, choose, num_to_evict
from services.kvstore.index_table import EPOCH_S

log = logging.getLogger(__name__)

_BATCH: Final = 500


class GcTarget(Protocol):
    """A node as garbage collection sees it."""

    async def usage(self) -> tuple[int, int]:
        """Returns (slots, slots used)."""
        ...

    def eviction_order(self, limit: int, only_expired: bool = False) -> list[tuple[bytes, bool]]:
        """Returns (key, is expired) of the blocks it decides on, first to go first."""
        ...

    def access_epoch(self, key16: bytes) -> int | None:
        """Returns when the block was last used, in units of 600 s."""
        ...

    def pinned(self) -> set[bytes]:
        """Returns the keys that are pinned now."""
        ...

    async def evict(self, keys16: Sequence[bytes], reason: str) -> int:
        """Evicts blocks; returns how many went."""
        ...

    async def free_orphans(self) -> int:
        """Frees shards that no record names; returns how many. Purges old tombstones too."""
        ...


@dataclass
class Collected:
    """What a pass did."""

    expired: int = 0
    by_waterline: int = 0
    orphans: int = 0
    # Least epochs since the last access among those evicted by waterline: the retention that the
    # disk really gives. None when nothing was.
    retention_epochs: int | None = None


class Collector:
    """Passes over one target, never two at once."""

    def __init__(
        self,
        target: GcTarget,
        lines: Waterlines,
        *,
        max_deletes_per_s: float = 5_000,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._target = target
        self._lines = lines
        self._max_deletes_per_s = max_deletes_per_s
        self._clock = clock
        self._guard = ClockGuard()
        self._running: asyncio.Task[Collected] | None = None
        self.last_success_s: float | None = None
        self.last = Collected()
        self.totals = Collected()
        # What the last pass that made room gave: it stays until another one does.
        self.retention_s: float | None = None
        self.num_evicted = 0
        self.used_share = 0.0

    @property
    def holds_for_clock(self) -> bool:
        """Returns whether nothing is let go for its age, because the wall clock has jumped."""
        return self._guard.is_holding

    def _believes_clock(self) -> bool:
        was_holding = self._guard.is_holding
        believes = self._guard.believes(self._clock.wall_s(), self._clock.now_s())
        if was_holding == believes:
            log.warning(
                "wall clock believed again" if believes else "wall clock jumped: nothing expires"
            )
        return believes

    async def collect(self, with_orphans: bool = False) -> Collected:
        """Runs a pass, or joins the one that runs."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._pass(with_orphans), name="gc pass")
        return await asyncio.shield(self._running)

    async def _pass(self, with_orphans: bool) -> Collected:
        done = Collected()
        num_slots, num_used = await self._target.usage()
        # Room is made by the order of use, whatever the clock says.
        believes = self._believes_clock()
        expired = self._target.eviction_order(num_slots, only_expired=True) if believes else []
        wanted = num_to_evict(num_slots, num_used, len(expired), self._lines)
        if wanted:
            is_emergency = num_used >= self._lines.emergency * num_slots
            pinned = set() if is_emergency else self._target.pinned()
            order = self._target.eviction_order(wanted + len(pinned))
            going = choose(order, wanted, pinned, is_emergency)
            is_expired = dict(order)
            now_epoch = int(self._clock.wall_s()) // EPOCH_S
            for at in range(0, len(going), _BATCH):
                batch = going[at : at + _BATCH]
                for key in batch:
                    if believes and is_expired[key]:
                        done.expired += 1
                        continue
                    done.by_waterline += 1
                    epoch = self._target.access_epoch(key)
                    if epoch is not None:
                        age = max(now_epoch - epoch, 0)
                        known = done.retention_epochs
                        done.retention_epochs = age if known is None else min(known, age)
                self.num_evicted += await self._target.evict(batch, "gc")
                if at + _BATCH < len(going):
                    await self._clock.sleep(len(batch) / self._max_deletes_per_s)
        if with_orphans and believes:
            done.orphans = await self._target.free_orphans()
        num_slots, num_used = await self._target.usage()
        self.used_share = num_used / num_slots if num_slots else 0.0
        self._note(done)
        self.last_success_s = self._clock.now_s()
        return done

    def _note(self, done: Collected) -> None:
        self.last = done
        self.totals.expired += done.expired
        self.totals.by_waterline += done.by_waterline
        self.totals.orphans += done.orphans
        if done.retention_epochs is not None:
            self.retention_s = done.retention_epochs * EPOCH_S

    async def run(self, every_s: float, orphans_every_s: float) -> None:
        """Passes for ever; a failed one is logged and the next tries again."""
        next_orphans_s = self._clock.now_s() + orphans_every_s
        while True:
            await self._clock.sleep(every_s)
            with_orphans = self._clock.now_s() >= next_orphans_s
            try:
                await self.collect(with_orphans)
            except Exception:
                log.exception("a pass of garbage collection failed")
                continue
            if with_orphans:
                next_orphans_s = self._clock.now_s() + orphans_every_s
