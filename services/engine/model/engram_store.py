"""Rows of the n-gram tables, wherever they lie: in memory, in the checkpoint, or over ranks.

Source: model.md, section 13.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.engine.model.checkpoint import TensorSource


class EngramStore(Protocol):
    """Tables by layer."""

    def lookup(self, layer: int, rows: Tensor) -> Tensor:
        """Returns rows, [*rows.shape, width] float32; rows: int64 of any shape."""
        ...


def table_name(layer: int) -> str:
    return f"layers.{layer}.engram.embed.weight"


class MemoryEngram:
    """Whole tables in memory, expanded."""

    def __init__(self, tables: dict[int, Tensor]) -> None:
        self._tables = tables

    def lookup(self, layer: int, rows: Tensor) -> Tensor:
        table = self._tables[layer]
        return table.index_select(0, rows.reshape(-1)).view(*rows.shape, table.shape[1])


class FileEngram:
    """Rows read from the checkpoint's files as they are asked for; nothing is kept."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def lookup(self, layer: int, rows: Tensor) -> Tensor:
        wanted, places = rows.reshape(-1).unique(return_inverse=True)
        found = self._source.table_rows(table_name(layer), wanted)
        return found[places].view(*rows.shape, found.shape[1])


class ShardedEngram:
    """Rank r of a group holds rows [r * step, (r + 1) * step) of every table, step = ceil(R / P).

    `shards` answer for rows numbered from the start of their range.
    """

    def __init__(self, shards: Sequence[EngramStore], num_rows: dict[int, int]) -> None:
        self._shards = shards
        self._steps = {layer: -(-rows // len(shards)) for layer, rows in num_rows.items()}

    def lookup(self, layer: int, rows: Tensor) -> Tensor:
        flat, step = rows.reshape(-1), self._steps[layer]
        owners = flat // step
        out: Tensor | None = None
        for owner in owners.unique().tolist():
            mine = (owners == owner).nonzero()[:, 0]
            found = self._shards[owner].lookup(layer, flat[mine] - owner * step)
            if out is None:
                out = torch.empty(len(flat), found.shape[1])
            out[mine] = found
        assert out is not None, "a lookup has at least one row"
        return out.view(*rows.shape, out.shape[1])


def table_shard(table: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Returns the rows that a rank holds."""
    step = -(-table.shape[0] // num_ranks)
    return table[rank * step : (rank + 1) * step]
