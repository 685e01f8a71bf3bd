"""Which shards of a block are asked for, and when a read is over. Pure.

k + 1 shards are asked for at once and the first k good ones of one put win, so that one slow node
hides behind the others; the rest are asked when that did not do.
Source: kvcache-and-balancing.md, section 4, "Hedged read".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from services.kvstore.placement import Profile


def first_wave(
    candidates: Sequence[int], latency_s: Mapping[int, float], profile: Profile, seed: int
) -> tuple[list[int], list[int]]:
    """Returns (shards to ask at once, shards kept back).

    Args:
        candidates: shards that exist on nodes that are up.
        latency_s: what their nodes took lately.
        seed: makes the choice even over requests.
    """
    size = profile.k + 1
    if len(candidates) <= size:
        return list(candidates), []
    middle = median(latency_s.get(shard, 0.0) for shard in candidates)
    slowest = sorted(candidates, key=lambda shard: latency_s.get(shard, 0.0), reverse=True)
    num_left_out = len(candidates) - size
    left_out = [s for s in slowest if latency_s.get(s, 0.0) > 2 * middle][:num_left_out]
    others = [shard for shard in candidates if shard not in left_out]
    while len(left_out) < num_left_out:
        left_out.append(others.pop(seed % len(others)))
        seed //= 7
    return [shard for shard in candidates if shard not in left_out], left_out
