"""DSpark: how many draft rows a step verifies, and which.

The total is fixed before the previous step is known, from the step before it; the split uses the
newest confidences. That is what keeps sampling unbiased: whether draft j is verified depends only
on its own confidences 1..j, on other sequences and on older data (engine.md, 3.3).
Source: engine.md, sections 3.2 to 3.6.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


def clamp_confidences(confidences: Sequence[float]) -> tuple[list[float], int]:
    """Confidences forced into [0, 1], NaN to 0, and how many had to be."""
    clean = [0.0 if math.isnan(c) else min(1.0, max(0.0, c)) for c in confidences]
    bad = sum(1 for c, d in zip(confidences, clean, strict=True) if c != d)
    return clean, bad


def survival(confidences: Sequence[float]) -> list[float]:
    """Prefix products: the chance that drafts 1..j are all accepted."""
    product, out = 1.0, []
    for confidence in confidences:
        product *= confidence
        out.append(product)
    return out


@dataclass(frozen=True)
class Curve:
    """Step time by padded row count: sizes increasing, milliseconds (3.6)."""

    sizes: tuple[int, ...] = ()
    base_ms: tuple[float, ...] = ()
    slope_ms: float = 0.0
    sampler_ms: float = 0.0

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.base_ms) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("a curve has one time per size, sizes increasing")

    def padded(self, num_rows: int) -> int:
        """Smallest captured size that holds the rows; the rows themselves past the largest."""
        index = bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) else num_rows

    def at(self, num_rows: int) -> float | None:
        """Milliseconds of a step with so many rows; None past the largest size."""
        index = bisect_left(self.sizes, num_rows)
        if index == len(self.sizes):
            return None
        return self.base_ms[index] + self.slope_ms * self.sizes[index] + self.sampler_ms


class StepTimes:
    """What steps really took, and the curve that follows (3.6).

    A size that was seen often enough has the median of its last times; one that was not has the
    first guess, scaled as the nearest size that was seen. Times never fall with more rows.
    """

    def __init__(self, guess: Curve, kept: int = 9, needed: int = 5) -> None:
        self._guess = guess
        self._needed = needed
        self._times = {size: deque[float](maxlen=kept) for size in guess.sizes}

    def add(self, num_rows: int, measured_ms: float) -> None:
        """Takes one step's time; larger ones than the largest size are not on the curve."""
        times = self._times.get(self._guess.padded(num_rows))
        if times is not None and measured_ms > 0:
            times.append(measured_ms)

    def curve(self) -> Curve:
        """Returns the curve as far as it is known; the guess before anything is."""
        guess = self._guess
        seen = {
            at: median(self._times[size])
            for at, size in enumerate(guess.sizes)
            if len(self._times[size]) >= self._needed
        }
        if not seen:
            return guess
        base_ms: list[float] = []
        for at, guessed in enumerate(guess.base_ms):
            near = min(seen, key=lambda other: (abs(other - at), other))
            wanted = seen.get(at, guessed * seen[near] / guess.base_ms[near])
            base_ms.append(max([wanted, *base_ms[-1:]]))
        return Curve(guess.sizes, tuple(base_ms))


def curve_sizes(max_seqs: int, max_draft: int, interval: int = 8) -> tuple[int, ...]:
    """Row counts that are captured and timed (3.6)."""
    largest = max_seqs * (max_draft + 1)
    sizes = {size for size in (2**i for i in range(interval)) if size < min(interval, largest)}
    sizes |= set(range(interval, largest, interval))
    return tuple(sorted(sizes | {largest}))


def choose_budget(survivals: Sequence[Sequence[float]], curve: Curve, max_draft: int) -> int:
    """Total rows B of a step: where expected tokens per second peak; ties to the smaller B (3.2).

    `survivals` has one row per sequence, zeros where it has no drafts.
    """
    num = len(survivals)
    if num == 0:
        return 0
    if not curve.sizes:
        return num * (1 + max_draft)
    # Sorting by value alone is enough here: equal survivals add equally whichever comes first.
    ordered = sorted((s for row in survivals for s in row), reverse=True)
    best, best_rate, expected = num, -1.0, float(num)
    for extra in range(len(ordered) + 1):
        if extra:
            expected += ordered[extra - 1]
        time_ms = curve.at(num + extra)
        if time_ms is None:
            break
        rate = expected / time_ms
        if rate > best_rate:
            best, best_rate = num + extra, rate
    return best


def split_budget(budget: int, survivals: Sequence[Sequence[float]], max_draft: int) -> list[int]:
    """Rows of each sequence: 1 plus its drafts among the `budget - n` largest survivals (3.3).

    Equal survivals are ranked by the flat index i * G + j, the same rule as on the device.
    """
    num = len(survivals)
    extra = min(max(budget - num, 0), num * max_draft)
    flat = [
        (-(row[j] if j < len(row) else 0.0), i * max_draft + j)
        for i, row in enumerate(survivals)
        for j in range(max_draft)
    ]
    flat.sort()
    rows = [1] * num
    for _, index in flat[:extra]:
        rows[index // max_draft] += 1
    return rows


def runtime_sampler_ms(same_size: Sequence[float], all_sizes: Sequence[float]) -> float:
    """Median of the last nine sampler times for this batch size, else over all, else 0 (3.6)."""
    if len(same_size) >= 5:
        return median(same_size[-9:])
    return median(all_sizes[-9:]) if all_sizes else 0.0


def runtime_slope(samples: dict[int, Sequence[float]], curve: Curve) -> float:
    """Extra milliseconds per row: median over sizes of the median of (measured - base) / size.

    Only sizes with at least ten samples count; a negative slope is 0 (3.6).
    """
    base = dict(zip(curve.sizes, curve.base_ms, strict=True))
    slopes = [
        median((measured - base[size]) / size for measured in times)
        for size, times in samples.items()
        if size in base and len(times) >= 10
    ]
    return max(0.0, median(slopes)) if slopes else 0.0
