"""One running sequence of a decode rank: plain state, no behaviour of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from pelagos.engine.v1 import records_pb2 as pb

from services.engine.grammar import Constraint
from services.engine.requests import RequestKey, Sampling, TokenOut, Tokens, Usage
from services.engine.stop import StopRules
from services.engine.streams import RequestStream


@dataclass(eq=False)
class Sequence:
    """What the loop knows of a request. `tokens` are committed, the last one is golden."""

    seq_id: int
    key: RequestKey
    spec: pb.RequestSpec
    tokens: Tokens
    sampling: Sampling
    rules: StopRules
    stream: RequestStream
    table: list[int]
    slot: int
    num_cached: int
    num_prompt: int  # of the original prompt
    usage: Usage
    deadline_s: float
    durable: bytes = b""  # one byte per prompt block: 1 when the store has it already
    approximate_from: int = 0
    said: list[TokenOut] = field(default_factory=list)  # output of this attempt
    step: int = 0  # number of the newest step it is part of
    row: int = -1  # its row in that step
    confidences: tuple[float, ...] = ()
    drafts: tuple[int, ...] = ()
    attached: int = 0  # newest boundary whose window is kept somewhere
    copy: int | None = None  # copy area that holds the confirmed window of `attached`
    tentative: tuple[int, int] | None = None  # (boundary, copy area) until N-1 confirms it
    num_persisted: int = 0
    constraint: Constraint | None = None
    in_reasoning: bool = False
    finished: bool = False  # leaves the running set at the next schedule
    paused: bool = False  # being exported: not scheduled
    span: Any = None
    has_emitted: bool = False  # this engine has said a token: its span has the event
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_output(self) -> int:
        """Output tokens over all attempts."""
        return len(self.tokens) - self.num_prompt

    @property
    def runnable(self) -> bool:
        return not (self.finished or self.paused or self.stream.is_full)
