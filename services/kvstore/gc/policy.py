"""How much to evict, what a put of each class may still fill, what a pin holds up.

Source: kvcache-and-balancing.md, section 9; case T-GC-1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from services.kvstore.formats import TtlClass


@dataclass(frozen=True)
class Waterlines:
    """Shares of a node's slots in use."""

    low: float = 0.75  # eviction stops here
    high: float = 0.85  # eviction starts above
    reject: float = 0.92  # puts of class agent are refused from here
    emergency: float = 0.96  # all puts are refused, pins are ignored

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < self.reject < self.emergency <= 1:
            raise ValueError("waterlines: 0 < low < high < reject < emergency <= 1")


def num_to_evict(num_slots: int, num_used: int, num_expired: int, lines: Waterlines) -> int:
    """Returns how many blocks go: all expired ones; above `high` as many as lead to `low`."""
    if num_used <= lines.high * num_slots:
        return num_expired
    return max(num_expired, num_used - math.floor(lines.low * num_slots))


def admits_put(num_slots: int, num_used: int, ttl_class: int, lines: Waterlines) -> bool:
    """Returns whether a put of this class may take a slot."""
    if num_used >= lines.emergency * num_slots:
        return False
    return ttl_class != TtlClass.AGENT or num_used < lines.reject * num_slots


def choose(
    order: Sequence[tuple[bytes, bool]],
    count: int,
    pinned: Set[bytes],
    is_emergency: bool,
) -> list[bytes]:
    """Returns the keys to evict: the first `count` of `order`, without the pinned ones.

    A pinned block that is passed over is not made up for by a parent that came after it only to
    reach the count: its parents are pinned with it.
    """
    free = (key for key, _ in order if is_emergency or key not in pinned)
    return [key for key, _ in zip(free, range(count), strict=False)]


def relief_shares(bytes_by_group: Iterable[tuple[int, int]], wanted: int) -> dict[int, int]:
    """Returns how much each group gives: in proportion to its bytes, at least the sum wanted."""
    groups = dict(bytes_by_group)
    total = sum(groups.values())
    if not total:
        return {}
    return {group: -(-wanted * size // total) for group, size in groups.items() if size}
