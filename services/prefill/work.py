"""One request inside a prefill engine: plain state, from its arrival to its hand-off."""

from __future__ import annotations

import asyncio
import enum
import math
from dataclasses import dataclass, field
from typing import Any

from pelagos.engine.v1 import records_pb2 as pb

from services.engine.grammar import Constraint
from services.engine.requests import Image, RequestKey, Sampling, TokenOut, Tokens, Usage
from services.engine.streams import RequestStream
from services.prefill.scheduler import Resume, Span, Waiting


class Phase(enum.Enum):
    """RECEIVED -> WAIT_DEPS -> QUEUED -> RUNNING -> HANDOFF -> DONE (engine.md, 1.2)."""

    WAIT_DEPS = "wait_deps"
    QUEUED = "queued"
    RUNNING = "running"
    HANDOFF = "handoff"
    DONE = "done"


@dataclass(eq=False)
class Work:
    """What the engine knows of a request. `arrival` orders the FIFO."""

    seq_id: int
    arrival: int
    key: RequestKey
    spec: pb.RequestSpec
    tokens: Tokens
    sampling: Sampling
    images: tuple[Image, ...]
    stream: RequestStream
    rank: int
    arrived_s: float
    deadline_s: float = math.inf
    phase: Phase = Phase.WAIT_DEPS
    resume: Resume = field(default_factory=lambda: Resume(0, 0, 0, 0, None))
    blocks: list[bytes] = field(default_factory=list)  # stored payloads, in order
    approximate_from: int = 0
    window: bytes | None = None
    embeddings: dict[int, bytes] = field(default_factory=dict)
    table: list[int] = field(default_factory=list)
    slot: int | None = None
    position: int = 0  # next position to compute
    in_step: bool = False
    first: TokenOut | None = None
    constraint: Constraint | None = None
    usage: Usage = field(default_factory=Usage)
    task: asyncio.Task[Any] | None = None  # what it waits for outside the step loop
    reservation: asyncio.Task[Any] | None = None  # room on a decode rank, asked for early
    keeper: asyncio.Task[Any] | None = None  # renews the lease of that room
    num_picks: int = 0  # decode ranks asked for
    ended: bool = False
    committed: bool = False  # its prompt blocks reach the store
    engine_fault: bool = False
    span: Any = None

    @property
    def num_tokens(self) -> int:
        """Prompt tokens, output delivered by earlier attempts included."""
        return len(self.spec.prompt_tokens) // 4

    @property
    def num_resumed(self) -> int:
        return self.spec.num_resumed_tokens

    @property
    def resumed(self) -> list[int]:
        """Output of earlier attempts, at the end of this prompt."""
        return list(self.tokens.ids[self.num_tokens - self.num_resumed : self.num_tokens])

    def waiting(self) -> Waiting:
        """The request as the planner sees it."""
        holds = self.slot is not None
        needed = 0 if holds else self.tokens.geometry.num_blocks(self.num_tokens)
        return Waiting(
            key=str(self.seq_id),
            num_tokens=self.num_tokens,
            start=self.position,
            blocks_needed=needed,
            needs_slot=not holds,
            terminal=self.ended,
            images=tuple(Span(i.span.start, i.span.end) for i in self.images),
            cut_points=tuple(self.spec.cut_points),
        )
