"""What decode steps keep on a device: every sequence by its state slot, and one step's lanes.

The host writes a sequence here when it joins and reads reports; in between the device carries it
from step to step, which is what lets a step start before the one before it is known.
Source: engine.md, sections 2.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.draws import Draws
from services.engine.model.device import Device, Inbox
from services.engine.model.lanes import Lanes
from services.engine.model.sequence import DeviceSequence

Int = npt.NDArray[np.int64]
MAX_STOPS = 8  # stop tokens that the device looks at; drafts after others are wasted, no more
_COUNT, _BUDGET, _NUMBER, _SCALARS = 0, 1, 2, 3


@dataclass(frozen=True)
class Columns:
    """Where a sequence's integers lie in its row."""

    history: int
    width: int  # drafts

    cached: int = 0
    last_step: int = 1
    top_k: int = 2
    seed: int = 3
    stops: int = 4

    @property
    def tokens(self) -> int:
        """History, golden token, drafts."""
        return self.stops + MAX_STOPS

    @property
    def golden(self) -> int:
        return self.tokens + self.history

    @property
    def num(self) -> int:
        return self.golden + 1 + self.width


class Board:
    """Tables by state slot, and the lanes of the step that runs.

    max_seqs: lanes of a step; one more stays empty for rows that pad.
    """

    def __init__(
        self, device: Device, max_seqs: int, history: int, width: int, capacity: int
    ) -> None:
        self._device = device
        self.max_seqs = max_seqs
        self.columns = Columns(history, width)
        self.capacity = 0
        self.ints = self.floats = torch.empty(0)
        self.reserve(capacity)
        self._lanes = device.inbox(_SCALARS + 3 * (max_seqs + 1), torch.int64)
        self._tables: dict[int, Inbox] = {}
        lanes = max_seqs + 1
        self.num_rows = torch.zeros(lanes, dtype=torch.int64, device=device.torch)
        # What a step says: rows, accepted, tokens, drafts, bits of the confidences.
        self.report = torch.zeros(
            lanes, 2 + (width + 1) + 2 * width, dtype=torch.int64, device=device.torch
        )

    def reserve(self, capacity: int) -> None:
        """Makes room for state slots. No step may run meanwhile; captured ones are void."""
        if capacity <= self.capacity:
            return
        where = self._device.torch
        ints = torch.zeros(capacity, self.columns.num, dtype=torch.int64, device=where)
        floats = torch.zeros(capacity, 2 + self.columns.width, device=where)
        if self.capacity:
            ints[: self.capacity] = self.ints
            floats[: self.capacity] = self.floats
        self.ints, self.floats, self.capacity = ints, floats, capacity

    # --- from the host --------------------------------------------------------------------------

    def join(self, sequences: Sequence[DeviceSequence]) -> None:
        """Writes what the host knows of sequences that did not run in the step before."""
        columns = self.columns
        ints = np.zeros((len(sequences), columns.num), np.int64)
        floats = np.zeros((len(sequences), self.floats.shape[1]), np.float32)
        for row, floats_row, sequence in zip(ints, floats, sequences, strict=True):
            sampling = sequence.start.sampling
            row[columns.cached] = sequence.num_cached
            row[columns.last_step] = -1
            row[columns.top_k] = sampling.top_k
            row[columns.seed] = np.uint64(sampling.seed & (2**64 - 1)).view(np.int64)
            stops = sorted(sampling.stop_token_ids)[:MAX_STOPS]
            row[columns.stops : columns.stops + MAX_STOPS] = -1
            row[columns.stops : columns.stops + len(stops)] = stops
            recent = sequence.recent(sequence.num_cached, columns.history)
            row[columns.tokens : columns.golden] = recent
            row[columns.golden] = sequence.golden
            floats_row[:2] = sampling.temperature, sampling.top_p
        slots = np.array([sequence.slot for sequence in sequences], np.int64)
        at = self._device.upload(slots)
        self.ints.index_copy_(0, at, self._device.upload(ints))
        self.floats.index_copy_(0, at, self._device.upload(floats))

    def send(
        self,
        slots: Int,
        max_rows: Int,
        continues: Int,
        tables: Sequence[Sequence[int]],
        width: int,
        budget: int,
        number: int,
    ) -> None:
        """Fills the lanes of a step. width: blocks per lane."""
        lanes = self.max_seqs + 1
        values = np.zeros(_SCALARS + 3 * lanes, np.int64)
        values[:_SCALARS] = len(slots), budget, number
        per_lane = values[_SCALARS:].reshape(3, lanes)
        for row, given in zip(per_lane, (slots, max_rows, continues), strict=True):
            row[: len(slots)] = given
        self._lanes.send(values)
        blocks = np.zeros((lanes, width), np.int32)
        for lane, table in enumerate(tables):
            blocks[lane, : len(table)] = table
        if width not in self._tables:
            self._tables[width] = self._device.inbox(lanes * width, torch.int32)
        self._tables[width].send(blocks.reshape(-1))

    # --- on the device --------------------------------------------------------------------------

    @property
    def slots(self) -> Tensor:
        return self._lane_values(0)

    @property
    def max_rows(self) -> Tensor:
        return self._lane_values(1)

    @property
    def live(self) -> Tensor:
        """Returns which lanes have a request."""
        at = torch.arange(self.max_seqs + 1, device=self._device.torch)
        return at < self._lanes.data[_COUNT]

    @property
    def budget(self) -> Tensor:
        return self._lanes.data[_BUDGET]

    @property
    def number(self) -> Tensor:
        return self._lanes.data[_NUMBER]

    def _lane_values(self, kind: int) -> Tensor:
        lanes = self.max_seqs + 1
        begin = _SCALARS + kind * lanes
        return self._lanes.data[begin : begin + lanes]

    def tables(self, width: int) -> Tensor:
        return self._tables[width].data.view(self.max_seqs + 1, width).long()

    def state(self) -> tuple[Tensor, Tensor]:
        """Returns the lanes' integers and floats."""
        return self.ints[self.slots], self.floats[self.slots]

    def usable(self, ints: Tensor) -> Tensor:
        """Returns which lanes have drafts: those whose last step was the one right before."""
        ran = ints[:, self.columns.last_step] == self.number - 1
        return ran & (self._lane_values(2) > 0) & self.live

    def lanes(self, width: int) -> Lanes:
        """Returns the lanes with the rows that `num_rows` says."""
        ints, _ = self.state()
        columns = self.columns
        return Lanes(
            self.slots,
            ints[:, columns.cached],
            self.num_rows,
            ints[:, columns.tokens :],
            self.tables(width),
            columns.history,
        )

    def draws(self) -> Draws:
        """Returns how each lane's tokens are drawn."""
        ints, floats = self.state()
        columns = self.columns
        return Draws(floats[:, 0], floats[:, 1], ints[:, columns.top_k], ints[:, columns.seed])
