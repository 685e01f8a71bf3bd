"""Routed experts over ranks: who holds which expert, and how rows get there and back.

The gate picks logical experts; a placement maps them to physical slots, some of them replicas.
Dispatch and combine sit behind `ExpertGroup`, so that a communication library can serve it.
Source: model.md, sections 12 and 19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import kernels
from kernels.reference.experts import fake_quant
from services.engine.model.device import Device
from services.engine.model.numerics import Numerics
from services.engine.model.weights import Experts, Model


@dataclass(frozen=True)
class Placement:
    """Physical slots of one layer: contiguous, equal ranges per rank."""

    logical: tuple[int, ...]  # expert of each slot
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        if len(self.logical) % self.num_ranks:
            raise ValueError(f"{len(self.logical)} slots do not split over {self.num_ranks} ranks")
        missing = set(range(self.num_experts)) - set(self.logical)
        if missing or max(self.logical) >= self.num_experts:
            raise ValueError(f"experts without a slot: {sorted(missing)}")

    @staticmethod
    def initial(num_experts: int, num_ranks: int, extra: int = 0) -> Placement:
        """Every expert once, then replicas in order; padded so that ranks hold equally many."""
        slots = -(-(num_experts + extra) // num_ranks) * num_ranks
        return Placement(tuple(i % num_experts for i in range(slots)), num_experts, num_ranks)

    @property
    def slots_per_rank(self) -> int:
        return len(self.logical) // self.num_ranks

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Returns the experts in a rank's slots."""
        size = self.slots_per_rank
        return self.logical[rank * size : (rank + 1) * size]

    def replicas(self) -> tuple[Tensor, Tensor]:
        """Returns (slots of each expert, [E, most], and how many there are, [E])."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.logical):
            slots[expert].append(slot)
        # As wide as one expert's replicas can get, so that a new placement fits the old table.
        most = len(self.logical) - self.num_experts + 1
        table = torch.tensor([own + own[:1] * (most - len(own)) for own in slots])
        return table, torch.tensor([len(own) for own in slots])


class ExpertShard:
    """The experts of one rank, by layer name; slots come first in every tensor of them."""

    def __init__(
        self,
        weights: dict[str, Experts],
        limit: float,
        numerics: Numerics,
        device: Device,
    ) -> None:
        self.weights = weights
        name = "grouped_mlp_static" if device.is_resident else "grouped_mlp"
        self._grouped_mlp = kernels.get(name, device.kind)
        self._limit = limit
        self._numerics = numerics

    def compute(
        self, layer: str, x: Tensor, rows: Tensor, slots: Tensor, weights: Tensor
    ) -> Tensor:
        """Runs (row, local slot, routing weight) triples; returns [p, D] float32 partials."""
        held = self.weights[layer]
        w13, w2 = held if len(held) == 2 else (held[:2], held[2:])
        out: Tensor = self._grouped_mlp(
            x,
            rows,
            slots,
            weights,
            w13,
            w2,
            self._limit,
            project=self._numerics.project,
            before_down=fake_quant if self._numerics.native else None,
        )
        return out

    def replace(self, layer: str, weights: Experts) -> None:
        """Takes a layer's new matrices, in place: captured steps read them at their address."""
        for held, new in zip(self.weights[layer], weights, strict=True):
            held.copy_(new)


class LoadCounter:
    """Tokens per layer and logical expert, on the device; nobody waits for it in a step."""

    def __init__(self, model: Model) -> None:
        self._held = {
            layer: torch.zeros(count, dtype=torch.int64, device=model.device.torch)
            for layer, (count, _) in model.experts.items()
        }
        self._device = model.device

    def count(self, layer: str, ids: Tensor) -> None:
        flat = ids.reshape(-1)
        self._held[layer].scatter_add_(0, flat, torch.ones_like(flat))

    def take(self, layers: Sequence[str]) -> Tensor:
        """Returns the counts of some layers, [layers, experts] on the host, and starts anew."""
        found = self._device.fetch(torch.stack([self._held[layer] for layer in layers]).clone())
        for layer in layers:
            self._held[layer].zero_()
        return found


