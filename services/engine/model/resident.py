"""Decode steps that stay on the device: nothing of step N is asked for before N + 1 is given.

A step is three bodies of static shape, each captured once per size: the forward pass, verification
and drafting. Tokens, drafts, confidences and lengths go from step to step in the board's tables;
the host sends lanes (slots, tables, a row budget) and later reads one report, the only wait.

Sizes: rows are padded to a captured size, tables to a power of four of blocks, lanes of the draft
head to a captured number of requests; steps above the largest captured size run eagerly.
Source: engine.md, sections 2.2, 2.3, 3.3, 3.6 and 3.7.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.reference import draws
from kernels.reference.sampling import GREEDY_BELOW
from services.engine.layout import Geometry
from services.engine.model.backbone import Backbone
from services.engine.model.board import Board
from services.engine.model.cache import StatePool, pool_slots
from services.engine.model.device import Device, Graphs, Mark, Parcel, size_for, step_sizes
from services.engine.model.dspark import DraftHead
from services.engine.model.lanes import DeviceHash, LaneRows
from services.engine.model.numerics import ROW_TILE
from services.engine.model.sequence import DeviceSequence
from services.engine.model.worker import Turn, Worker
from services.engine.requests import MAX_TOP_LOGPROBS, TokenOut
from services.engine.runner import (
    DecodeBatch,
    DecodeOutput,
    DecodeResult,
    DecodeRow,
    Masks,
    StateFault,
)

_NARROWEST = 16  # blocks of the smallest table


@dataclass
class _Step:
    """A step between its launch and its result."""

    number: int
    live: list[tuple[DecodeRow, DeviceSequence]]
    faults: dict[int, StateFault]
    rows: int  # padded
    lanes: int  # padded, of the draft head
    kind: str
    says_logprobs: bool
    captured: bool
    launched: Future[None] | None = None
    sampled: Future[None] | None = None
    report: Parcel | None = None
    logprobs: tuple[Parcel, Parcel] | None = None
    marks: list[Mark] = field(default_factory=list)


class ResidentDecode:
    """Implements `DecodeSteps` without a wait inside a step.

    Args:
        max_seqs: most requests of a step.
        graph_rows: largest step that is captured; 0: all.
    """

    def __init__(
        self,
        device: Device,
        backbone: Backbone,
        head: DraftHead | None,
        worker: Worker,
        sequences: Mapping[int, DeviceSequence],
        geometry: Geometry,
        states: StatePool,
        *,
        coupled: bool,
        max_seqs: int = 64,
        graph_rows: int = 0,
    ) -> None:
        self._device = device
        self._backbone = backbone
        self._head = head
        self._worker = worker
        self._sequences = sequences
        self._geometry = geometry
        self._states = states
        self._coupled = coupled
        text = backbone.text
        self._text = text
        self._width = text.dspark_block_size
        history = text.engram_max_ngram_size - 1
        self.board = Board(device, max_seqs, history, self._width, states.capacity)
        multiple = ROW_TILE if backbone.numerics.invariant else 1
        self.sizes = step_sizes(max_seqs, self._width, multiple=multiple)
        self._lane_sizes = step_sizes(max_seqs, 0, multiple=multiple)
        self._graph_rows = graph_rows or self.sizes[-1]
        self.graphs: Graphs[None] = Graphs(device)
        self._hash = DeviceHash(backbone.hasher, device.torch)
        self._outbox = device.outbox()
        vocab = text.vocab_size
        self._logits = torch.zeros(self.sizes[-1], vocab, device=device.torch)
        self._said = torch.zeros(self.sizes[-1], 1 + MAX_TOP_LOGPROBS, device=device.torch)
        self._said_ids = torch.zeros(
            self.sizes[-1], MAX_TOP_LOGPROBS, dtype=torch.int64, device=device.torch
        )
        self._proposals: Tensor | None = None  # [capacity, G, V] once a request needs them
        self._steps: dict[int, _Step] = {}
        self.num_steps = 0

    def moved(self) -> None:
        """Follows pools that have grown: what was captured on their addresses is void."""
        self.board.reserve(self._states.capacity)
        if self._proposals is not None:
            grown = self._proposals.new_zeros(self.board.capacity, *self._proposals.shape[1:])
            grown[: len(self._proposals)] = self._proposals
            self._proposals = grown
        self.graphs.forget()

    # --- launch ---------------------------------------------------------------------------------

    def launch(self, batch: DecodeBatch) -> int:
        self.num_steps += 1
        number = self.num_steps
        live: list[tuple[DecodeRow, DeviceSequence]] = []
        faults: dict[int, StateFault] = {}
        joining = []
        for row in batch.rows:
            sequence = self._sequences.get(row.seq_id)
            if sequence is None:
                continue
            if row.remap < 0 or not sequence.on_device:
                fault = _stale(row, sequence)
                if fault is not None:
                    faults[row.seq_id] = fault
                    continue
                joining.append(sequence)
            live.append((row, sequence))
        if len(live) > self.board.max_seqs:
            raise ValueError(f"{len(live)} requests in a step of {self.board.max_seqs} lanes")
        budget = min(max(batch.budget, len(live)), len(live) * (1 + self._width))
        rows = size_for(self.sizes, budget)
        lanes = size_for(self._lane_sizes, len(live))
        assert rows is not None, "the largest size holds every lane's rows"
        assert lanes is not None
        widest = max((len(row.block_table) for row, _ in live), default=1)
        params = [sequence.start.sampling for _, sequence in live]
        step = _Step(
            number,
            live,
            faults,
            rows,
            lanes,
            _kind([p.temperature for p in params], [(p.top_p, p.top_k) for p in params]),
            any(p.logprobs for p in params),
            rows <= self._graph_rows,
        )
        self._steps[number] = step
        if live:
            width = table_width(widest)
            step.launched = self._worker.run(
                lambda: self._forward(step, joining, width, budget), Turn.PASS
            )
        for _, sequence in live:
            sequence.on_device = True
        return number

    def _forward(
        self, step: _Step, joining: Sequence[DeviceSequence], width: int, budget: int
    ) -> None:
        if joining:
            self.board.join(joining)
        if not self._coupled and step.kind != "greedy" and self._proposals is None:
            shape = (self.board.capacity, self._width, self._text.vocab_size)
            self._proposals = torch.zeros(shape, device=self._device.torch)
        self.board.send(
            np.array([sequence.slot for _, sequence in step.live], np.int64),
            np.array([row.max_rows for row, _ in step.live], np.int64),
            np.array([row.remap >= 0 for row, _ in step.live], np.int64),
            [row.block_table for row, _ in step.live],
            width,
            budget,
            step.number,
        )
        step.marks.append(self._device.mark())
        key = ("forward", step.rows, width) if step.captured else None
        self.graphs.run(key, lambda: self._forward_body(step.rows, width))
        step.marks.append(self._device.mark())

    def _forward_body(self, num_rows: int, width: int) -> None:
        """Splits the budget, lays the rows out, runs them; leaves their logits."""
        board, backbone = self.board, self._backbone
        ints, floats = board.state()
        usable, live = board.usable(ints), board.live
        confidences = floats[:, 2:].double().nan_to_num(nan=0.0).clamp(0, 1)
        survivals = confidences.cumprod(1) * usable[:, None]
        wanted = draws.split_rows(survivals[:-1], live[:-1], board.budget)
        most = torch.where(usable[:-1], 1 + self._width, 1).minimum(board.max_rows[:-1])
        wanted = torch.where(live[:-1], wanted.minimum(most).clamp(min=1), 0)
        board.num_rows[:-1].copy_(wanted)
        rows = self._rows(num_rows, width)
        memory = self._memory(rows)
        hidden = backbone.forward(rows, memory)
        assert hidden is not None
        if self._head is not None:
            self._head.feed(hidden)
        self._logits[:num_rows].copy_(backbone.logits(hidden.x))

    def _rows(self, num_rows: int, width: int) -> LaneRows:
        return LaneRows(
            self.board.lanes(width),
            num_rows,
            window=self._geometry.window,
            ring_slots=self._states.ring_slots,
            pool_slots=pool_slots(self._text),
            block_tokens=self._geometry.block_tokens,
        )

    def _memory(self, rows: LaneRows) -> dict[int, Tensor]:
        text = self._text
        if not text.engram_layer_ids:
            return {}
        found = self._hash.rows(rows.shifted_ids(text.engram_max_ngram_size))
        return {
            layer: self._backbone.engram_rows(layer, ids)
            for layer, ids in zip(text.engram_layer_ids, found, strict=True)
        }

    # --- sample ---------------------------------------------------------------------------------

    def sample(self, step: int, masks: Masks) -> None:
        running = self._steps[step]
        if running.live:
            running.sampled = self._worker.run(lambda: self._sample(running, masks), Turn.DRAFT)

    def _sample(self, step: _Step, masks: Masks) -> None:
        self._apply_masks(step, masks)
        how = (step.rows, step.kind, step.says_logprobs)
        captured = step.captured
        verify = ("verify", *how) if captured else None
        self.graphs.run(verify, lambda: self._verify_body(*how))
        if self._head is not None and self._geometry.max_draft:
            draft = ("draft", step.lanes, step.kind) if captured else None
            self.graphs.run(draft, lambda: self._draft_body(step.lanes, step.kind))
        step.report = self._outbox.post(self.board.report[: len(step.live)])
        if step.says_logprobs:
            step.logprobs = (
                self._outbox.post(self._said[: step.rows]),
                self._outbox.post(self._said_ids[: step.rows]),
            )
        step.marks.append(self._device.mark())

    def _apply_masks(self, step: _Step, masks: Masks) -> None:
        """Sends the masks there are, and which (lane, row of it) takes which."""
        words: list[np.ndarray] = []
        which = np.full((self.board.max_seqs + 1, self._width + 1), -1, np.int64)
        size = 4 * (-(-self._text.vocab_size // 32))
        for lane, (row, _) in enumerate(step.live):
            for at, mask in enumerate(list(masks.get(row.seq_id) or ())[: self._width + 1]):
                if mask is not None:
                    which[lane, at] = len(words)
                    words.append(np.frombuffer(mask[:size].ljust(size, b"\0"), np.int32))
        if not words:
            return
        held = np.stack(words)
        if not held.any(axis=1).all():
            raise ValueError("the mask allows no token")
        bits, chosen = self._device.upload(held), self._device.upload(which)
        req, within = self._places(step.rows)
        wanted = chosen[req, within.clamp(max=self._width)]
        draws.apply_bits(self._logits[: step.rows], bits, wanted)

    def _places(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Returns each row's lane and its place in it."""
        ends = self.board.num_rows.cumsum(0)
        rows = torch.arange(num_rows, device=ends.device)
        req = torch.searchsorted(ends[:-1], rows, right=True).clamp(max=len(ends) - 1)
        return req, rows - (ends - self.board.num_rows)[req]

    def _verify_body(self, num_rows: int, kind: str, says_logprobs: bool) -> None:
        """Judges the drafts, draws the next tokens, moves every lane on."""
        board, columns, logits = self.board, self.board.columns, self._logits[:num_rows]
        ints, floats = board.state()
        params, q = board.draws(), board.num_rows
        first = q.cumsum(0) - q
        drafts = ints[:, columns.golden + 1 :]
        req, within = self._places(num_rows)
        target = None
        if kind != "greedy":
            target = draws.target_logprobs(logits, params.take(req), kind)
        proposals = None
        if self._proposals is not None and kind != "greedy":
            # A greedy request's drafts are points, whatever lies in its slot.
            point = torch.full_like(self._proposals[:1], float("-inf"))
            point = point.expand(len(q), -1, -1).scatter(2, drafts[:, :, None], 0.0)
            held = self._proposals[board.slots]
            proposals = torch.where(params.greedy[:, None, None], point, held)
        base = ints[:, columns.cached]
        found = draws.verify_lanes(logits, target, first, q, drafts, base, params, proposals)
        board.report[:, 0].copy_(q)
        board.report[:, 1].copy_(found.accepted)
        board.report[:, 2 : 3 + self._width].copy_(found.tokens)
        if says_logprobs:
            self._say(
                logits, target, params.greedy[req], found.tokens[req, within.clamp(max=self._width)]
            )
        self._advance(ints, floats, found)

    def _advance(self, ints: Tensor, floats: Tensor, found: draws.Verified) -> None:
        """Writes each lane's new length, golden token and history; its drafts are void."""
        board, columns = self.board, self.board.columns
        history = columns.history
        known = torch.cat(
            (ints[:, columns.tokens : columns.golden + 1], found.tokens), 1
        )  # history, golden token, what was accepted and drawn
        newest = history + 1 + found.accepted[:, None]
        back = torch.arange(-history, 1, device=ints.device)
        ints = ints.clone()
        ints[:, columns.cached] += torch.where(board.live, found.accepted + 1, 0)
        ints[:, columns.last_step] = board.number
        ints[:, columns.tokens : columns.golden + 1] = known.gather(1, newest + back)
        board.ints.index_copy_(0, board.slots, ints)
        if self._head is None:
            board.floats.index_copy_(0, board.slots, floats)

    def _say(self, logits: Tensor, target: Tensor | None, greedy: Tensor, said: Tensor) -> None:
        """Leaves log-probabilities: of the token each row gave, and of the likeliest ones."""
        logprobs = logits.log_softmax(1)
        if target is not None:
            logprobs = torch.where(greedy[:, None], logprobs, target)
        count = min(MAX_TOP_LOGPROBS, logprobs.shape[1])
        best = logprobs.topk(count, 1)
        rows = len(said)
        self._said[:rows, 0].copy_(logprobs.gather(1, said[:, None])[:, 0])
        self._said[:rows, 1 : 1 + count].copy_(best.values)
        self._said_ids[:rows, :count].copy_(best.indices)

    def _draft_body(self, num_lanes: int, kind: str) -> None:
        """Drafts for the lanes, and leaves what the next step starts from."""
        assert self._head is not None
        board, columns = self.board, self.board.columns
        lanes = slice(0, min(num_lanes, board.max_seqs + 1))
        slots = board.slots[lanes]
        ints, floats = (table[slots] for table in (board.ints, board.floats))
        accepted = board.report[lanes, 1]
        tokens = board.report[lanes, 2 : 3 + self._width]
        offsets = torch.arange(self._width + 1, device=tokens.device)
        stops = ints[:, columns.stops : columns.tokens]
        hit = (tokens[:, :, None] == stops[:, None, :]).any(2) & (offsets <= accepted[:, None])
        params = draws.Draws(
            floats[:, 0], floats[:, 1], ints[:, columns.top_k], ints[:, columns.seed]
        )
        made = self._head.draft_lanes(
            ints[:, columns.golden],
            ints[:, columns.cached] - 1,
            slots,
            params,
            kind,
            coupled=self._coupled,
            stopped=hit.any(1),
        )
        ints[:, columns.golden + 1 :] = made.ids
        floats[:, 2:] = made.confidences
        board.ints.index_copy_(0, slots, ints)
        board.floats.index_copy_(0, slots, floats)
        at = 3 + self._width
        board.report[lanes, at : at + self._width].copy_(made.ids)
        bits = made.confidences.contiguous().view(torch.int32)
        board.report[lanes, at + self._width :].copy_(bits)
        if made.proposals is not None and self._proposals is not None:
            self._proposals.index_copy_(0, slots, made.proposals)

    # --- result ---------------------------------------------------------------------------------

    async def result(self, step: int) -> DecodeResult:
        running = self._steps.pop(step)
        if not running.live:
            return DecodeResult({}, running.faults)
        if running.sampled is None or running.launched is None:
            raise AssertionError(f"step {step} was launched and never sampled")
        await asyncio.wrap_future(running.launched)
        await asyncio.wrap_future(running.sampled)
        # The one wait of a step; on the worker, so that the event loop goes on.
        told = await asyncio.wrap_future(self._worker.wait(lambda: self._wait(running)))
        return self._told(running, *told)

    def _wait(self, step: _Step) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        assert step.report is not None
        report = step.report.wait()
        if step.logprobs is None:
            return report, None, None
        said, ids = step.logprobs
        return report, said.wait(), ids.wait()

    def _told(
        self, step: _Step, report: np.ndarray, said: np.ndarray | None, ids: np.ndarray | None
    ) -> DecodeResult:
        width, outputs, row_at = self._width, {}, 0
        drafts = report[:, 3 + width : 3 + 2 * width]
        bits = report[:, 3 + 2 * width :].astype(np.int32)
        confidences = np.ascontiguousarray(bits).view(np.float32)
        for lane, (row, sequence) in enumerate(step.live):
            num, accepted = int(report[lane, 0]), int(report[lane, 1])
            own = report[lane, 2 : 3 + accepted]
            tokens = tuple(
                _described(token, row_at + i, sequence, said, ids)
                for i, token in enumerate(own.tolist())
            )
            row_at += num
            sequence.append(own)
            sequence.num_cached += len(own)
            sequence.last_step = step.number
            has_drafts = self._head is not None and self._geometry.max_draft
            sequence.drafts = drafts[lane].copy() if has_drafts else np.zeros(0, np.int64)
            sequence.confidences = tuple(confidences[lane].tolist()) if has_drafts else ()
            outputs[row.seq_id] = DecodeOutput(
                tokens, num, sequence.confidences, tuple(sequence.drafts.tolist())
            )
        begun, forwarded, ended = step.marks
        elapsed = self._device.elapsed_ms
        return DecodeResult(outputs, step.faults, elapsed(begun, ended), elapsed(forwarded, ended))


