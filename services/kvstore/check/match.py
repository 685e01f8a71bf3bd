"""One match: raw token bytes in, the hit out. Metadata only, a few microseconds per 1,000 tokens.

    keys of the chain -> leading blocks in the replica -> window state at the end -> the hit rule

Source: kvcache-and-balancing.md, sections 5 and 10.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.kvstore.check.replica import Replica
from services.kvstore.checksums import Buffer
from services.kvstore.hash_chain import (
    TOKEN_BYTES,
    Identity,
    MediaSpan,
    SessionChains,
    Uncacheable,
    block_extras,
    root_of,
)
from services.kvstore.hit_policy import EndedBy, Hit, decide, swa_candidates, usable_tokens
from services.kvstore.swa.directory import Location, SwaKey

# Asks the directory for window states; one answer per key, None for none.
SwaFinder = Callable[[Sequence[SwaKey]], Awaitable[Sequence[Location | None]]]
# Says how many leading keys of 32 bytes are stored, and why not more; given a first guess.
StoredFinder = Callable[[Buffer, int], Awaitable[tuple[int, EndedBy]]]


@dataclass(frozen=True)
class Prompt:
    """What a match needs to know of a request."""

    token_ids: bytes
    identity: Identity | None  # None: incomplete, uncacheable
    media: tuple[MediaSpan, ...] = ()
    session_id: str = ""
    block_tokens: int = 128
    ring_tokens: int = 134

    @property
    def num_tokens(self) -> int:
        """Returns the length of the prompt."""
        return len(self.token_ids) // TOKEN_BYTES


@dataclass(frozen=True)
class PromptMatch:
    """What is known of a prompt. `keys` are of all its complete blocks, stored or not."""

    hit: Hit
    keys: bytes = b""
    root: bytes = b""
    swa: Location | None = None
    num_looked_up: int = 0


class Matcher:
    """Matches prompts against one replica, or against whom `find_stored` asks instead."""

    def __init__(
        self,
        cluster_key: bytes,
        replica: Replica,
        sessions: SessionChains,
        find_stored: StoredFinder | None = None,
    ) -> None:
        self._cluster_key = cluster_key
        self._replica = replica
        self._sessions = sessions
        self._find_stored = find_stored

    async def match(
        self, prompt: Prompt, find_swa: SwaFinder, wall_s: int, is_lagging: bool
    ) -> PromptMatch:
        """Returns the match of a prompt; an incomplete identity is a hit of nothing."""
        try:
            if prompt.identity is None:
                raise Uncacheable("no identity")
            root = root_of(self._cluster_key, prompt.identity)
            block = prompt.block_tokens
            extras = block_extras(prompt.media, prompt.num_tokens, block)
            keys = self._sessions.keys(prompt.session_id, root, prompt.token_ids, block, extras)
        except Uncacheable:
            return PromptMatch(Hit(0, 0, False, 0, None, EndedBy.NAMESPACE))
        usable = usable_tokens(prompt.num_tokens, block, prompt.ring_tokens)
        # Blocks past the cap change nothing, but one of them tells "cap" from "absent".
        num_asked = min(usable // block, len(keys) // 32)
        asked = memoryview(keys)[: 32 * num_asked]
        if self._find_stored is not None:
            # A follow-up hits nearly all that may be hit: the best first guess.
            count, ended_by = await self._find_stored(asked, num_asked)
        else:
            count, ended_by = self._replica.num_stored(asked, wall_s, is_lagging)
        positions = swa_candidates(count * block, block)
        found: dict[int, Location] = {}
        if positions:
            wanted = [
                SwaKey(keys[32 * (p // block) - 32 :][:16], prompt.identity.layout)
                for p in positions
            ]
            for position, location in zip(positions, await find_swa(wanted), strict=True):
                if location is not None and location.position == position:
                    found[position] = location
        hit = decide(
            prompt.num_tokens,
            count * block,
            found.__contains__,
            block_tokens=block,
            ring_tokens=prompt.ring_tokens,
            stored_ended_by=ended_by,
        )
        swa = found.get(hit.swa_position) if hit.swa_position is not None else None
        return PromptMatch(hit, keys, root, swa, min(count + 1, num_asked))
