"""The rows of one step, packed: which positions of which sequences, and where they read and write.

A request's rows are consecutive positions. Everything that all layers share is worked out once
here. Source: model.md, sections 3, 9 and 10.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.model.numerics import ROW_TILE

Int = npt.NDArray[np.int64]
NO_TOKEN = -1  # before the sequence, or a position of an image, as n-grams see it


@dataclass(frozen=True)
class Span:
    """Positions [start, start + len(ids)) of one sequence.

    `recent`: the token ids before `start` that n-grams look at, NO_TOKEN where there is none.
    """

    slot: int
    start: int
    ids: Int
    recent: Int
    table: tuple[int, ...]
    image: npt.NDArray[np.bool_] | None = None
    embeddings: tuple[tuple[int, Tensor], ...] = ()  # by offset into the span
    valid_start: int = 0  # smallest position an encoder window sees
    keep_from: int = 0  # smallest position that runs through the decoder half
    write_from: int = 0  # Block KV below is stored already

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class WindowView:
    """Where each row's window lies: [n, W] into the source, and whether it is there."""

    at: Tensor
    present: Tensor


@dataclass
class Rows:
    """Packed rows. `num_real` of them count; the others pad to a tile in slot and block 0."""

    spans: tuple[Span, ...]
    num_real: int
    window: int
    ring_slots: int
    pool_slots: int
    writes_first: bool  # a decode step writes its few rows into the rings, then reads
    device: torch.device
    ids: Tensor = field(init=False)
    pos: Tensor = field(init=False)
    req: Tensor = field(init=False)
    slot: Tensor = field(init=False)
    tables: Tensor = field(init=False)
    starts: Tensor = field(init=False)
    first_rows: list[int] = field(init=False)
    image: Tensor | None = field(init=False)
    _np: dict[str, Int] = field(init=False)
    _tables: Int = field(init=False)

    def __post_init__(self) -> None:
        spans = self.spans
        counts = np.array([len(span.ids) for span in spans], np.int64)
        firsts = np.concatenate(([0], np.cumsum(counts)))
        starts = np.array([span.start for span in spans], np.int64)
        req = np.repeat(np.arange(len(spans)), counts)
        within = np.arange(firsts[-1]) - firsts[req]
        pos = starts[req] + within
        slots = np.array([span.slot for span in spans], np.int64)
        widest = max((len(span.table) for span in spans), default=1)
        tables = np.zeros((len(spans), max(1, widest)), np.int64)
        for i, span in enumerate(spans):
            tables[i, : len(span.table)] = span.table
        self._np = {
            "pos": pos,
            "req": req,
            "within": within,
            "starts": starts,
            "counts": counts,
            "slots": slots,
            "firsts": firsts,
        }
        self._tables = tables
        self.first_rows = firsts[:-1].tolist()
        ids = np.concatenate([span.ids for span in spans]) if spans else np.zeros(0, np.int64)
        self.ids = self._tensor(ids)
        self.pos, self.req = self._tensor(pos), self._tensor(req)
        self.slot, self.tables = self._tensor(slots[req]), self._tensor(tables)
        self.starts = self._tensor(starts)
        self.image = None
        if any(span.image is not None and span.image.any() for span in spans):
            flags = [np.zeros(len(s.ids), bool) if s.image is None else s.image for s in spans]
            self.image = torch.from_numpy(np.concatenate(flags)).to(self.device)

    def __len__(self) -> int:
        return int(self._np["firsts"][-1])

    @property
    def longest(self) -> int:
        """Returns the most positions that a row of the step can look back on, itself included."""
        return max((span.end for span in self.spans), default=0)

    @property
    def valid_starts(self) -> list[int]:
        return [span.valid_start for span in self.spans]

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def ring_writes(self) -> tuple[Tensor | None, Tensor]:
        """Returns (rows, slots) that enter the rings: the last of each sequence, one per slot."""
        return self._last(self.ring_slots)

    def pool_writes(self) -> tuple[Tensor | None, Tensor]:
        return self._last(self.pool_slots)

    def _last(self, size: int) -> tuple[Tensor | None, Tensor]:
        own = self._np
        slots = own["slots"][own["req"]] * size + own["pos"] % size
        if (own["counts"] <= size).all():
            return None, self._tensor(slots)
        rows = np.flatnonzero(own["within"] >= own["counts"][own["req"]] - size)
        return self._tensor(rows), self._tensor(slots[rows])

    def history_slots(self) -> Tensor:
        """Returns ring slots of the W - 1 positions before each span, [B, W - 1]."""
        own = self._np
        positions = own["starts"][:, None] + np.arange(1 - self.window, 0)
        slots = own["slots"][:, None] * self.ring_slots + np.maximum(positions, 0) % self.ring_slots
        return self._tensor(slots)

    def window_view(self, lows: Sequence[int]) -> WindowView:
        """Returns each row's window, oldest first; `lows`: smallest visible position per span.

        It points into the ring for steps that write first, else into [history of every span |
        rows of the step].
        """
        own = self._np
        req, pos = own["req"], own["pos"]
        wanted = pos[:, None] + np.arange(1 - self.window, 1)
        low = np.maximum(np.array(lows, np.int64), 0)[req] if len(req) else np.zeros(0, np.int64)
        present = wanted >= low[:, None]
        if self.writes_first:
            safe = np.maximum(wanted, 0)
            at = own["slots"][req][:, None] * self.ring_slots + safe % self.ring_slots
        else:
            past = self.window - 1
            starts = own["starts"][req][:, None]
            before = req[:, None] * past + (wanted - starts + past)
            inside = len(self.spans) * past + own["firsts"][req][:, None] + (wanted - starts)
            at = np.where(wanted < starts, before, inside)
        return WindowView(self._tensor(at), torch.from_numpy(present).to(self.device))

    def groups(self, ratio: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the rows that complete an entry: (rows, partner rows, partner slots, entries).

        A partner row of -1 lies in the pooling ring at its slot. For ratio 1 partners are unused.
        """
        own = self._np
        rows = np.flatnonzero((own["pos"] + 1) % ratio == 0)
        before = own["pos"][rows] - 1
        partner = np.where(own["within"][rows] > 0, rows - 1, -1)
        slots = own["slots"][own["req"][rows]] * self.pool_slots
        slots = slots + np.maximum(before, 0) % self.pool_slots
        entries = own["pos"][rows] // ratio
        return (
            self._tensor(rows),
            self._tensor(partner),
            self._tensor(slots),
            self._tensor(entries),
        )

    def entry_writes(self, ratio: int, per_block: int) -> tuple[Tensor | None, Tensor]:
        """Returns which of the completed entries are stored (None: all), and in which pool slots.

        An entry that is stored already is not written again, whatever replays its rows.
        """
        own = self._np
        rows = np.flatnonzero((own["pos"] + 1) % ratio == 0)
        lows = np.array([span.write_from for span in self.spans], np.int64)
        kept = np.flatnonzero(own["pos"][rows] >= lows[own["req"][rows]])
        rows = rows[kept]
        entries = own["pos"][rows] // ratio
        blocks = self._tables[own["req"][rows], entries // per_block]
        slots = self._tensor(blocks * per_block + entries % per_block)
        return self._tensor(kept), slots

    def entry_slots(self, req: Tensor | int, entries: Tensor, per_block: int) -> Tensor:
        """Returns pool slots of entries. req broadcasts against entries."""
        block = self.tables[req, entries // per_block]
        return block * per_block + entries % per_block

    def shifted_ids(self, order: int) -> Int:
        """Returns the id of every row and of the order - 1 tokens before it, [order, n] int64."""
        past = order - 1
        parts = []
        for span in self.spans:
            own = span.ids if span.image is None else np.where(span.image, NO_TOKEN, span.ids)
            parts.append(np.concatenate((span.recent[len(span.recent) - past :], own)))
        joined = np.concatenate(parts)
        at = np.arange(len(self)) + past * (self._np["req"] + 1)
        return np.stack([joined[at - back] for back in range(order)])

    def embeddings(self) -> list[tuple[int, Tensor]]:
        """Returns (first row, [k, D]) pieces that take the place of token embeddings."""
        return [
            (first + offset, piece)
            for first, span in zip(self.first_rows, self.spans, strict=True)
            for offset, piece in span.embeddings
        ]

    def kept(self, pad: bool) -> tuple[Rows, Tensor]:
        """Returns the rows of the decoder half as rows of their own, and where they were."""
        spans, places = [], []
        for first, span in zip(self.first_rows, self.spans[: self._num_spans], strict=False):
            start = max(span.start, span.keep_from)
            if start >= span.end:
                continue
            offset = start - span.start
            spans.append(
                replace(
                    span,
                    start=start,
                    ids=span.ids[offset:],
                    image=None if span.image is None else span.image[offset:],
                    embeddings=(),
                )
            )
            places.append(np.arange(first + offset, first + len(span.ids)))
        num = sum(map(len, places))
        if pad and num % ROW_TILE:
            # Padding rows are any rows: their own padding is as good as another.
            spans.append(padding(-num % ROW_TILE))
            places.append(np.zeros(-num % ROW_TILE, np.int64))
        rows = Rows(
            tuple(spans),
            num,
            self.window,
            self.ring_slots,
            self.pool_slots,
            self.writes_first,
            self.device,
        )
        return rows, self._tensor(np.concatenate(places) if places else np.zeros(0, np.int64))

    @property
    def _num_spans(self) -> int:
        """Spans that are not padding."""
        return len(self.spans) - (len(self) > self.num_real)


def padding(count: int) -> Span:
    """Returns rows that only fill a tile."""
    zeros = np.zeros(count, np.int64)
    return Span(0, 0, zeros, np.full(8, NO_TOKEN), (0,) * count)


def pack(
    spans: Sequence[Span],
    *,
    window: int,
    ring_slots: int,
    pool_slots: int,
    writes_first: bool,
    pad: bool,
    device: torch.device,
) -> Rows:
    """Returns the rows of some spans, filled up to whole tiles when `pad` asks for it."""
    num = sum(len(span.ids) for span in spans)
    all_spans = tuple(spans)
    if pad and num % ROW_TILE:
        all_spans = (*all_spans, padding(-num % ROW_TILE))
    return Rows(all_spans, num, window, ring_slots, pool_slots, writes_first, device)