def _stale(row: DecodeRow, sequence: DeviceSequence) -> StateFault | None:
    """Returns why a sequence cannot join as the host knows it."""
    base = sequence.num_cached
    if row.remap < 0 and row.num_cached != base:
        return StateFault(row.seq_id, f"CPU counts {row.num_cached} cached, device {base}")
    if base != sequence.num_ids - 1:
        return StateFault(row.seq_id, f"{base} cached of {sequence.num_ids} tokens")
    return None


def _described(
    token: int, row: int, sequence: DeviceSequence, said: np.ndarray | None, ids: np.ndarray | None
) -> TokenOut:
    sampling = sequence.start.sampling
    if not sampling.logprobs or said is None or ids is None:
        return TokenOut(token)
    count = min(sampling.top_logprobs, ids.shape[1])
    top = zip(ids[row, :count].tolist(), said[row, 1 : 1 + count].tolist(), strict=True)
    kept = tuple((at, value) for at, value in top if value > float("-inf"))
    return TokenOut(token, float(said[row, 0]), kept)


def _kind(temperatures: Sequence[float], limits: Sequence[tuple[float, int]]) -> str:
    """Returns the least of `draws.KINDS` that a batch needs."""
    drawn = [at for at, t in enumerate(temperatures) if t >= GREEDY_BELOW]
    if not drawn:
        return "greedy"
    return "full" if any(limits[at][0] < 1 or limits[at][1] >= 1 for at in drawn) else "plain"


def table_width(num_blocks: int) -> int:
    """Returns the width of tables that hold so many blocks: a power of four, from 16 up."""
    width = _NARROWEST
    while width < num_blocks:
        width *= 4
    return width
