"""Replays a trace over decode-rank choice rules, on virtual time, and measures the imbalance.

Source: kvcache-and-balancing.md, section 13, case T-DEC-2.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.lb.decode.policy import RankLoad, level_of, pick_rank
from services.lb.sim.trace import TraceRequest

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class DecodeSetup:
    """What is simulated. The defaults are those of T-DEC-2."""

    num_ranks: int = 64
    max_requests: int = 6_000
    residence_s: float = 20.0
    residence_per_token_s: float = 0.3
    first_sample: int = 1_005  # counted from 0
    sample_every: int = 5


@dataclass(frozen=True)
class Imbalance:
    """Means of max/mean over the ranks: 1.0 is perfect."""

    kv_tokens: float
    requests: float


# Index of the request, its length, tokens and requests per rank -> rank.
Rule = Callable[[int, int, list[int], list[int]], int]


def round_robin(index: int, length: int, tokens: list[int], requests: list[int]) -> int:
    """Picks rank i mod N."""
    return index % len(tokens)


def least_request(index: int, length: int, tokens: list[int], requests: list[int]) -> int:
    """Picks the rank with fewest requests, then the lowest id."""
    return min(range(len(tokens)), key=lambda r: (requests[r], r))


def least_token(index: int, length: int, tokens: list[int], requests: list[int]) -> int:
    """Picks the rank with fewest KV tokens, then the lowest id."""
    return min(range(len(tokens)), key=lambda r: (tokens[r], r))


def pelagos(index: int, length: int, tokens: list[int], requests: list[int]) -> int:
    """Picks by the rule of the balancer."""
    ranks = [
        RankLoad(f"{r:06}", tokens[r], requests[r], _UNLIMITED, _UNLIMITED)
        for r in range(len(tokens))
    ]
    picked = pick_rank(ranks, length, level_of([length], ranks))
    assert picked is not None, "memory is unlimited here"
    return int(picked.rank_id)


RULES: dict[str, Rule] = {
    "round-robin": round_robin,
    "least-request": least_request,
    "least-token": least_token,
    "pelagos": pelagos,
}


def imbalance(trace: Sequence[TraceRequest], setup: DecodeSetup, rule: Rule) -> Imbalance:
    """Returns how unevenly `rule` loads the ranks, sampled right after placements."""
    tokens = [0] * setup.num_ranks
    requests = [0] * setup.num_ranks
    departures: list[tuple[float, int, int]] = []
    ratios: list[tuple[float, float]] = []
    for index, request in enumerate(trace[: setup.max_requests]):
        while departures and departures[0][0] <= request.arrived_s:
            _, rank, length = heapq.heappop(departures)
            tokens[rank] -= length
            requests[rank] -= 1
        length = request.num_prompt_tokens + request.num_output_tokens
        rank = rule(index, length, tokens, requests)
        tokens[rank] += length
        requests[rank] += 1
        stay_s = setup.residence_s + setup.residence_per_token_s * request.num_output_tokens
        heapq.heappush(departures, (request.arrived_s + stay_s, rank, length))
        if index >= setup.first_sample and (index - setup.first_sample) % setup.sample_every == 0:
            ratios.append((_max_over_mean(tokens), _max_over_mean(requests)))
    if not ratios:
        raise ValueError(f"{len(trace)} requests give no sample; the first is {setup.first_sample}")
    return Imbalance(
        sum(r[0] for r in ratios) / len(ratios), sum(r[1] for r in ratios) / len(ratios)
    )


def _max_over_mean(values: Sequence[int]) -> float:
    return max(values) * len(values) / sum(values)
