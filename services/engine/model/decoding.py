"""Decode steps on the CPU: every step is packed from what the host knows of its sequences.

The worker's thread runs steps in order, so that a step finds what the one before it gave: tokens,
drafts and lengths are host values, and rows are exactly as many as there are. On a GPU that would
wait for the device twice per step; `resident.py` is the form without.
Source: engine.md, sections 2.2, 3.3 and 3.7; model.md, sections 15 and 16.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.reference.sampling import assign_verify_lengths
from services.engine.layout import Geometry
from services.engine.model.backbone import Backbone
from services.engine.model.dspark import DraftHead
from services.engine.model.rows import Int, Rows, Span
from services.engine.model.sampling import SampleParams, apply_masks, describe, verify
from services.engine.model.sequence import DeviceSequence
from services.engine.model.worker import Turn, Worker
from services.engine.requests import TokenOut
from services.engine.runner import (
    DecodeBatch,
    DecodeOutput,
    DecodeResult,
    DecodeRow,
    Masks,
    StateFault,
)


class DecodeSteps(Protocol):
    """How a runner decodes; `launch`, `sample` and `result` are those of `ModelRunner`."""

    @property
    def num_steps(self) -> int: ...
    def launch(self, batch: DecodeBatch) -> int: ...
    def sample(self, step: int, masks: Masks) -> None: ...
    async def result(self, step: int) -> DecodeResult: ...

    def moved(self) -> None:
        """Is told that pools have moved; no step runs."""
        ...


@dataclass
class _Step:
    """A decode step between its launch and its result."""

    batch: DecodeBatch
    sequences: list[DeviceSequence | None]
    forward: Future[None] | None = None
    sampled: Future[DecodeResult] | None = None
    live: list[tuple[DecodeRow, DeviceSequence, int]] | None = None  # with its number of rows
    rows: Rows | None = None
    logits: Tensor | None = None
    faults: dict[int, StateFault] | None = None
    forward_ms: float = 0.0


class EagerDecode:
    """Implements `DecodeSteps` over the sequences of a runner.

    pack: makes packed rows of spans; coupled: how drafts are accepted (model.md, section 16).
    """

    def __init__(
        self,
        backbone: Backbone,
        head: DraftHead | None,
        worker: Worker,
        sequences: Mapping[int, DeviceSequence],
        geometry: Geometry,
        pack: Callable[[list[Span]], Rows],
        *,
        coupled: bool,
    ) -> None:
        self._backbone = backbone
        self._head = head
        self._worker = worker
        self._sequences = sequences
        self._geometry = geometry
        self._pack = pack
        self._coupled = coupled
        self._text = backbone.text
        self._history = backbone.text.engram_max_ngram_size - 1
        self._steps: dict[int, _Step] = {}
        self.num_steps = 0

    def moved(self) -> None:
        """Keeps no address of a pool."""

    def launch(self, batch: DecodeBatch) -> int:
        self.num_steps += 1
        number = self.num_steps
        step = _Step(batch, [self._sequences.get(row.seq_id) for row in batch.rows])
        self._steps[number] = step
        step.forward = self._worker.run(lambda: self._forward(step, number), Turn.PASS)
        return number

    def sample(self, step: int, masks: Masks) -> None:
        running = self._steps[step]
        running.sampled = self._worker.run(lambda: self._sample(running, step, masks), Turn.DRAFT)

    async def result(self, step: int) -> DecodeResult:
        running = self._steps.pop(step)
        if running.sampled is None or running.forward is None:
            raise AssertionError(f"step {step} was launched and never sampled")
        await asyncio.wrap_future(running.forward)
        return await asyncio.wrap_future(running.sampled)

    def _forward(self, step: _Step, number: int) -> None:
        began = time.perf_counter()
        step.faults = {}
        known = [
            (row, sequence)
            for row, sequence in zip(step.batch.rows, step.sequences, strict=True)
            if sequence is not None
        ]
        lengths = self._lengths(step, number)
        step.live, spans = [], []
        for (row, sequence), wanted in zip(known, lengths, strict=True):
            base = sequence.num_cached
            if row.remap < 0 and row.num_cached != base:
                step.faults[row.seq_id] = StateFault(
                    row.seq_id, f"CPU counts {row.num_cached} cached, device {base}"
                )
                continue
            if base != sequence.num_ids - 1:
                step.faults[row.seq_id] = StateFault(
                    row.seq_id, f"{base} cached of {sequence.num_ids} tokens"
                )
                continue
            drafts = self._usable_drafts(row, sequence, number)
            num = max(1, min(wanted, row.max_rows, 1 + len(drafts)))
            ids = np.concatenate(([sequence.golden], drafts[: num - 1]))
            spans.append(
                Span(
                    slot=sequence.slot,
                    start=base,
                    ids=ids,
                    recent=sequence.recent(base, self._history),
                    table=row.block_table,
                )
            )
            step.live.append((row, sequence, num))
        if spans:
            step.rows = self._pack(spans)
            hidden = self._backbone.forward(step.rows)
            assert hidden is not None
            if self._head is not None:
                self._head.feed(hidden)
            step.logits = self._backbone.logits(hidden.x[: step.rows.num_real])
        step.forward_ms = 1e3 * (time.perf_counter() - began)

    def _usable_drafts(self, row: DecodeRow, sequence: DeviceSequence, number: int) -> Int:
        """Drafts of the step right before; a sequence that sat out starts without."""
        if row.remap < 0 or sequence.last_step != number - 1:
            return np.zeros(0, np.int64)
        return sequence.drafts

    def _lengths(self, step: _Step, number: int) -> list[int]:
        """Rows of every known sequence, by the survival of its drafts."""
        width = self._geometry.max_draft
        survivals = []
        for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
            if sequence is None:
                continue
            survival = np.zeros(width)
            if len(self._usable_drafts(row, sequence, number)):
                confidences = np.nan_to_num(np.array(sequence.confidences[:width]), nan=0.0)
                survival[: len(confidences)] = np.cumprod(confidences.clip(0, 1))
            survivals.append(survival)
        if not survivals:
            return []
        lengths: list[int] = assign_verify_lengths(np.stack(survivals), step.batch.budget).tolist()
        return lengths

    def _sample(self, step: _Step, number: int, masks: Masks) -> DecodeResult:
        began = time.perf_counter()
        faults = dict(step.faults or {})
        if not step.live:
            return DecodeResult({}, faults, step.forward_ms, 0.0)
        assert step.logits is not None
        logits = step.logits
        counts = np.array([num for _, _, num in step.live])
        per_row: list[bytes | None] = []
        for row, _, num in step.live:
            given = list(masks.get(row.seq_id) or ())[:num]
            per_row += given + [None] * (num - len(given))
        logits = apply_masks(logits, per_row)
        sequences = [sequence for _, sequence, _ in step.live]
        params = SampleParams.of([s.start.sampling for s in sequences])
        width = self._geometry.max_draft
        drafts = np.zeros((len(sequences), width), np.int64)
        for at, (_, sequence, num) in enumerate(step.live):
            drafts[at, : num - 1] = sequence.drafts[: num - 1]
        positions = np.array([s.num_cached for s in sequences])
        accepted, tokens = verify(
            logits,
            counts,
            drafts,
            self._proposals(step.live, params),
            params,
            positions,
            coupled=self._coupled,
        )
        outputs: dict[int, DecodeOutput] = {}
        stopped = np.zeros(len(sequences), bool)
        row_at = 0
        said: list[tuple[TokenOut, ...]] = []
        for at, (_, sequence, num) in enumerate(step.live):
            own = tokens[at, : accepted[at] + 1]
            said.append(
                tuple(
                    describe(logits[row_at + i], int(token), sequence.start.sampling)
                    for i, token in enumerate(own)
                )
            )
            row_at += num
            sequence.append(own)
            sequence.num_cached += len(own)
            sequence.last_step = number
            stops = sequence.start.sampling.stop_token_ids
            stopped[at] = any(int(token) in stops for token in own)
        self._draft(sequences, params, stopped)
        for at, (row, sequence, num) in enumerate(step.live):
            outputs[row.seq_id] = DecodeOutput(
                said[at], num, sequence.confidences, tuple(sequence.drafts.tolist())
            )
        step.logits = None
        sampler_ms = 1e3 * (time.perf_counter() - began)
        return DecodeResult(outputs, faults, step.forward_ms + sampler_ms, sampler_ms)

    def _proposals(
        self, live: list[tuple[DecodeRow, DeviceSequence, int]], params: SampleParams
    ) -> Tensor | None:
        if self._coupled or params.all_greedy:
            return None
        width = self._geometry.max_draft
        out = torch.full((len(live), width, self._text.vocab_size), float("-inf"))
        for at, (_, sequence, num) in enumerate(live):
            if num > 1 and sequence.proposals is not None:
                out[at] = sequence.proposals
            elif num > 1:
                out[at, np.arange(num - 1), sequence.drafts[: num - 1]] = 0.0
        return out

    def _draft(
        self, sequences: list[DeviceSequence], params: SampleParams, stopped: np.ndarray
    ) -> None:
        if self._head is None or self._geometry.max_draft == 0:
            return
        made = self._head.draft(
            np.array([s.golden for s in sequences]),
            np.array([s.num_cached - 1 for s in sequences]),
            np.array([s.slot for s in sequences]),
            params,
            coupled=self._coupled,
            stopped=stopped,
        )
        for at, sequence in enumerate(sequences):
            sequence.drafts = made.ids[at]
            sequence.confidences = tuple(made.confidences[at].tolist())
            sequence.proposals = None if made.proposals is None else made.proposals[at]
