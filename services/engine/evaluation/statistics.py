"""How sure one can be of a share of right answers, and of the difference of two. Pure.

Both ways of running a model are given the same questions, so their answers are pairs: what counts
are the questions that one got right and the other did not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Z_95: Final = 1.959964


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def share(num_right: int, num_asked: int) -> Interval:
    """Returns the share of right answers with Wilson's score interval; of nothing, [0, 1]."""
    if num_asked == 0:
        return Interval(0.0, 0.0, 1.0)
    p, n, z2 = num_right / num_asked, num_asked, Z_95**2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Interval(p, max(0.0, middle - half), min(1.0, middle + half))


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> Interval:
    """Returns share(second) - share(first) of the same questions, with its interval.

    Newcombe's score interval for paired proportions (Statistics in Medicine 17, 1998, method 10):
    it stays inside [-1, 1] and has a width also when every pair agrees.
    Raises: ValueError when the two are not answers to the same questions.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} answers cannot be paired with {len(second)}")
    n = len(first)
    if n == 0:
        return Interval(0.0, -1.0, 1.0)
    both = sum(a and b for a, b in zip(first, second, strict=True))
    gained, lost = sum(second) - both, sum(first) - both
    neither = n - both - gained - lost
    one, two = share(both + lost, n), share(both + gained, n)
    phi = _correlation(both, gained, lost, neither)
    down = _joined(two.value - two.low, one.high - one.value, phi)
    up = _joined(two.high - two.value, one.value - one.low, phi)
    difference = two.value - one.value
    return Interval(difference, difference - down, difference + up)


def _correlation(both: int, gained: int, lost: int, neither: int) -> float:
    n = both + gained + lost + neither
    product = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    if product == 0:
        return 0.0
    excess: float = both * neither - gained * lost
    if excess > 0:  # corrected for continuity towards no correlation
        excess = max(excess - n / 2, 0)
    return excess / math.sqrt(product)


def _joined(one: float, two: float, phi: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * phi * one * two + two * two))
