"""Which sizes of a step are captured, and the captured ones.

A step is padded up to the next size; above the largest it runs eagerly.
Source: engine.md, section 3.6.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from services.engine.model.device.base import Device

T = TypeVar("T")


def step_sizes(
    max_seqs: int, max_draft: int, interval: int = 8, multiple: int = 1
) -> tuple[int, ...]:
    """Returns the sizes: powers of two below the interval, its multiples, the most rows there are.

    multiple: sizes are rounded up to it, for tiles of rows of a fixed height.
    """
    largest = max_seqs * (max_draft + 1)
    small = {2**i for i in range(interval.bit_length()) if 2**i < min(interval, largest)}
    sizes = small | set(range(interval, largest, interval)) | {largest}
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))


def size_for(sizes: tuple[int, ...], count: int) -> int | None:
    """Returns the smallest size that holds `count`, None above the largest."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


class Graphs(Generic[T]):
    """Captured bodies by key; captured at their first use, or ahead of it by `warm`.

    max_graphs: the ones used longest ago are let go, since each holds memory.
    """

    def __init__(self, device: Device, max_graphs: int = 512) -> None:
        self._device = device
        self._max = max_graphs
        self._held: OrderedDict[Hashable, Callable[[], T]] = OrderedDict()
        self.num_replays = 0
        self.num_eager = 0

    def __len__(self) -> int:
        return len(self._held)

    def run(self, key: Hashable | None, body: Callable[[], T]) -> T:
        """Runs a body; `key` stands for its shapes and branches, None for what is not captured."""
        if key is None:
            self.num_eager += 1
            return body()
        replay = self._held.get(key)
        if replay is None:
            replay = self._device.capture(body)
            self._held[key] = replay
            if len(self._held) > self._max:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        self.num_replays += 1
        return replay()

    def forget(self) -> None:
        """Lets all go: the tensors they were captured on have moved."""
        self._held.clear()
