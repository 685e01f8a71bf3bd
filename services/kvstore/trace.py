"""Replays a request trace against a cache of blocks: hit ratios by capacity and by time to live.

A trace is JSON lines with `timestamp` (ms), `input_length` (tokens) and `hash_ids` (one id per 512
tokens of the prompt, equal for equal prefixes). A hit is the leading run of ids still held; then
all ids of the request are touched from last to first, so that leaves are older than their parents,
and the oldest go until the capacity holds. Pure. Source: kvcache-and-balancing.md, section 21.3.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOKENS_PER_ID: Final = 512
_PLOT_COLUMNS: Final = 50


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    at_ms: int
    num_tokens: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class HitRatios:
    """What a cache of one capacity and time to live gave."""

    capacity: int | None  # blocks; None for no limit
    ttl_s: float | None  # since the last access; None for no limit
    num_blocks: int
    num_hit_blocks: int
    num_tokens: int
    num_hit_tokens: int

    @property
    def blocks(self) -> float:
        """Returns hit blocks over blocks asked for."""
        return self.num_hit_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def tokens(self) -> float:
        """Returns hit tokens over tokens asked for."""
        return self.num_hit_tokens / self.num_tokens if self.num_tokens else 0.0


def read_trace(path: Path) -> list[TraceRequest]:
    """Returns the requests of a trace file.

    Raises: OSError; ValueError for a bad line, or for a file without a request.
    """
    requests = []
    # Bytes that are no text are no request, and which line they are in is said as for any other.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            request = _request_of(line)
            if request is None:
                raise ValueError(f"{path.name}, line {number}: not a request")
            requests.append(request)
    if not requests:
        raise ValueError(f"{path.name} holds no request")
    return requests


def _request_of(line: str) -> TraceRequest | None:
    try:
        row = json.loads(line)
        at_ms, num_tokens, ids = int(row["timestamp"]), int(row["input_length"]), row["hash_ids"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    # An id becomes the tokens of a block, so it is one as well.
    is_list = isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 32 for i in ids)
    return TraceRequest(at_ms, num_tokens, tuple(ids)) if is_list and num_tokens >= 0 else None


def replay(
    requests: Iterable[TraceRequest], capacity: int | None = None, ttl_s: float | None = None
) -> HitRatios:
    """Returns the hit ratios of one replay."""
    held: OrderedDict[int, int] = OrderedDict()  # id -> time of last access, oldest first
    num_blocks = num_hit_blocks = num_tokens = num_hit_tokens = 0
    for request in requests:
        if ttl_s is not None:
            while held and request.at_ms - next(iter(held.values())) > ttl_s * 1000:
                held.popitem(last=False)
        hit = 0
        for block in request.ids:
            if block not in held:
                break
            hit += 1
        num_blocks += len(request.ids)
        num_hit_blocks += hit
        num_tokens += request.num_tokens
        num_hit_tokens += min(TOKENS_PER_ID * hit, request.num_tokens)
        for block in reversed(request.ids):
            held[block] = request.at_ms
            held.move_to_end(block)
        if capacity is not None:
            while len(held) > capacity:
                held.popitem(last=False)
    return HitRatios(capacity, ttl_s, num_blocks, num_hit_blocks, num_tokens, num_hit_tokens)


def curve(
    requests: Sequence[TraceRequest],
    capacities: Sequence[int | None],
    ttls_s: Sequence[float | None],
) -> list[HitRatios]:
    """Returns the ratios of every capacity without a time to live, then of every time to live
    without a capacity."""
    found = [replay(requests, capacity) for capacity in capacities]
    return found + [replay(requests, None, ttl_s) for ttl_s in ttls_s if ttl_s is not None]


def plot(points: Sequence[HitRatios]) -> str:
    """Returns a table with bars, one line per point."""
    lines = [f"{'capacity':>12} {'ttl':>9} {'blocks':>8} {'tokens':>8}"]
    for point in points:
        capacity = "unlimited" if point.capacity is None else f"{point.capacity:,}"
        ttl = "-" if point.ttl_s is None else f"{point.ttl_s:g} s"
        bar = "#" * round(point.blocks * _PLOT_COLUMNS)
        lines.append(f"{capacity:>12} {ttl:>9} {point.blocks:8.4f} {point.tokens:8.4f}  {bar}")
    return "\n".join(lines)
