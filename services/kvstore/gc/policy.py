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


class ClockGuard:
    """Says whether the wall clock may be believed when something is let go for its age.

    A clock that jumps by days makes everything look expired. Against the monotonic clock a jump
    shows; what is beyond `max_jump_s` is believed only once it has lasted for `believed_after_s`,
    or the process starts anew. Steps below that, as of a clock that is being disciplined, are
    followed. Source: kvcache-and-balancing.md, section 18, clock jump; P-23.
    """

    def __init__(self, max_jump_s: float = 300.0, believed_after_s: float = 86_400.0) -> None:
        self._max_jump_s = max_jump_s
        self._believed_after_s = believed_after_s
        self._believed_s: float | None = None  # wall clock less monotonic clock
        self._jumped_to_s: float | None = None
        self._jumped_at_s = 0.0

    @property
    def is_holding(self) -> bool:
        """Returns whether the clock was not believed when it was last looked at."""
        return self._jumped_to_s is not None

    def believes(self, wall_s: float, now_s: float) -> bool:
        """Looks at both clocks; returns whether the wall clock may be gone by."""
        offset_s = wall_s - now_s
        if self._believed_s is None or abs(offset_s - self._believed_s) <= self._max_jump_s:
            self._believed_s, self._jumped_to_s = offset_s, None
            return True
        if self._jumped_to_s is None or abs(offset_s - self._jumped_to_s) > self._max_jump_s:
            self._jumped_to_s, self._jumped_at_s = offset_s, now_s
        if now_s - self._jumped_at_s < self._believed_after_s:
            return False
        self._believed_s, self._jumped_to_s = offset_s, None
        return True


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
