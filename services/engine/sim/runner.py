"""The simulated device: real pools of pattern bytes, and steps that take their predicted time.

It implements `ModelRunner`. What a network would read it compares, byte for byte, with what must be
there: block KV below the chunk, both windows, everything that a transfer or a load delivered. A
difference is a `StateFault` of that sequence.
Source: engine.md, sections 2.2, 2.6 and 9.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.cost_model import CostModel
from services.engine.layout import KvLayout
from services.engine.requests import TokenOut, Tokens
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
from services.engine.sim.config import (
    COST,
    CURVE_MS,
    CURVE_ROWS,
    ENTRY_BYTES,
    NUM_SOURCE_LAYERS,
    SimConfig,
)
from services.engine.sim.pattern import DECODER, ENCODER, embedding, entries, entry
from services.engine.sim.split import split_rows
from services.engine.sim.tokens import Cursor, Scripts, Voice, restrict, voice_for

GARBAGE = b"\x5a" * ENTRY_BYTES  # what the row of a rejected draft leaves behind
_UNIT = float(1 << 64)


@dataclass
class _Guess:
    """A token the model would say ahead of time, and whether its draft turns out right."""

    token: TokenOut
    hit: bool
    confidence: float


@dataclass
class _Sequence:
    start: Start
    tokens: Tokens  # as far as the device has come; the loop's own copy is behind
    voice: Voice
    cursor: Cursor
    tip: Cursor
    num_cached: int
    valid_start: int = 0
    decoder_from: int = 0
    encoder: bytearray = field(default_factory=bytearray)
    decoder: bytearray = field(default_factory=bytearray)
    copies: list[tuple[int, bytes] | None] = field(default_factory=lambda: [None, None])
    future: list[_Guess] = field(default_factory=list)
    drafts: list[_Guess] = field(default_factory=list)
    last_step: int = 0
    checked_block: int = 0
    started: bool = False


@dataclass
class _Step:
    batch: DecodeBatch
    result: DecodeResult | None = None
    launched_s: float = 0.0
    done_s: float = 0.0


class SimRunner:
    """One rank's device. `ring_slots` is the layout's ring for decode, larger for prefill."""

    def __init__(
        self,
        layout: KvLayout,
        config: SimConfig,
        num_blocks: int,
        *,
        ring_slots: int | None = None,
        cost_model: CostModel = COST,
        scripts: Scripts | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.layout = layout
        self._config = config
        self._geometry = layout.geometry
        self._cost_model = cost_model
        self._clock = clock
        self._slots = ring_slots or layout.geometry.ring
        self._pool = bytearray(num_blocks * layout.block_bytes)
        self._scripts = scripts or Scripts(config.scripts)
        self._sequences: dict[int, _Sequence] = {}
        self._steps: dict[int, _Step] = {}
        self._num_steps = 0
        self._free_at_s = 0.0

    @property
    def num_sequences(self) -> int:
        """Returns how many sequences are open; a row of the census."""
        return len(self._sequences)

    @property
    def scripts(self) -> Scripts:
        """Returns where scripts are looked up; tests register theirs here."""
        return self._scripts

    def open(self, start: Start) -> None:
        known = start.tokens
        tokens = Tokens(
            self._geometry, array("I", known.ids), known.media, known.root, list(known.keys)
        )
        prompt, output = known.ids[: start.num_prompt], known.ids[start.num_prompt :]
        voice = voice_for(self._config, self._scripts, start.request_id, prompt, start.sampling)
        cursor = Cursor(self._config.ids, prompt, output)
        ring_bytes = self._slots * ENTRY_BYTES
        self._sequences[start.seq_id] = _Sequence(
            start,
            tokens,
            voice,
            cursor,
            cursor.copy(),
            num_cached=0,
            encoder=bytearray(ring_bytes),
            decoder=bytearray(ring_bytes),
        )

    def close(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)

    # --- prefill --------------------------------------------------------------------------------

    async def prefill(self, batch: PrefillBatch) -> PrefillResult:
        result = PrefillResult()
        predicted_ns = self._cost_model.step0_ns
        for row in batch.rows:
            predicted_ns += self._cost_model.cost(row.num_tokens, row.start)
            sequence = self._sequences.get(row.seq_id)
            if sequence is None:
                continue
            try:
                self._prefill_row(sequence, row)
            except StateFault as fault:
                result.faults[row.seq_id] = fault
                continue
            if row.last:
                result.first[row.seq_id] = self._say(sequence, row.mask)
        if not batch.rows:
            predicted_ns = 0.0
        await self._sleep_ms(predicted_ns / 1e6)
        return PrefillResult(result.first, result.faults, predicted_ns / 1e6)

    def _prefill_row(self, sequence: _Sequence, row: PrefillRow) -> None:
        total = sequence.start.num_computed
        if not sequence.started:
            sequence.started = True
            sequence.valid_start = row.valid_start
            keep_from = max(total - self._geometry.keep_tokens, row.start)
            sequence.decoder_from = keep_from
            sequence.num_cached = row.start
            self._check_blocks(sequence, row.write_from, row.block_table)
        elif sequence.num_cached != row.start:
            raise StateFault(row.seq_id, f"chunk at {row.start}, KV ends at {sequence.num_cached}")
        self._check_window(sequence, sequence.num_cached)
        self._check_images(sequence, row)
        end = row.start + row.num_tokens
        self._write_blocks(sequence, max(row.start, row.write_from), end, row.block_table)
        self._write_ring(sequence, ENCODER, row.start, end)
        self._write_ring(sequence, DECODER, max(row.start, sequence.decoder_from), end)
        sequence.num_cached = end

    def _check_images(self, sequence: _Sequence, row: PrefillRow) -> None:
        """Every image that begins in this chunk must have come with its own embedding."""
        given = dict(row.embeddings)
        for span in sequence.tokens.media:
            if row.start <= span.start < row.start + row.num_tokens:
                data = given.get(span.start, b"")
                hidden = len(data) // (2 * span.num_tokens)
                if not data or data != embedding(span.digest, span.num_tokens, hidden):
                    raise StateFault(row.seq_id, f"image at {span.start}: wrong embedding")

    def _say(self, sequence: _Sequence, mask: bytes | None) -> TokenOut:
        """The next token, taken as said: the device's history grows by it."""
        self._look_ahead(sequence, 1)
        guess = sequence.future.pop(0)
        token = guess.token
        if mask is not None:
            noise = sequence.cursor.noise(sequence.start.sampling.seed, 2)
            token = restrict(token, mask, noise, self._config.ids.closers)
        sequence.cursor.advance(token.token_id)
        if token.token_id != guess.token.token_id:
            sequence.future.clear()
            sequence.tip = sequence.cursor.copy()
        sequence.tokens.append([token.token_id])
        return token

    def _look_ahead(self, sequence: _Sequence, num: int) -> None:
        rate = self._config.accept_rate
        while len(sequence.future) < num:
            tip = sequence.tip
            token = sequence.voice.say(tip)
            noise = tip.noise(sequence.start.sampling.seed, 1)
            spread = (noise >> 64) / _UNIT - 0.5
            confidence = rate + rate * (1 - rate) * spread
            hit = (noise & ((1 << 64) - 1)) / _UNIT < confidence
            tip.advance(token.token_id)
            sequence.future.append(_Guess(token, hit, confidence))

    # --- decode ---------------------------------------------------------------------------------

    def launch(self, batch: DecodeBatch) -> int:
        self._num_steps += 1
        self._steps[self._num_steps] = _Step(batch, launched_s=self._clock.now_s())
        return self._num_steps

    def sample(self, step: int, masks: Masks) -> None:
        running = self._steps[step]
        confidences = [self._confidences(row, step) for row in running.batch.rows]
        split = split_rows(running.batch.budget, confidences, self._geometry.max_draft)
        outputs, faults, total = {}, {}, 0
        for row, num_rows in zip(running.batch.rows, split, strict=True):
            sequence = self._sequences.get(row.seq_id)
            if sequence is None:
                continue
            num_rows = max(1, min(num_rows, row.max_rows))
            total += num_rows
            try:
                outputs[row.seq_id] = self._decode_row(
                    sequence, row, num_rows, step, masks.get(row.seq_id)
                )
            except StateFault as fault:
                faults[row.seq_id] = fault
        step_ms = self._step_ms(total)
        running.result = DecodeResult(outputs, faults, step_ms)
        start_s = max(running.launched_s, self._free_at_s)
        running.done_s = self._free_at_s = start_s + step_ms / 1e3 * self._config.time_scale

    async def result(self, step: int) -> DecodeResult:
        running = self._steps.pop(step)
        if running.result is None:
            raise AssertionError(f"step {step} was launched and never sampled")
        wait_s = running.done_s - self._clock.now_s() if self._config.time_scale else 0.0
        if wait_s > 0:
            await self._clock.sleep(wait_s)
        else:
            await asyncio.sleep(0)
        return running.result

    def _confidences(self, row: DecodeRow, step: int) -> list[float]:
        sequence = self._sequences.get(row.seq_id)
        if sequence is None or row.remap < 0 or sequence.last_step != step - 1:
            return []
        return [guess.confidence for guess in sequence.drafts]

    def _decode_row(
        self,
        sequence: _Sequence,
        row: DecodeRow,
        num_rows: int,
        step: int,
        masks: Sequence[bytes | None] | None,
    ) -> DecodeOutput:
        base = sequence.num_cached
        if row.remap < 0 and row.num_cached != base:
            raise StateFault(row.seq_id, f"CPU counts {row.num_cached} cached, device {base}")
        if base != len(sequence.tokens) - 1:
            raise StateFault(row.seq_id, f"{base} cached of {len(sequence.tokens)} tokens")
        self._check_window(sequence, base)
        self._check_one_block(sequence, row.block_table)
        golden = sequence.tokens.ids[-1]
        fresh = row.remap < 0 or sequence.last_step != step - 1
        drafts = [] if fresh else sequence.drafts
        said: list[TokenOut] = []
        for index in range(num_rows):
            mask = masks[index] if masks is not None and index < len(masks) else None
            said.append(self._say(sequence, mask))
            draft = drafts[index] if index < len(drafts) else None
            if draft is None or not draft.hit or draft.token.token_id != said[-1].token_id:
                break
        # The rows' KV: golden, accepted drafts, and what rejected drafts leave behind.
        row_ids: list[int | None] = [golden, *(token.token_id for token in said[:-1])]
        row_ids += [None] * (num_rows - len(row_ids))
        for offset, token_id in enumerate(row_ids):
            self._write_position(sequence, base + offset, token_id, row.block_table)
        sequence.num_cached = base + len(said)
        sequence.last_step = step
        stops = sequence.start.sampling.stop_token_ids
        stopped = any(token.token_id in stops for token in said)
        self._look_ahead(sequence, self._geometry.max_draft)
        # A row that said a stop token has no confidence in what follows it (2.3).
        sequence.drafts = [
            _Guess(g.token, g.hit, 0.0 if stopped else g.confidence)
            for g in sequence.future[: self._geometry.max_draft]
        ]
        return DecodeOutput(
            tuple(said),
            num_rows,
            tuple(g.confidence for g in sequence.drafts),
            tuple(g.token.token_id if g.hit else (g.token.token_id + 1) for g in sequence.drafts),
        )

    def _step_ms(self, num_rows: int) -> float:
        for rows, base_ms in zip(CURVE_ROWS, CURVE_MS, strict=True):
            if num_rows <= rows:
                return base_ms
        return CURVE_MS[-1] * num_rows / CURVE_ROWS[-1]

    # --- bytes in and out -----------------------------------------------------------------------

    def read_block(self, block: int) -> bytes:
        size = self.layout.block_bytes
        return bytes(self._pool[block * size : (block + 1) * size])

    def write_block(self, block: int, data: bytes) -> None:
        size = self.layout.block_bytes
        if len(data) != size:
            raise ValueError(f"a block has {size} bytes, not {len(data)}")
        self._pool[block * size : (block + 1) * size] = data

    def read_state(self, seq_id: int) -> bytes:
        sequence = self._sequences[seq_id]
        num, ring = sequence.num_cached, self._geometry.ring
        encoder = self._relaid(sequence.encoder, max(sequence.valid_start, num - ring, 0), num)
        decoder = self._relaid(sequence.decoder, max(sequence.decoder_from, num - ring, 0), num)
        numbers = (num, sequence.valid_start, sequence.decoder_from, 0)
        residue = b"".join(n.to_bytes(4, "little") for n in numbers)
        return encoder + decoder + residue

    def write_state(self, seq_id: int, data: bytes, num_cached: int) -> None:
        sequence = self._sequences[seq_id]
        if len(data) != self.layout.state_bytes:
            raise StateFault(
                seq_id, f"a state has {self.layout.state_bytes} bytes, not {len(data)}"
            )
        ring_bytes = self._geometry.ring * ENTRY_BYTES
        residue = data[2 * ring_bytes :]
        num, valid_start, decoder_from = (
            int.from_bytes(residue[i : i + 4], "little") for i in (0, 4, 8)
        )
        if num != num_cached:
            raise StateFault(seq_id, f"the state stands at {num}, the record at {num_cached}")
        sequence.num_cached, sequence.valid_start = num, valid_start
        sequence.decoder_from, sequence.started = decoder_from, True
        self._take_ring(sequence.encoder, data[:ring_bytes], num)
        self._take_ring(sequence.decoder, data[ring_bytes : 2 * ring_bytes], num)

    def copy_state(self, seq_id: int, copy: int) -> None:
        sequence = self._sequences[seq_id]
        sequence.copies[copy] = (sequence.valid_start, bytes(sequence.encoder))

    def read_window(self, seq_id: int, boundary: int, copy: int | None) -> bytes:
        sequence = self._sequences[seq_id]
        valid_start, ring = sequence.valid_start, bytes(sequence.encoder)
        if copy is not None:
            held = sequence.copies[copy]
            if held is None:
                raise StateFault(seq_id, f"copy area {copy} is empty")
            valid_start, ring = held
        low = max(boundary - self._geometry.window, valid_start, 0)
        return self._relaid(ring, low, boundary)

    def write_window(self, seq_id: int, boundary: int, data: bytes) -> None:
        sequence = self._sequences[seq_id]
        if len(data) != self.layout.window_bytes:
            raise StateFault(seq_id, f"a window has {self.layout.window_bytes} bytes")
        self._take_ring(sequence.encoder, data, boundary)
        # The decoder's rings are never stored: they hold nothing yet.
        sequence.num_cached = sequence.decoder_from = boundary
        self._check_window(sequence, boundary)

    def verify(self, seq_id: int, num_cached: int, block_table: Sequence[int]) -> None:
        sequence = self._sequences[seq_id]
        if sequence.num_cached != num_cached:
            raise StateFault(seq_id, f"state at {sequence.num_cached}, expected {num_cached}")
        self._check_blocks(sequence, num_cached, block_table)
        self._check_window(sequence, num_cached)

    # --- pattern --------------------------------------------------------------------------------

    def _range(self, sequence: _Sequence, tag: int, low: int, high: int) -> bytes:
        """Expected entries of positions [low, high), in order."""
        size = self._geometry.block_tokens
        parts = []
        for block in range(low // size, -(-high // size)):
            at = block * size
            ids = sequence.tokens.block_ids(block)[: (high - at) * 4]
            full = entries(tag, sequence.tokens.parent(block), size, ids)
            parts.append(full[max(0, low - at) * ENTRY_BYTES :])
        return b"".join(parts)

    def _write_blocks(
        self, sequence: _Sequence, low: int, high: int, block_table: Sequence[int]
    ) -> None:
        size, block_bytes = self._geometry.block_tokens, self.layout.block_bytes
        for block in range(low // size, -(-high // size)):
            first, last = max(low, block * size), min(high, (block + 1) * size)
            at = (first - block * size) * ENTRY_BYTES
            for section in self.layout.sections:
                data = self._range(sequence, section.source_layer, first, last)
                offset = block_table[block] * block_bytes + section.offset_bytes + at
                self._pool[offset : offset + len(data)] = data

    def _write_ring(self, sequence: _Sequence, tag: int, low: int, high: int) -> None:
        low = max(low, high - self._slots)
        if low >= high:
            return
        ring = sequence.encoder if tag == ENCODER else sequence.decoder
        _scatter(ring, self._range(sequence, tag, low, high), low, self._slots)

    def _write_position(
        self, sequence: _Sequence, position: int, token_id: int | None, block_table: Sequence[int]
    ) -> None:
        """Writes one row's entries everywhere; None is a rejected draft's row."""
        size = self._geometry.block_tokens
        block, offset = divmod(position, size)
        if block >= len(block_table):
            raise StateFault(sequence.start.seq_id, f"position {position} has no block")
        # A rejected row may lie in a block whose parent is not complete yet.
        parent = b"" if token_id is None else sequence.tokens.parent(block)

        def bytes_of(tag: int) -> bytes:
            return GARBAGE if token_id is None else entry(tag, parent, size, offset, token_id)

        base = block_table[block] * self.layout.block_bytes + offset * ENTRY_BYTES
        for section in self.layout.sections[:NUM_SOURCE_LAYERS]:
            at = base + section.offset_bytes
            self._pool[at : at + ENTRY_BYTES] = bytes_of(section.source_layer)
        slot = position % self._slots * ENTRY_BYTES
        for tag, ring in ((ENCODER, sequence.encoder), (DECODER, sequence.decoder)):
            ring[slot : slot + ENTRY_BYTES] = bytes_of(tag)

    def _check_blocks(self, sequence: _Sequence, num: int, block_table: Sequence[int]) -> None:
        if self._config.check != "full":
            return
        for block in range(self._geometry.num_blocks(num)):
            self._check_block(sequence, block, num, block_table)

    def _check_one_block(self, sequence: _Sequence, block_table: Sequence[int]) -> None:
        """A decode step reads every block; the simulation checks one of them in turn."""
        if self._config.check == "off" or sequence.num_cached == 0:
            return
        num_blocks = self._geometry.num_blocks(sequence.num_cached)
        sequence.checked_block = (sequence.checked_block + 1) % num_blocks
        self._check_block(sequence, sequence.checked_block, sequence.num_cached, block_table)

    def _check_block(
        self, sequence: _Sequence, block: int, num: int, block_table: Sequence[int]
    ) -> None:
        size = self._geometry.block_tokens
        high = min(num, (block + 1) * size)
        base = block_table[block] * self.layout.block_bytes
        for section in self.layout.sections:
            expected = self._range(sequence, section.source_layer, block * size, high)
            at = base + section.offset_bytes
            if self._pool[at : at + len(expected)] != expected:
                raise StateFault(
                    sequence.start.seq_id,
                    f"block {block}, layer {section.source_layer}: foreign KV",
                )

    def _check_window(self, sequence: _Sequence, num: int) -> None:
        if self._config.check == "off":
            return
        window = self._geometry.window
        for tag, ring, valid in (
            (ENCODER, sequence.encoder, sequence.valid_start),
            (DECODER, sequence.decoder, sequence.decoder_from),
        ):
            low = max(num - window, valid, 0)
            if low < num and _gather(ring, low, num, self._slots) != self._range(
                sequence, tag, low, num
            ):
                raise StateFault(sequence.start.seq_id, f"window before {num}: foreign state")

    def _relaid(self, ring: bytes | bytearray, low: int, high: int) -> bytes:
        """Positions [low, high) of a ring, laid out in a ring of the layout's size."""
        out = bytearray(self._geometry.ring * ENTRY_BYTES)
        if low < high:
            _scatter(out, _gather(ring, low, high, self._slots), low, self._geometry.ring)
        return bytes(out)

    def _take_ring(self, ring: bytearray, data: bytes, high: int) -> None:
        """Lays a ring of the layout's size that ends at `high` out in our own."""
        size = self._geometry.ring
        low = max(0, high - size)
        _scatter(ring, _gather(data, low, high, size), low, self._slots)

    async def _sleep_ms(self, milliseconds: float) -> None:
        if self._config.time_scale and milliseconds:
            await self._clock.sleep(milliseconds / 1e3 * self._config.time_scale)
        else:
            await asyncio.sleep(0)


def _segments(low: int, high: int, slots: int) -> list[tuple[int, int, int]]:
    """(slot, first, last) pieces of [low, high), cut at the ring's wrap."""
    out = []
    while low < high:
        slot = low % slots
        last = min(high, low + slots - slot)
        out.append((slot, low, last))
        low = last
    return out


def _gather(ring: bytes | bytearray, low: int, high: int, slots: int) -> bytes:
    return b"".join(
        bytes(ring[slot * ENTRY_BYTES : (slot + last - first) * ENTRY_BYTES])
        for slot, first, last in _segments(low, high, slots)
    )


def _scatter(ring: bytearray, data: bytes, low: int, slots: int) -> None:
    at = 0
    for slot, first, last in _segments(low, low + len(data) // ENTRY_BYTES, slots):
        num = (last - first) * ENTRY_BYTES
        ring[slot * ENTRY_BYTES : slot * ENTRY_BYTES + num] = data[at : at + num]
        at += num
