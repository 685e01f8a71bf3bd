"""The rows of a decode step as the device itself lays them out: no value is known to the host.

A step has a fixed number of lanes, one per request, and a fixed number of rows. How many rows a
lane has is the device's choice; rows that no lane takes belong to a last, empty lane in slot and
block 0. The same questions are answered as by `rows.Rows`, from tensors.
Source: engine.md, sections 0, 2.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.engram_hash import EngramHash
from services.engine.model.rows import WindowView


@dataclass(frozen=True)
class Lanes:
    """One entry per lane, the empty one last."""

    slot: Tensor  # [L] state slot
    base: Tensor  # [L] position of the first row
    num_rows: Tensor  # [L], 0 for a lane without a request
    tokens: Tensor  # [L, H + 1 + G]: ids before the first row, golden token, drafts
    tables: Tensor  # [L, W] blocks
    history: int  # H


class LaneRows:
    """Rows of a step; the attributes and methods are those of `Rows` that a decode step uses."""

    writes_first = True
    image = None

    def __init__(
        self,
        lanes: Lanes,
        num_rows: int,
        *,
        window: int,
        ring_slots: int,
        pool_slots: int,
        block_tokens: int,
    ) -> None:
        self.device = lanes.slot.device
        self.num_real = num_rows
        self.window, self.ring_slots, self.pool_slots = window, ring_slots, pool_slots
        self._lanes = lanes
        self.longest = lanes.tables.shape[1] * block_tokens
        ends = lanes.num_rows.cumsum(0)
        self.first = ends - lanes.num_rows
        rows = torch.arange(num_rows, device=self.device)
        # Past the last lane's end lies the empty one.
        last = lanes.slot.shape[0] - 1
        self.req = torch.searchsorted(ends[:-1], rows, right=True).clamp(max=last)
        self.within = rows - self.first[self.req]
        self.pos = lanes.base[self.req] + self.within
        self.slot = lanes.slot[self.req]
        self.tables = lanes.tables
        # Rows of the empty lane may be more than it has tokens.
        reach = lanes.tokens.shape[1] - lanes.history - 1
        self._at = lanes.history + self.within.clamp(max=reach)
        self.ids = lanes.tokens[self.req, self._at].clamp(min=0)

    def __len__(self) -> int:
        return self.num_real

    @property
    def valid_starts(self) -> list[int]:
        return []

    def ring_writes(self) -> tuple[None, Tensor]:
        return None, self.slot * self.ring_slots + self.pos % self.ring_slots

    def pool_writes(self) -> tuple[None, Tensor]:
        return None, self.slot * self.pool_slots + self.pos % self.pool_slots

    def history_slots(self) -> Tensor:
        raise AssertionError("a step that writes first has no history")

    def window_view(self, lows: Sequence[int]) -> WindowView:
        """Returns each row's window in the rings; all of it is valid once a sequence decodes."""
        back = torch.arange(1 - self.window, 1, device=self.device)
        wanted = self.pos[:, None] + back
        at = self.slot[:, None] * self.ring_slots + wanted.clamp(min=0) % self.ring_slots
        return WindowView(at, wanted >= 0)

    def groups(self, ratio: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns every row as if it completed an entry; `entry_writes` tells which do."""
        rows = torch.arange(self.num_real, device=self.device)
        partner = torch.where(self.within > 0, rows - 1, -1)
        before = (self.pos - 1).clamp(min=0) % self.pool_slots
        return rows, partner, self.slot * self.pool_slots + before, self.pos // ratio

    def entry_writes(self, ratio: int, per_block: int) -> tuple[None, Tensor]:
        """Returns the pool slot of every row's entry; one that is not complete goes to block 0."""
        entries = self.pos // ratio
        slots = self.entry_slots(self.req, entries, per_block)
        return None, torch.where((self.pos + 1) % ratio == 0, slots, 0)

    def entry_slots(self, req: Tensor, entries: Tensor, per_block: int) -> Tensor:
        """Returns pool slots of entries; those past a table's end are never read for a real row."""
        block = (entries // per_block).clamp(max=self.tables.shape[1] - 1)
        return self.tables[req, block] * per_block + entries % per_block

    def embeddings(self) -> list[tuple[int, Tensor]]:
        return []

    def shifted_ids(self, order: int) -> Tensor:
        """Returns the id of every row and of the order - 1 tokens before it, [order, n]."""
        back = torch.arange(order, device=self.device)[:, None]
        return self._lanes.tokens[self.req, self._at - back]


class DeviceHash:
    """Row ids of the n-gram memory from ids on the device; `EngramHash` with tensors."""

    def __init__(self, hasher: EngramHash, device: torch.device) -> None:
        tables = hasher.tables()
        self._pad = tables.pad
        mapped = tables.token_map
        self._map = None if mapped is None else torch.from_numpy(mapped).to(device)
        self._layers = [
            tuple(torch.from_numpy(part).to(device) for part in parts) for parts in tables.layers
        ]

    def rows(self, shifted: Tensor) -> list[Tensor]:
        """Returns per layer [n, (order - 1) * heads]. shifted: [order, n], negative: none."""
        visible = (shifted >= 0).long().cumprod(0).bool()
        ids = shifted.clamp(min=0)
        ids = ids if self._map is None else self._map[ids]
        ids = torch.where(visible, ids, self._pad)
        found = []
        for mult, primes, starts in self._layers:
            mixed = ids[0] * mult[0]
            columns = []
            for back in range(1, len(ids)):
                mixed = mixed ^ (ids[back] * mult[back])
                columns.append(mixed[:, None] % primes[back - 1] + starts[back - 1])
            found.append(torch.cat(columns, 1))
        return found
