"""Decides which decode rank takes a request: balances request count and KV length together.

Source: kvcache-and-balancing.md, section 13; cases T-DEC-1 and T-DEC-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The published threshold: a rank below it counts as level in KV and is chosen by request count.
LEVEL_FACTOR = 1.05


@dataclass(frozen=True, slots=True)
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
    pool = held = 0
    for rank in ranks:
        pool += rank.num_free_tokens
        held += rank.num_kv_tokens
    # The longest prefix that fits the memory of all ranks, seen as one pool.
    total = 0
    for length in lengths:
        if total + length > pool:
            break
        total += length
    return factor * (total + held) / len(ranks)


def pick_rank(ranks: Sequence[RankLoad], num_tokens: int, level: float) -> RankLoad | None:
    """Returns the rank for a request of this length; None when no rank has room.

    `ranks` come in the order of their ids: of equal ones the first is taken. One pass without
    intermediate lists or keys: with 128 ranks this is the cost of a decision.
    """
    low: RankLoad | None = None  # stays level in KV: fewest requests, then longest in KV
    other: RankLoad | None = None  # above the level: shortest in KV, then fewest requests
    for rank in ranks:
        if (
            rank.num_free_tokens < num_tokens
            or rank.num_requests >= rank.max_requests
            or not rank.accepting
        ):
            continue
        if rank.num_kv_tokens + num_tokens <= level:
            if (
                low is None
                or rank.num_requests < low.num_requests
                or (
                    rank.num_requests == low.num_requests and rank.num_kv_tokens > low.num_kv_tokens
                )
            ):
                low = rank
        elif low is None and (
            other is None
            or rank.num_kv_tokens < other.num_kv_tokens
            or (
                rank.num_kv_tokens == other.num_kv_tokens and rank.num_requests < other.num_requests
            )
        ):
            other = rank
    return low or other


def place(
    lengths: Sequence[int], ranks: Sequence[RankLoad], factor: float = LEVEL_FACTOR
) -> list[Placement]:
    """Returns where the leading requests of a FIFO go; it stops at the first that fits nowhere.

    `ranks` come in the order of their ids; those that are draining or have no recent report must
    not be among them.
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
