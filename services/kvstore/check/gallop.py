"""Finds how long a prefix is stored in at most three round trips, however long it is. Pure.

Prefix closure (a child is evicted before its parent) makes sparse probes tell nearly everything;
what they do not tell is asked in one batch, and what is accepted is confirmed whole while there is
time. Where closure does not hold, only time was lost: the answer ends at the first hole that was
looked at, and a fetch finds any other.
Source: kvcache-and-balancing.md, section 5; case T-MATCH.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence


def search(
    num_keys: int, hint: int = 0, has_time: Callable[[], bool] = lambda: True
) -> Generator[list[int], Sequence[bool], int]:
    """Yields positions to look up, is sent whether each is stored, returns how many leading are.

    Args:
        num_keys: how many keys are asked about; positions count from 0.
        hint: how many were stored when last seen; a good one makes the interval small.
        has_time: asked before the prefix that is accepted is looked up whole.
    """
    known: dict[int, bool] = {}
    probes = sorted({*_powers(num_keys), num_keys - 1, hint - 1, hint} & set(range(num_keys)))
    if not probes:
        return 0
    known |= zip(probes, (yield probes), strict=True)
    absent = min((at for at, there in known.items() if not there), default=num_keys)
    present = max((at for at, there in known.items() if there and at < absent), default=-1)
    between = [at for at in range(present + 1, absent) if at not in known]
    if between:
        known |= zip(between, (yield between), strict=True)
    count = _first_absent(known, present + 1, num_keys)
    unseen = [at for at in range(count) if at not in known]
    if unseen and has_time():
        known |= zip(unseen, (yield unseen), strict=True)
        count = _first_absent(known, 0, num_keys)
    return count


def _powers(num_keys: int) -> list[int]:
    """Returns 0, 1, 3, 7, ... below the number of keys: the last keys of 1, 2, 4, ... blocks."""
    return [(1 << power) - 1 for power in range(num_keys.bit_length())]


def _first_absent(known: dict[int, bool], start: int, num_keys: int) -> int:
    at = start
    while at < num_keys and known.get(at, False):
        at += 1
    return at
