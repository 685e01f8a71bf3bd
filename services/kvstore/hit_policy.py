"""How much of a stored prefix prefill may skip, and why not more.

The last `ring_tokens` of a prompt are always computed, so that the sliding windows of the layers
that keep one are whole. With no window state at the end of the hit, one block is given back and
replayed. Source: kvcache-and-balancing.md, section 10; cases T-HIT-1 to T-HIT-8 and T-SWA-POS.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

SwaLookup = Callable[[int], bool]


class EndedBy(enum.StrEnum):
    """What stopped a hit; shown to the owner of the request only."""

    CAP = "cap"  # the prompt is too short for more
    ABSENT = "absent"  # never stored, as far as known
    EVICTED = "evicted"  # tombstone or expired
    LAGGING = "lagging"  # the index is behind the store
    SWA_MISS = "swa_miss"  # one block given back for lack of a window state
    NAMESPACE = "namespace"  # no identity: uncacheable


@dataclass(frozen=True)
class Hit:
    """What prefill may skip, in tokens.

    `stored_tokens` (L1) blocks are fetched; computing starts at `hit_tokens`. With `replay` the
    tokens in [replay_from, stored_tokens) rebuild the windows only: their block KV stays as
    stored. `swa_position` is where the window state to start from is attached; None for none.
    """

    hit_tokens: int
    stored_tokens: int
    replay: bool
    replay_from: int
    swa_position: int | None
    ended_by: EndedBy


def usable_tokens(num_prompt_tokens: int, block_tokens: int, ring_tokens: int) -> int:
    """Returns the longest prefix, in whole blocks, that may be skipped; 0 for none."""
    cap = max(num_prompt_tokens - ring_tokens, 0)
    return cap // block_tokens * block_tokens


def decide(
    num_prompt_tokens: int,
    num_stored_tokens: int,
    has_swa_at: SwaLookup,
    *,
    block_tokens: int = 128,
    ring_tokens: int = 134,
    stored_ended_by: EndedBy = EndedBy.ABSENT,
) -> Hit:
    """Returns the hit of a prompt.

    Args:
        num_stored_tokens: stored prefix; more than the prompt is no error.
        has_swa_at: whether a window state is attached at a position.
        stored_ended_by: why the stored prefix is no longer.
    """
    usable = usable_tokens(num_prompt_tokens, block_tokens, ring_tokens)
    whole = num_stored_tokens // block_tokens * block_tokens
    stored = min(whole, usable)
    ended_by = EndedBy.CAP if whole >= usable else stored_ended_by
    if stored == 0:
        return Hit(0, 0, False, 0, None, ended_by)
    if has_swa_at(stored):
        return Hit(stored, stored, False, stored, stored, ended_by)
    shorter = stored - block_tokens
    if shorter and has_swa_at(shorter):
        # As long as a replay, but its windows are exact.
        return Hit(shorter, stored, False, shorter, shorter, EndedBy.SWA_MISS)
    return Hit(shorter, stored, True, shorter, None, EndedBy.SWA_MISS)


def swa_candidates(num_stored_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Returns the positions where `decide` may look for a window state, the best first."""
    positions = (num_stored_tokens, num_stored_tokens - block_tokens)
    return tuple(position for position in positions if position > 0)


def swa_store_position(num_tokens: int, block_tokens: int = 128) -> int | None:
    """Returns where the window state is attached after prefill of so many tokens, or None.

    One token is left out so that a next turn that ends elsewhere has a token to compute.
    """
    position = (num_tokens - 1) // block_tokens * block_tokens
    return position if position > 0 else None


def swa_kept_positions(
    num_prompt_tokens: int, num_tokens: int, keep_last: int, block_tokens: int = 128
) -> tuple[int, ...]:
    """Returns the boundaries crossed during decode whose copies are stored at the end.

    Args:
        keep_last: how many copies are kept (`swa_keep_last`); 1 as published.
    """
    first = num_prompt_tokens // block_tokens * block_tokens + block_tokens
    crossed = range(first, num_tokens // block_tokens * block_tokens + 1, block_tokens)
    return tuple(crossed[-keep_last:]) if keep_last > 0 else ()
