"""One bucket's queue: first in, first out per tenant, and fair between tenants.

Start-time fair queueing: a request's tag is the work its tenant had asked of this bucket before it,
or the tag in service if the tenant was away. One tenant alone sees a plain FIFO. What comes back
from a lost engine goes before everything else.
Source: reliability-and-security.md, P-13; kvcache-and-balancing.md, section 18.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

# Counting is linear; further back, nobody cares for the exact place.
_MAX_COUNTED = 256


class Place(NamedTuple):
    """Where a request stands. Kept while it is away, so that it comes back to the same place."""

    is_new: bool  # False sorts first: requests that come back from a lost engine
    negative_priority: int
    tag: float
    arrival: int


class FairQueue:
    """Keys in the order they are handed out. Costs are in ns."""

    def __init__(self, fair: bool = True) -> None:
        self._fair = fair
        self._heap: list[tuple[Place, str]] = []
        self._costs: dict[str, tuple[Place, int]] = {}
        self._finish_tags: dict[str, float] = {}
        self._virtual = 0.0
        self.waiting_ns = 0

    def __len__(self) -> int:
        return len(self._costs)

    def place_for(self, tenant: str, cost_ns: int, priority: int, arrival: int) -> Place:
        """Returns the place of a request that arrives now, and charges its tenant."""
        tag = 0.0
        if self._fair:
            tag = max(self._virtual, self._finish_tags.get(tenant, 0.0))
            self._finish_tags[tenant] = tag + max(1, cost_ns)
        return Place(True, -priority, tag, arrival)

    def push(self, key: str, place: Place, cost_ns: int) -> None:
        """Adds a key at its place; one that is there already moves."""
        self.remove(key)
        self._costs[key] = (place, cost_ns)
        self.waiting_ns += cost_ns
        heapq.heappush(self._heap, (place, key))

    def head(self) -> str | None:
        """Returns the key that is next, without taking it."""
        while self._heap:
            place, key = self._heap[0]
            known = self._costs.get(key)
            if known is not None and known[0] == place:
                return key
            heapq.heappop(self._heap)
        return None

    def head_place(self) -> Place | None:
        """Returns the place of the key that is next."""
        return self._heap[0][0] if self.head() is not None else None

    def take(self, key: str) -> None:
        """Removes a key that is handed out; virtual time goes on to its tag."""
        place, _ = self._costs[key]
        self._virtual = max(self._virtual, place.tag)
        self.remove(key)
        if not self._costs:  # a new busy period: nobody is ahead; who comes back is before all
            self._virtual = max(self._virtual, *self._finish_tags.values(), 0.0)
            self._finish_tags.clear()

    def remove(self, key: str) -> None:
        """Removes a key, wherever it stands; unknown keys are ignored."""
        known = self._costs.pop(key, None)
        if known is not None:
            self.waiting_ns -= known[1]
            # Removed keys stay in the heap until they surface; bound what they may take.
            if len(self._heap) > 2 * len(self._costs) + 64:
                self._heap = [(p, k) for p, k in self._heap if self._is_current(k, p)]
                heapq.heapify(self._heap)

    def position(self, key: str) -> int:
        """Returns how many keys stand before this one; of a long queue, all others."""
        if len(self._costs) > _MAX_COUNTED:
            return len(self._costs) - 1
        place, _ = self._costs[key]
        return sum(other < place for other, _ in self._costs.values())

    def _is_current(self, key: str, place: Place) -> bool:
        known = self._costs.get(key)
        return known is not None and known[0] == place
