"""The network behind the seam: one rank's device, stepped by its engine's loop.

Forward passes run in a thread of the runner's own, in the order they were started, so that the
event loop goes on meanwhile. What a sequence looks like after a step (its tokens, drafts, length)
lives here; the loop's own copy is a step behind.
Source: engine.md, sections 1.8, 1.9, 2.2 and 2.6; model.md, sections 9, 10, 15 and 16.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.reference.sampling import assign_verify_lengths
from services.engine.layout import KvLayout
from services.engine.model.cache import BlockPool, StatePool, pool_slots
from services.engine.model.network import Network
from services.engine.model.rows import Int, Rows, Span, pack
from services.engine.model.sampling import (
    SampleParams,
    apply_masks,
    describe,
    sample_first,
    verify,
)
from services.engine.model.sequence import DeviceSequence
from services.engine.requests import TokenOut
from services.engine.runner import (
    DecodeBatch,
    DecodeOutput,
    DecodeResult,
    DecodeRow,
    Masks,
    PrefillBatch,
    PrefillResult,
    PrefillRow,
    Start,
    StateFault,
)

_T = TypeVar("_T")


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


class TorchRunner:
    """Implements `ModelRunner` with a network.

    `verify_mode`: "coupled" makes output a function of (prompt, parameters, seed) alone;
    "rejection" accepts more drafts.
    """

    def __init__(
        self,
        network: Network,
        layout: KvLayout,
        num_blocks: int,
        *,
        ring_slots: int | None = None,
        truncation: str = "compact",
        verify_mode: str = "coupled",
        num_threads: int = 1,
    ) -> None:
        if verify_mode not in ("coupled", "rejection"):
            raise ValueError(f"verify_mode is coupled or rejection, not {verify_mode!r}")
        self.layout = layout
        self.network = network
        self._geometry = layout.geometry
        self._truncation = truncation
        self._coupled = verify_mode == "coupled"
        self._ring_slots = ring_slots or layout.geometry.ring
        config, numerics = network.config, network.numerics
        self._text = config.text
        self.pool = BlockPool(config, numerics, num_blocks, network.device)
        self.states = StatePool(config, numerics, self._ring_slots, network.device)
        self.backbone = network.backbone(self.pool, self.states, truncation)
        self.head = network.draft_head(self.backbone, self.states)
        self._sequences: dict[int, DeviceSequence] = {}
        self._steps: dict[int, _Step] = {}
        self._num_steps = 0
        self._lock = threading.Lock()  # held by a running pass; taken to grow the state pool
        self._worker = ThreadPoolExecutor(1, "model", torch.set_num_threads, (num_threads,))

    @property
    def num_sequences(self) -> int:
        """Returns how many sequences are open; a row of the census."""
        return len(self._sequences)

    def open(self, start: Start) -> None:
        if start.state_slot < 1:
            raise ValueError("state slot 0 is padding")
        if start.state_slot >= self.states.capacity:
            with self._lock:
                self.states.reserve(start.state_slot)
        self.states.clear(start.state_slot)
        self._sequences[start.seq_id] = DeviceSequence(start)

    def close(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)

    def shut_down(self) -> None:
        """Ends the thread; steps that were started are finished first."""
        self._worker.shutdown()

    def _run(self, work: Callable[[], _T]) -> Future[_T]:
        """Starts work on the runner's thread, after all that was started before."""

        def locked() -> _T:
            with self._lock, torch.inference_mode():
                return work()

        return self._worker.submit(locked)

    # --- prefill --------------------------------------------------------------------------------

    async def prefill(self, batch: PrefillBatch) -> PrefillResult:
        if not batch.rows:
            return PrefillResult()
        rows = [(row, self._sequences.get(row.seq_id)) for row in batch.rows]
        known = [(row, sequence) for row, sequence in rows if sequence is not None]
        return await asyncio.wrap_future(self._run(lambda: self._prefill(known)))

    def _prefill(self, given: list[tuple[PrefillRow, DeviceSequence]]) -> PrefillResult:
        began = time.perf_counter()
        faults: dict[int, StateFault] = {}
        rows, spans = [], []
        for row, sequence in given:
            try:
                spans.append(self._prefill_span(row, sequence))
                rows.append((row, sequence))
            except StateFault as fault:
                faults[row.seq_id] = fault
        first = self._prefill_pass(rows, spans) if spans else {}
        return PrefillResult(first, faults, 1e3 * (time.perf_counter() - began))

    def _prefill_span(self, row: PrefillRow, sequence: DeviceSequence) -> Span:
        if not sequence.started:
            sequence.started = True
            sequence.valid_start = row.valid_start
            sequence.num_cached = row.start
            sequence.decoder_from = row.start
            if self._truncation != "off":
                kept = sequence.start.num_computed - self._geometry.keep_tokens
                sequence.decoder_from = max(kept, row.start)
        elif sequence.num_cached != row.start:
            raise StateFault(row.seq_id, f"chunk at {row.start}, KV ends at {sequence.num_cached}")
        for position, data in row.embeddings:
            sequence.take_picture(position, data, self._text.hidden_size)
        end = row.start + row.num_tokens
        return Span(
            slot=sequence.slot,
            start=row.start,
            ids=sequence.ids(row.start, end),
            recent=sequence.recent(row.start, self._history),
            table=row.block_table,
            image=sequence.image(row.start, end),
            embeddings=sequence.pictures_in(row.start, end),
            valid_start=row.valid_start,
            keep_from=sequence.decoder_from,
            write_from=row.write_from,
        )

    def _prefill_pass(
        self, rows: list[tuple[PrefillRow, DeviceSequence]], spans: list[Span]
    ) -> dict[int, TokenOut]:
        packed = self._pack(spans, writes_first=False)
        hidden = self.backbone.forward(packed)
        if hidden is not None and self.head is not None:
            self.head.feed(hidden)
        for row, sequence in rows:
            sequence.num_cached = row.start + row.num_tokens
        lasts = [i for i, (row, _) in enumerate(rows) if row.last]
        if not lasts:
            return {}
        assert hidden is not None, "the last chunk has rows in the decoder half"
        ends = [first + len(s.ids) - 1 for first, s in zip(packed.first_rows, spans, strict=False)]
        places = np.array([ends[i] for i in lasts])
        if hidden.at is not None:
            real = hidden.at[: hidden.step.rows.num_real].cpu().numpy()
            places = np.searchsorted(real, places)
        logits = self.backbone.logits(hidden.x[torch.from_numpy(places)])
        logits = apply_masks(logits, [rows[i][0].mask for i in lasts])
        params = SampleParams.of([rows[i][1].start.sampling for i in lasts])
        positions = np.array([rows[i][1].num_cached for i in lasts])
        tokens = sample_first(logits, params, positions)
        first = {}
        for at, i in enumerate(lasts):
            row, sequence = rows[i]
            sequence.append(tokens[at : at + 1])
            first[row.seq_id] = describe(logits[at], int(tokens[at]), sequence.start.sampling)
        return first

    # --- decode ---------------------------------------------------------------------------------

    def launch(self, batch: DecodeBatch) -> int:
        self._num_steps += 1
        number = self._num_steps
        step = _Step(batch, [self._sequences.get(row.seq_id) for row in batch.rows])
        self._steps[number] = step
        step.forward = self._run(lambda: self._forward(step, number))
        return number

    def sample(self, step: int, masks: Masks) -> None:
        running = self._steps[step]
        running.sampled = self._run(lambda: self._sample(running, step, masks))

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
            step.rows = self._pack(spans, writes_first=True)
            hidden = self.backbone.forward(step.rows)
            assert hidden is not None
            if self.head is not None:
                self.head.feed(hidden)
            step.logits = self.backbone.logits(hidden.x[: step.rows.num_real])
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
        if self.head is None or self._geometry.max_draft == 0:
            return
        made = self.head.draft(
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

    def _pack(self, spans: list[Span], *, writes_first: bool) -> Rows:
        return pack(
            spans,
            window=self._geometry.window,
            ring_slots=self._ring_slots,
            pool_slots=pool_slots(self._text),
            writes_first=writes_first,
            pad=self.network.numerics.invariant,
            device=self.network.device,
        )

    @property
    def _history(self) -> int:
        return self._text.engram_max_ngram_size - 1

    # --- bytes in and out -----------------------------------------------------------------------

    def read_block(self, block: int) -> bytes:
        return self.pool.read(block)

    def write_block(self, block: int, data: bytes) -> None:
        self.pool.write(block, data)

    def read_state(self, seq_id: int) -> bytes:
        sequence = self._sequences[seq_id]
        num, text, states = sequence.num_cached, self._text, self.states
        parts = []
        for ring in range(len(states.rings)):
            low = sequence.valid_start if ring < text.n_encoder else sequence.decoder_from
            # Older positions may be overwritten by rejected drafts, and nobody reads them.
            low = max(low, num - self._geometry.window)
            parts.append(states.relaid(states.ring_bytes(ring, sequence.slot), low, num))
        cursor = np.array([num, sequence.valid_start, sequence.decoder_from, 0], np.uint32)
        return b"".join(parts) + states.pool_bytes(sequence.slot, num) + cursor.tobytes()

    def write_state(self, seq_id: int, data: bytes, num_cached: int) -> None:
        sequence, states = self._sequences[seq_id], self.states
        if len(data) != self.layout.state_bytes:
            raise StateFault(
                seq_id, f"a state has {self.layout.state_bytes} bytes, not {len(data)}"
            )
        num, valid_start, decoder_from = np.frombuffer(data[-16:], np.uint32)[:3].tolist()
        if num != num_cached:
            raise StateFault(seq_id, f"the state stands at {num}, the record at {num_cached}")
        sequence.num_cached, sequence.valid_start = num, valid_start
        sequence.decoder_from, sequence.started = decoder_from, True
        at = 0
        for ring in range(len(states.rings)):
            size = self.layout.regions[ring].length_bytes
            states.take_ring(ring, sequence.slot, data[at : at + size], num)
            at += size
        states.take_pools(sequence.slot, data[at:-16])

    def copy_state(self, seq_id: int, copy: int) -> None:
        sequence = self._sequences[seq_id]

        def take() -> None:
            rings = [
                self.states.ring_bytes(ring, sequence.slot) for ring in range(self._text.n_encoder)
            ]
            sequence.copies[copy] = (sequence.valid_start, rings)

        sequence.copying = self._run(take)

    def read_window(self, seq_id: int, boundary: int, copy: int | None) -> bytes:
        sequence, states = self._sequences[seq_id], self.states
        if copy is None:
            valid_start = sequence.valid_start
            rings = [states.ring_bytes(ring, sequence.slot) for ring in range(self._text.n_encoder)]
        else:
            if sequence.copying is not None:
                sequence.copying.result()
            if copy not in sequence.copies:
                raise StateFault(seq_id, f"copy area {copy} is empty")
            valid_start, rings = sequence.copies[copy]
        low = max(boundary - self._geometry.window, valid_start, 0)
        return b"".join(states.relaid(ring, low, boundary) for ring in rings)

    def write_window(self, seq_id: int, boundary: int, data: bytes) -> None:
        sequence = self._sequences[seq_id]
        if len(data) != self.layout.window_bytes:
            raise StateFault(seq_id, f"a window has {self.layout.window_bytes} bytes")
        size = self.layout.regions[0].length_bytes
        for ring in range(self._text.n_encoder):
            part = data[ring * size : (ring + 1) * size]
            self.states.take_ring(ring, sequence.slot, part, boundary)
        # The decoder's rings are never stored: they hold nothing yet.
        sequence.num_cached = sequence.decoder_from = boundary

    def verify(self, seq_id: int, num_cached: int, block_table: Sequence[int]) -> None:
        """Checks the count and that every value is a number: bytes of KV have no other pattern."""
        sequence = self._sequences[seq_id]
        if sequence.num_cached != num_cached:
            raise StateFault(seq_id, f"state at {sequence.num_cached}, expected {num_cached}")
        slots = slice(sequence.slot * self._ring_slots, (sequence.slot + 1) * self._ring_slots)
        for number, ring in enumerate(self.states.rings):
            if not bool(ring.format.decode(ring.data[slots]).isfinite().all()):
                raise StateFault(seq_id, f"window of layer {number} is no number")
        blocks = torch.tensor(block_table[: self._geometry.num_blocks(num_cached)])
        for layer, table in self.pool.main.items():
            per_block = self.pool.sources[layer].entries
            ratio = self.pool.sources[layer].ratio
            entries = torch.arange(num_cached // ratio)
            slots_ = blocks[entries // per_block] * per_block + entries % per_block
            if len(entries) and not bool(table.gather(slots_).isfinite().all()):
                raise StateFault(seq_id, f"entries of layer {layer} are no numbers")
