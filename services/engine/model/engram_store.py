"""Rows of the n-gram tables, wherever they lie: in memory, in the checkpoint, or over ranks.

Source: model.md, section 13.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

import kernels
from services.engine.model.checkpoint import TensorSource
from services.engine.model.device import Device


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
        wanted = rows.reshape(-1)
        if wanted.device != table.device:
            wanted = wanted.to(table.device, non_blocking=True)
        return table.index_select(0, wanted).view(*rows.shape, table.shape[1])


class PackedEngram:
    """Whole tables in a device's memory as they are stored: E4M3 values, then their scales."""

    def __init__(self, tables: dict[int, Tensor], kind: str) -> None:
        self._tables = tables
        self._gather = kernels.get("engram_gather", kind)

    def lookup(self, layer: int, rows: Tensor) -> Tensor:
        table = self._tables[layer]
        wanted = rows if rows.device == table.device else rows.to(table.device, non_blocking=True)
        found: Tensor = self._gather(table, wanted)
        return found


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


def engram_in_memory(source: TensorSource, layers: Sequence[int], device: Device) -> EngramStore:
    """Loads whole tables: expanded on a CPU, as they are stored (a quarter of that) elsewhere."""
    if device.kind != "cpu":
        parts = {layer: source.packed(table_name(layer)) for layer in layers}
        packed = {layer: torch.cat(part, 1) for layer, part in parts.items() if part is not None}
        if len(packed) == len(layers):
            return PackedEngram({at: device.place(t) for at, t in packed.items()}, device.kind)
    return MemoryEngram({at: device.place(source.matrix(table_name(at))) for at in layers})
