"""Decides which engines serve which prompt lengths, and which engine gets the next prompt.

Layer 1 divides the engines among length buckets; layer 2 lets engines pull while they have quota
left; layer 3 spreads a group's work over its ranks. Layer 4, the chunk of a step, is
`services.common.cost_model.plan_chunks`.
Source: kvcache-and-balancing.md, section 12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

BUCKET_BOUNDS = (16 * 1024, 64 * 1024, 256 * 1024)


class Steal(StrEnum):
    """From which other queues an idle engine may take work when its own is empty."""

    ANY = "any"
    SHORTER = "shorter"
    OFF = "off"


@dataclass(frozen=True)
class Lane:
    """Neighbouring buckets [first, end) that are served by the same engines."""

    first: int
    end: int

    def __contains__(self, bucket: int) -> bool:
        return self.first <= bucket < self.end


@dataclass(frozen=True)
class Division:
    """Which lanes there are, and how many engines each should have."""

    lanes: tuple[Lane, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Puller:
    """An engine that asks for work."""

    engine_id: str
    remaining_ns: int
    is_idle: bool  # holds nothing at all


def bucket_of(num_tokens: int, bounds: Sequence[int] = BUCKET_BOUNDS) -> int:
    """Returns the bucket of a prompt of this total length; no bounds, one bucket for all."""
    return sum(num_tokens >= bound for bound in bounds)


def divide(
    num_engines: int, demand: Sequence[float], min_per_bucket: int = 1
) -> tuple[int, ...] | None:
    """Returns how many engines each bucket should have; None means keep (there is no demand).

    Largest shortfall first, ties to the shorter bucket. Callers merge buckets into lanes first when
    there are too few engines for `min_per_bucket` of each.
    Source: cases T-PRE-1a to T-PRE-1c.
    """
    total = sum(demand)
    if total <= 0:
        return None
    if num_engines < min_per_bucket * len(demand):
        raise ValueError(f"{num_engines} engines for {len(demand)} buckets; merge them first")
    shares = [num_engines * d / total for d in demand]
    counts = [max(min_per_bucket, int(share)) for share in shares]
    while sum(counts) < num_engines:
        index = max(range(len(counts)), key=lambda b: (shares[b] - counts[b], -b))
        counts[index] += 1
    while sum(counts) > num_engines:
        above = [b for b in range(len(counts)) if counts[b] > min_per_bucket]
        index = max(above, key=lambda b: (counts[b] - shares[b], -b))
        counts[index] -= 1
    return tuple(counts)


def divide_into_lanes(
    num_engines: int, demand: Sequence[float], min_per_bucket: int = 1
) -> Division | None:
    """Like `divide`, for any number of engines: merges neighbouring buckets where it must.

    While every bucket can have its minimum, each is a lane of its own. Below that, buckets without
    demand join their longer neighbour (an engine of their own would only wait), then the shortest
    lanes merge upward until the engines suffice.
    """
    if num_engines <= 0 or sum(demand) <= 0:
        return None
    lanes = [Lane(b, b + 1) for b in range(len(demand))]
    if num_engines < min_per_bucket * len(lanes):
        lanes = _merge_upward(lanes, demand, max(1, num_engines // max(1, min_per_bucket)))
    minimum = min(min_per_bucket, num_engines)
    targets = divide(num_engines, [sum(demand[lane.first : lane.end]) for lane in lanes], minimum)
    assert targets is not None
    return Division(tuple(lanes), targets)


def _merge_upward(lanes: list[Lane], demand: Sequence[float], max_lanes: int) -> list[Lane]:
    merged: list[Lane] = []
    first = 0
    for lane in lanes:
        if sum(demand[first : lane.end]) > 0:
            merged.append(Lane(first, lane.end))
            first = lane.end
    merged[-1] = Lane(merged[-1].first, lanes[-1].end)
    while len(merged) > max_lanes:
        merged[:2] = [Lane(merged[0].first, merged[1].end)]
    return merged


def plan_moves(
    lane_of: Mapping[str, int],
    targets: Sequence[int],
    idle: AbstractSet[str],
    max_moves: int = 2,
) -> list[tuple[str, int]]:
    """Returns at most `max_moves` pairs (engine, new lane) that bring the counts towards `targets`.

    From the lane most above its target to the one most below; idle engines first, then the lowest
    id. An engine that is named stays with what it holds: it only pulls elsewhere from now on.
    """
    lanes = dict(lane_of)
    moves: list[tuple[str, int]] = []
    while len(moves) < max_moves:
        counts = [0] * len(targets)
        for lane in lanes.values():
            counts[lane] += 1
        excess = [count - target for count, target in zip(counts, targets, strict=True)]
        source = max(range(len(excess)), key=lambda b: (excess[b], -b))
        goal = min(range(len(excess)), key=lambda b: (excess[b], b))
        if excess[source] <= 0 or excess[goal] >= 0:
            break
        engine = min(
            (engine for engine, lane in lanes.items() if lane == source),
            key=lambda engine: (engine not in idle, engine),
        )
        lanes[engine] = goal
        moves.append((engine, goal))
    return moves


def choose_puller(pullers: Sequence[Puller], cost_ns: int) -> Puller | None:
    """Returns the engine that gets a head of this cost: the one with most quota left.

    A head dearer than what is left goes only to an engine that holds nothing; until there is one,
    the head waits, and blocks what is behind it (the FIFO is kept). Ties: lowest id.
    Source: case T-PRE-2.
    """
    able = [p for p in pullers if p.is_idle or (p.remaining_ns > 0 and cost_ns <= p.remaining_ns)]
    return min(able, key=lambda p: (-p.remaining_ns, p.engine_id), default=None)


def steal_from(lane: int, queue_lengths: Sequence[int], steal: Steal) -> int | None:
    """Returns the lane that an idle engine of an empty lane takes from; None when there is none.

    `any` takes from the longest queue. `shorter` takes from the nearest shorter lane, whose prompts
    resemble its own most. Source: both are what T-PRE-5 measures.
    """
    waiting = [b for b, length in enumerate(queue_lengths) if length > 0 and b != lane]
    if steal is Steal.ANY:
        return max(waiting, key=lambda b: (queue_lengths[b], -b), default=None)
    if steal is Steal.SHORTER:
        return max((b for b in waiting if b < lane), default=None)
    return None


def pick_group_rank(outstanding_ns: Sequence[int]) -> int:
    """Returns the rank of a group with the least outstanding cost; ties: lowest. Case T-PRE-3."""
    return min(range(len(outstanding_ns)), key=lambda rank: (outstanding_ns[rank], rank))
