"""What a request waits for before it may run: its cache hit, its images, its grammar.

Nothing here fails a request for the sake of the cache: a load that is late, missing or foreign
only shortens the hit. Images and grammar do fail it, with their own reasons.
Source: engine.md, sections 1.2, 1.7, 1.8 and 6.3.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Protocol

from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.engine import records
from services.engine.grammar import Constraint
from services.engine.requests import Image, Sampling
from services.prefill.config import PrefillConfig
from services.prefill.scheduler import Resume, load_deadline_s, resume_point
from services.prefill.work import Work

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """A block that came from the store."""

    payload: bytes
    approximate: bool


class Peers(Protocol):
    """The services a prefill engine asks while a request waits."""

    @property
    def can_constrain(self) -> bool:
        """Whether a request with a grammar can be served at all."""
        ...

    async def fetch_blocks(
        self, spec: pb.RequestSpec, keys: list[bytes], into: list[Fetched]
    ) -> None:
        """Appends the leading blocks that are stored and verified, in order, as they come.

        Fewer than asked is a shorter hit; so is being cancelled.
        """

    async def fetch_window(self, block_key: bytes, location: pb.SwaLocation) -> bytes | None: ...

    async def encode(self, request_id: str, tenant: str, images: list[Image]) -> dict[int, bytes]:
        """Embeddings by first position. Raises: Failure, IMAGE_INVALID for a bad image."""

    async def constraint(
        self, grammar: pb.GrammarRef, sampling: Sampling, said: list[int]
    ) -> Constraint:
        """The constraint of a request, its output so far replayed. Raises: Failure."""


async def resolve(work: Work, peers: Peers, config: PrefillConfig) -> None:
    """Fills in hit, window and embeddings of a request. Raises: Failure."""
    async with asyncio.TaskGroup() as group:
        hit = group.create_task(_load_hit(work, peers, config))
        if work.spec.grammar.artifact_key:
            group.create_task(_load_grammar(work, peers, config))
        if work.images:
            claimed = claimed_resume(work)
            group.create_task(_encode(work, peers, config, claimed.start))
    work.resume = hit.result()
    # A shorter hit uncovers images that were thought to be cached.
    await _encode(work, peers, config, work.resume.start)


def claimed_resume(work: Work) -> Resume:
    """The resume point if everything that the match promised can be loaded."""
    hit = work.spec.hit
    if hit.stored_tokens == 0 or not records.stored_keys_agree(work.spec, work.tokens):
        return resume_point(work.num_tokens, 0, (), work.tokens.geometry)
    positions = {hit.swa.position} if hit.swa.address else set()
    return resume_point(work.num_tokens, hit.stored_tokens, positions, work.tokens.geometry)


async def _load_hit(work: Work, peers: Peers, config: PrefillConfig) -> Resume:
    claimed = claimed_resume(work)
    geometry = work.tokens.geometry
    num_blocks = claimed.write_from // geometry.block_tokens
    if num_blocks == 0:
        return claimed
    keys = [work.tokens.key(i) for i in range(num_blocks)]
    limit_s = load_deadline_s(
        claimed.write_from, config.load_base_s, config.load_per_1k_s, config.load_cap_s
    )
    fetched: list[Fetched] = []
    async with asyncio.TaskGroup() as group:
        window = group.create_task(_load_window(work, peers, claimed, limit_s))
        try:
            async with asyncio.timeout(limit_s):
                await peers.fetch_blocks(work.spec, keys, fetched)
        except TimeoutError:
            log.info("load too late", extra={"request_id": work.key.request_id})
        except Failure as failure:
            log.info(
                "load failed",
                extra={"request_id": work.key.request_id, "reason": failure.reason.value},
            )
    fetched = fetched[:num_blocks]
    stored = len(fetched) * geometry.block_tokens
    work.window = window.result()
    positions: set[int] = set()
    if work.window is not None and claimed.load_state_at is not None:
        positions.add(claimed.load_state_at)
    resume = resume_point(work.num_tokens, stored, positions, geometry)
    if resume.load_state_at is None:
        work.window = None
    used = resume.write_from // geometry.block_tokens
    work.blocks = [block.payload for block in fetched[:used]]
    marks = [i for i, block in enumerate(fetched[:used]) if block.approximate]
    if marks:
        # Rows computed on approximate blocks are approximate too, and so is all that follows.
        work.approximate_from = max(1, marks[0] * geometry.block_tokens)
    elif resume.replayed_inexact:
        work.approximate_from = resume.write_from
    if resume.write_from < claimed.write_from:
        log.info(
            "hit shortened",
            extra={
                "request_id": work.key.request_id,
                "promised": claimed.write_from,
                "loaded": resume.write_from,
            },
        )
    return resume


async def _load_window(work: Work, peers: Peers, claimed: Resume, limit_s: float) -> bytes | None:
    if claimed.load_state_at is None:
        return None
    block = claimed.load_state_at // work.tokens.geometry.block_tokens - 1
    try:
        async with asyncio.timeout(limit_s):
            return await peers.fetch_window(work.tokens.key(block), work.spec.hit.swa)
    except (TimeoutError, Failure):
        return None


async def _encode(work: Work, peers: Peers, config: PrefillConfig, start: int) -> None:
    """Encodes every image that is not wholly below the first computed position."""
    due = [
        image
        for image in work.images
        if image.span.end > start and image.span.start not in work.embeddings
    ]
    if not due:
        return
    try:
        async with asyncio.timeout(config.image_timeout_s):
            found = await peers.encode(work.key.request_id, work.spec.namespace.tenant, due)
    except TimeoutError:
        raise Failure(Reason.DEADLINE, "an image took too long to encode") from None
    work.embeddings.update(found)


async def _load_grammar(work: Work, peers: Peers, config: PrefillConfig) -> None:
    try:
        async with asyncio.timeout(config.grammar_timeout_s):
            work.constraint = await peers.constraint(work.spec.grammar, work.sampling, work.resumed)
    except TimeoutError:
        raise Failure(Reason.GRAMMAR_BUDGET, "the grammar was not ready in time") from None


def without_hit(resume: Resume) -> Resume:
    """The same request computed from its first token."""
    return replace(resume, hit=0, start=0, valid_start=0, write_from=0, load_state_at=None)
