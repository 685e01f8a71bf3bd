"""Block manager: a FIFO of free blocks with reference counts.

Pure bookkeeping over integers: no device, no clock. Block 0 is the padding target and is never
given out, so an idle pool of n blocks has n - 1 free.
Source: engine.md, sections 0 and 2.4.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable


class Fit(enum.Enum):
    """Whether a request for n blocks can be served."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockFault(AssertionError):
    """Our own bookkeeping is broken: a double free, or a pin of a free block."""


class BlockManager:
    """Hands out, shares and takes back blocks. Every method is O(blocks touched)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool has the padding block and at least one more")
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks))
        self._count = [0] * num_blocks
        # Blocks whose peer may still write: owned by nobody, free only after the fence (P-36).
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.num_used / (self.num_blocks - 1)

    def fit(self, num: int) -> Fit:
        if num >= self.num_blocks:
            return Fit.NEVER
        return Fit.OK if num <= len(self._free) else Fit.LATER

    def allocate(self, num: int) -> list[int]:
        """Takes `num` blocks from the front of the free list, each with count 1.

        Raises: BlockFault when they are not there; ask `fit` first.
        """
        if num > len(self._free):
            raise BlockFault(f"allocate {num} blocks, {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(num)]
        for block in blocks:
            self._count[block] = 1
        return blocks

    def pin(self, blocks: Iterable[int]) -> None:
        """Adds one holder to each block; a free block cannot be pinned."""
        for block in blocks:
            if self._count[block] < 1:
                raise BlockFault(f"pin of free block {block}")
            self._count[block] += 1

    def free(self, table: Iterable[int]) -> None:
        """Drops one holder of each block, last block first so that a prefix stays longest."""
        for block in reversed(list(table)):
            if self._count[block] < 1:
                raise BlockFault(f"double free of block {block}")
            self._count[block] -= 1
            if self._count[block] == 0:
                self._free.append(block)

    def count(self, block: int) -> int:
        """Number of holders of a block."""
        return self._count[block]

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Marks held blocks as still writable by a peer. They stay held until `release`."""
        for block in blocks:
            if self._count[block] < 1:
                raise BlockFault(f"quarantine of free block {block}")
            self._quarantined.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Frees quarantined blocks after the peer's writes are known to have stopped."""
        table = list(blocks)
        for block in table:
            self._quarantined.discard(block)
        self.free(table)


class SlotPool:
    """State slots: as the block pool, one holder each. Slot 0 is the padding target."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError("a pool has the padding slot and at least one more")
        self.num_slots = num_slots
        self._free: deque[int] = deque(range(1, num_slots))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """A slot, or None when all are held."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._held.add(slot)
        return slot

    def free(self, slot: int) -> None:
        if slot not in self._held:
            raise BlockFault(f"double free of state slot {slot}")
        self._held.remove(slot)
        self._free.append(slot)
