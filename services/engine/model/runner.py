"""The network behind the seam: one rank's device, stepped by its engine's loop.

Forward passes run in a thread of the runner's own, in the order they were started, so that the
event loop goes on meanwhile. What a sequence looks like after a step (its tokens, drafts, length)
lives here; the loop's own copy is a step behind.
Source: engine.md, sections 1.8, 1.9, 2.2 and 2.6; model.md, sections 9, 10, 15 and 16.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from services.engine.layout import KvLayout
from services.engine.model.cache import BlockPool, StatePool, pool_slots
from services.engine.model.decoding import DecodeSteps, EagerDecode
from services.engine.model.exchange import DistributedGroup
from services.engine.model.lockstep import GroupWorker, check_slots
from services.engine.model.network import Network
from services.engine.model.resident import ResidentDecode
from services.engine.model.rows import Rows, Span, pack
from services.engine.model.sampling import SampleParams, apply_masks, describe, sample_first
from services.engine.model.sequence import DeviceSequence
from services.engine.model.worker import Turn, Worker
from services.engine.requests import TokenOut
from services.engine.runner import (
    DecodeBatch,
    DecodeResult,
    Masks,
    PrefillBatch,
    PrefillResult,
    PrefillRow,
    Start,
    StateFault,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _in_order(method: Callable[Concatenate[TorchRunner, _P], _T]) -> Callable[..., _T]:
    """Puts what a method gives the device behind the steps it was given, and before the next."""

    @wraps(method)
    def ordered(self: TorchRunner, *args: _P.args, **options: _P.kwargs) -> _T:
        with self.network.device.computing():
            return method(self, *args, **options)

    return ordered


class TorchRunner:
    """Implements `ModelRunner` with a network.

    `verify_mode`: "coupled" makes output a function of (prompt, parameters, seed) alone;
    "rejection" accepts more drafts. `max_seqs`: most requests of a decode step; `graph_rows`:
    largest decode step that is captured, 0 for all; a CPU has no use for either.
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
        max_seqs: int = 64,
        graph_rows: int = 0,
    ) -> None:
        if verify_mode not in ("coupled", "rejection"):
            raise ValueError(f"verify_mode is coupled or rejection, not {verify_mode!r}")
        self.layout = layout
        self.network = network
        self._geometry = layout.geometry
        self._truncation = truncation
        self._ring_slots = ring_slots or layout.geometry.ring
        config, numerics = network.config, network.numerics
        self._text = config.text
        device = network.device.torch
        self.pool = BlockPool(config, numerics, num_blocks, device)
        # Captured steps hold addresses: pools are as large at once as the engine's slots can get.
        slots = int(1.2 * max_seqs) + 2 if network.device.is_resident else 16
        self.states = StatePool(config, numerics, self._ring_slots, device, slots)
        self.backbone = network.backbone(self.pool, self.states, truncation)
        self.head = network.draft_head(self.backbone, self.states)
        self._sequences: dict[int, DeviceSequence] = {}
        self._worker = worker_of(network, num_threads)
        self._decode = self._decode_steps(verify_mode == "coupled", max_seqs, graph_rows)

    def _decode_steps(self, coupled: bool, max_seqs: int, graph_rows: int) -> DecodeSteps:
        given = (self.backbone, self.head, self._worker, self._sequences, self._geometry)
        device = self.network.device
        if device.is_resident:
            return ResidentDecode(
                device,
                *given,
                self.states,
                coupled=coupled,
                max_seqs=max_seqs,
                graph_rows=graph_rows,
            )
        return EagerDecode(
            *given, lambda spans: self._pack(spans, writes_first=True), coupled=coupled
        )

    @property
    def num_sequences(self) -> int:
        """Returns how many sequences are open; a row of the census."""
        return len(self._sequences)

    def open(self, start: Start) -> None:
        if start.state_slot < 1:
            raise ValueError("state slot 0 is padding")
        if start.state_slot >= self.states.capacity:
            with self._worker.lock:
                self.states.reserve(start.state_slot)
                self._decode.moved()
        with self.network.device.computing():
            self.states.clear(start.state_slot)
        self._sequences[start.seq_id] = DeviceSequence(start)

    def close(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)

    def shut_down(self) -> None:
        """Ends the thread; steps that were started are finished first."""
        self._worker.shut_down()

    # --- prefill --------------------------------------------------------------------------------

    async def prefill(self, batch: PrefillBatch) -> PrefillResult:
        if not batch.rows:
            return PrefillResult()
        rows = [(row, self._sequences.get(row.seq_id)) for row in batch.rows]
        known = [(row, sequence) for row, sequence in rows if sequence is not None]
        return await asyncio.wrap_future(self._worker.run(lambda: self._prefill(known), Turn.PASS))

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

    @property
    def num_steps(self) -> int:
        """Returns the number of the decode step launched last."""
        return self._decode.num_steps

    def launch(self, batch: DecodeBatch) -> int:
        return self._decode.launch(batch)

    def sample(self, step: int, masks: Masks) -> None:
        self._decode.sample(step, masks)

    async def result(self, step: int) -> DecodeResult:
        return await self._decode.result(step)

    def _pack(self, spans: list[Span], *, writes_first: bool) -> Rows:
        return pack(
            spans,
            window=self._geometry.window,
            ring_slots=self._ring_slots,
            pool_slots=pool_slots(self._text),
            writes_first=writes_first,
            pad=self.network.numerics.invariant,
            device=self.network.device.torch,
        )

    @property
    def _history(self) -> int:
        return self._text.engram_max_ngram_size - 1

    # --- experts --------------------------------------------------------------------------------

    @property
    def expert_ranks(self) -> int:
        """Returns how many ranks share the experts."""
        return self.network.experts.placements[self._backbone_names[0]].num_ranks

    @property
    def leads_experts(self) -> bool:
        """Returns whether this rank plans for all of them."""
        group = self.network.experts
        return not isinstance(group, DistributedGroup) or group.rank == 0

    @property
    def expert_slots(self) -> tuple[tuple[int, ...], ...]:
        """Returns the expert in every slot, by layer of the backbone."""
        held = self.network.experts.placements
        return tuple(held[name].logical for name in self._backbone_names)

    async def expert_loads(self) -> np.ndarray:
        """Returns tokens per backbone layer and expert since the last call, over all ranks."""
        names, group, worker = self._backbone_names, self.network.experts, self._worker
        if isinstance(worker, GroupWorker):
            return await asyncio.wrap_future(worker.loads())
        return await asyncio.wrap_future(worker.run(lambda: group.take_loads(names)))

    async def place_experts(self, slots: Sequence[Sequence[int]]) -> None:
        """Changes the placement of the backbone's layers in place, between two steps.

        Raises: ValueError for a placement that lacks an expert; the old one stays in force.
        """
        group, worker, names = self.network.experts, self._worker, self._backbone_names
        old = [group.placements[name] for name in names]
        wanted = check_slots(slots, old)
        if isinstance(worker, GroupWorker):
            return await asyncio.wrap_future(worker.place(wanted))

        def move() -> None:
            for name, held, given in zip(names, old, wanted, strict=True):
                if given != held.logical:
                    group.move(name, replace(held, logical=given))

        await asyncio.wrap_future(worker.run(move))

    @property
    def _backbone_names(self) -> list[str]:
        return [layer.name for layer in self.network.model.layers]

    # --- bytes in and out -----------------------------------------------------------------------

    @_in_order
    def read_block(self, block: int) -> bytes:
        return self.pool.read(block)

    @_in_order
    def write_block(self, block: int, data: bytes) -> None:
        self.pool.write(block, data)

    @_in_order
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

    @_in_order
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
        sequence.on_device = False
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
            # On the device: a copy to the host would wait for the step before.
            rings = [
                self.states.ring_rows(ring, sequence.slot) for ring in range(self._text.n_encoder)
            ]
            sequence.copies[copy] = (sequence.valid_start, rings)

        sequence.copying = self._worker.run(take)

    @_in_order
    def read_window(self, seq_id: int, boundary: int, copy: int | None) -> bytes:
        sequence, states = self._sequences[seq_id], self.states
        if copy is None:
            valid_start = sequence.valid_start
            rings = [states.ring_rows(ring, sequence.slot) for ring in range(self._text.n_encoder)]
        else:
            if sequence.copying is not None:
                sequence.copying.result()
            if copy not in sequence.copies:
                raise StateFault(seq_id, f"copy area {copy} is empty")
            valid_start, rings = sequence.copies[copy]
        low = max(boundary - self._geometry.window, valid_start, 0)
        return b"".join(
            states.relaid(states.as_bytes(number, rows), low, boundary)
            for number, rows in enumerate(rings)
        )

    @_in_order
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

    @_in_order
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
            here = slots_.to(table.data.device)
            if len(entries) and not bool(table.gather(here).isfinite().all()):
                raise StateFault(seq_id, f"entries of layer {layer} are no numbers")


def worker_of(network: Network, num_threads: int) -> Worker:
    """Returns the thread of a rank: one that keeps step with others where experts are elsewhere."""
    if isinstance(network.experts, DistributedGroup):
        return GroupWorker(network.device, network.experts, num_threads)
    return Worker(network.device, num_threads)