class ExpertGroup(Protocol):
    """Routed experts of all ranks, as one rank sees them."""

    @property
    def placements(self) -> dict[str, Placement]: ...

    def routed(self, layer: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of each row's experts, [n, D] float32.

        Args:
            x: [n, D] float32, as the experts take it; ids: [n, k] ascending; weights: [n, k].
        """
        ...

    def move(self, layer: str, placement: Placement) -> None:
        """Brings a layer's experts into a new placement, between two steps."""
        ...

    def take_loads(self, layers: Sequence[str]) -> npt.NDArray[np.int64]:
        """Returns tokens per layer and logical expert since the last call."""
        ...


def make_shard(
    model: Model, placements: Mapping[str, Placement], rank: int, numerics: Numerics
) -> ExpertShard:
    """Loads the experts in a rank's slots, and no others."""
    loaded = {}
    for layer, (_, load) in model.experts.items():
        held = placements[layer].of_rank(rank)
        distinct = sorted(set(held))
        own = load(distinct)
        at = torch.tensor([distinct.index(expert) for expert in held]).to(own[0].device)
        same = list(held) == distinct
        loaded[layer] = own if same else tuple(part[at] for part in own)
    return ExpertShard(loaded, model.config.text.swiglu_limit, numerics, model.device)


class InProcessGroup:
    """All ranks of a group in this process."""

    def __init__(
        self, model: Model, numerics: Numerics, num_ranks: int = 1, extra: int = 0
    ) -> None:
        self._numerics = numerics
        self.placements = {
            layer: Placement.initial(count, num_ranks, extra)
            for layer, (count, _) in model.experts.items()
        }
        self.shards = [
            make_shard(model, self.placements, rank, numerics) for rank in range(num_ranks)
        ]
        self._loads = LoadCounter(model)
        self._static = model.device.is_resident
        self._device = model.device
        self._tables = {layer: self._placed(p) for layer, p in self.placements.items()}

    def _placed(self, placement: Placement) -> tuple[Tensor, Tensor]:
        table, counts = placement.replicas()
        return self._device.place(table), self._device.place(counts)

    def take_loads(self, layers: Sequence[str]) -> npt.NDArray[np.int64]:
        counts: npt.NDArray[np.int64] = self._loads.take(layers).numpy().copy()
        return counts

    def routed(self, layer: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self._loads.count(layer, ids)
        placement = self.placements[layer]
        slots = physical_slots(ids, *self._tables[layer])
        if self._static or len(self.shards) == 1:
            return self._routed_whole(layer, x, slots, weights)
        owners = slots // placement.slots_per_rank
        parts = []
        for rank, shard in enumerate(self.shards):
            mine = (owners == rank).nonzero()
            rows, columns = mine[:, 0], mine[:, 1]
            if len(rows) == 0:
                continue
            local = slots[rows, columns] - rank * placement.slots_per_rank
            out = shard.compute(layer, x, rows, local, weights[rows, columns])
            parts.append((rows, columns, out))
        return combine(parts, ids.shape, x.shape[1], self._numerics.invariant)

    def _routed_whole(self, layer: str, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Gives every pair to every rank and takes the owner's answer: no shape depends on who."""
        rows = pair_rows(slots)
        size = self.placements[layer].slots_per_rank
        flat, flat_weights = slots.reshape(-1), weights.reshape(-1)
        if len(self.shards) == 1:
            out = self.shards[0].compute(layer, x, rows, flat, flat_weights)
            return _sum_ascending(out.view(*slots.shape, -1))
        answers = [
            shard.compute(layer, x, rows, (flat - rank * size).clamp(0, size - 1), flat_weights)
            for rank, shard in enumerate(self.shards)
        ]
        return combine_whole(answers, slots // size, self._numerics.invariant)

    def move(self, layer: str, placement: Placement) -> None:
        """Brings a layer's experts into a new placement, from slots that hold them now."""
        old = self.placements[layer]
        if (placement.num_experts, placement.num_ranks) != (old.num_experts, old.num_ranks):
            raise ValueError("a placement changes neither the experts nor the ranks")
        first = {expert: slot for slot, expert in reversed(list(enumerate(old.logical)))}
        size = old.slots_per_rank
        moved = []
        for rank in range(placement.num_ranks):
            pieces = [divmod(first[expert], size) for expert in placement.of_rank(rank)]
            held = [
                tuple(part[slot] for part in self.shards[owner].weights[layer])
                for owner, slot in pieces
            ]
            moved.append(tuple(torch.stack(parts) for parts in zip(*held, strict=True)))
        for shard, weights in zip(self.shards, moved, strict=True):
            shard.replace(layer, weights)
        self.placements[layer] = placement
        for table, new in zip(self._tables[layer], self._placed(placement), strict=True):
            table.copy_(new)


def physical_slots(ids: Tensor, table: Tensor, counts: Tensor) -> Tensor:
    """Returns a slot per (row, expert): replicas take turns by row. [n, k]."""
    rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
    return table[ids, rows % counts[ids]]


def pair_rows(slots: Tensor) -> Tensor:
    """Returns the row of every (row, expert) pair, [n * k]."""
    rows = torch.arange(slots.shape[0], device=slots.device)
    # Contiguous: of a single row the reshape alone would be a view with a stride of 0.
    return rows[:, None].expand(-1, slots.shape[1]).reshape(-1).contiguous()


def combine_whole(answers: Sequence[Tensor], owners: Tensor, invariant: bool) -> Tensor:
    """Sums the owners' answers per row, as `combine`; every rank answered for every pair.

    answers: per rank [n * k, width], of which only the pairs count that it owns; owners: [n, k].
    """
    table = answers[0].view(*owners.shape, -1)
    if invariant:
        for rank, answer in enumerate(answers[1:], 1):
            table = torch.where((owners == rank)[:, :, None], answer.view(table.shape), table)
        return _sum_ascending(table)
    total = torch.zeros_like(table[:, 0])
    for rank, answer in enumerate(answers):
        own = torch.where((owners == rank)[:, :, None], answer.view(table.shape), 0.0)
        total = total + _sum_ascending(own)
    return total


def combine(
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
    shape: Sequence[int],
    width: int,
    invariant: bool,
) -> Tensor:
    """Sums the partials of all ranks per row, [n, width].

    parts: per rank (rows, columns of the routing table, [p, width]). `invariant` sums per expert,
    ascending, so that neither the number of ranks nor the placement changes a bit; else each
    rank's share is summed first, then ranks in order.
    """
    if invariant:
        table = torch.zeros(*shape, width)
        for rows, columns, out in parts:
            table[rows, columns] = out
        return _sum_ascending(table)
    total = torch.zeros(shape[0], width)
    for rows, _, out in parts:
        total += torch.zeros(shape[0], width).index_add_(0, rows, out)
    return total


def _sum_ascending(table: Tensor) -> Tensor:
    total = table[:, 0]
    for column in range(1, table.shape[1]):
        total = total + table[:, column]
    return total
