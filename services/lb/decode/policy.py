"""Decides which decode rank takes a request: balances request count and KV length together.

Source: kvcache-and-balancing.md, section 13; cases T-DEC-1 and T-DEC-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The published threshold: a rank below it counts as level in KV and is chosen by request count.
LEVEL_FACTOR = 1.05


@dataclass(frozen=True)
class RankLoad:
    """What one decode rank holds, the balancer's own placements in flight included."""

    rank_id: str
    num_kv_tokens: int
    num_requests: int
    num_free_tokens: int
    max_requests: int
    accepting: bool = True


@dataclass(frozen=True)
class Placement:
    """The rank that a request of the queue got."""

    index: int
    rank_id: str


def level_of(
    lengths: Sequence[int], ranks: Sequence[RankLoad], factor: float = LEVEL_FACTOR
) -> float:
    """Returns Z: the KV length up to which ranks count as level, for this batch of requests."""
    if not ranks:
        return 0.0
    # The longest prefix that fits the memory of all ranks, seen as one pool.
    pool = sum(rank.num_free_tokens for rank in ranks)
    total = 0
    for length in lengths:
        if total + length > pool:
            break
        total += length
    return factor * (total + sum(rank.num_kv_tokens for rank in ranks)) / len(ranks)


def pick_rank(ranks: Sequence[RankLoad], num_tokens: int, level: float) -> RankLoad | None:
    """Returns the rank for a request of this length; None when no rank has room."""
    fit = [
        rank
        for rank in ranks
        if rank.accepting
        and rank.num_free_tokens >= num_tokens
        and rank.num_requests < rank.max_requests
    ]
    low = [rank for rank in fit if rank.num_kv_tokens + num_tokens <= level]
    if low:  # stays level in KV: even out the batch, and fill ranks that are long already
        return min(low, key=lambda r: (r.num_requests, -r.num_kv_tokens, r.rank_id))
    return min(fit, key=lambda r: (r.num_kv_tokens, r.num_requests, r.rank_id), default=None)


def place(
    lengths: Sequence[int], ranks: Sequence[RankLoad], factor: float = LEVEL_FACTOR
) -> list[Placement]:
    """Returns where the leading requests of a FIFO go; it stops at the first that fits nowhere.

    Ranks that are draining or have no recent report must not be among `ranks`.
    """
    table = {rank.rank_id: rank for rank in ranks}
    level = level_of(lengths, ranks, factor)
    placements: list[Placement] = []
    pool = sum(rank.num_free_tokens for rank in ranks)
    for index, length in enumerate(lengths):
        pool -= length
        rank = pick_rank(list(table.values()), length, level) if pool >= 0 else None
        if rank is None:
            break
        table[rank.rank_id] = with_request(rank, length)
        placements.append(Placement(index, rank.rank_id))
    return placements


def with_request(rank: RankLoad, num_tokens: int) -> RankLoad:
    """Returns the rank with one more request of this length."""
    return RankLoad(
        rank.rank_id,
        rank.num_kv_tokens + num_tokens,
        rank.num_requests + 1,
        rank.num_free_tokens - num_tokens,
        rank.max_requests,
        rank.accepting,
    )
