"""Routed experts over ranks: who holds which expert, and how rows get there and back.

The gate picks logical experts; a placement maps them to physical slots, some of them replicas.
Dispatch and combine sit behind `ExpertGroup`, so that a communication library can serve it.
Source: model.md, sections 12 and 19.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.reference.experts import fake_quant, grouped_mlp
from services.engine.model.numerics import Numerics
from services.engine.model.weights import Model


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
        most = max(map(len, slots))
        table = torch.tensor([own + own[:1] * (most - len(own)) for own in slots])
        return table, torch.tensor([len(own) for own in slots])


class ExpertShard:
    """The experts of one rank, by layer name: [slots, 2 * I, D] and [slots, D, I]."""

    def __init__(
        self, weights: dict[str, tuple[Tensor, Tensor]], limit: float, numerics: Numerics
    ) -> None:
        self.weights = weights
        self._limit = limit
        self._numerics = numerics

    def compute(
        self, layer: str, x: Tensor, rows: Tensor, slots: Tensor, weights: Tensor
    ) -> Tensor:
        """Runs (row, local slot, routing weight) triples; returns [p, D] float32 partials."""
        w13, w2 = self.weights[layer]
        return grouped_mlp(
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


class ExpertGroup(Protocol):
    """Routed experts of all ranks, as one rank sees them."""

    def routed(self, layer: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of each row's experts, [n, D] float32.

        Args:
            x: [n, D] float32, as the experts take it; ids: [n, k] ascending; weights: [n, k].
        """
        ...


def make_shard(
    model: Model, placements: Mapping[str, Placement], rank: int, numerics: Numerics
) -> ExpertShard:
    """Loads the experts in a rank's slots, and no others."""
    loaded = {}
    for layer, (_, load) in model.experts.items():
        held = placements[layer].of_rank(rank)
        distinct = sorted(set(held))
        w13, w2 = load(distinct)
        at = torch.tensor([distinct.index(expert) for expert in held])
        same = list(held) == distinct
        loaded[layer] = (w13, w2) if same else (w13[at], w2[at])
    return ExpertShard(loaded, model.config.text.swiglu_limit, numerics)


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
        self._tables = {layer: p.replicas() for layer, p in self.placements.items()}

    def routed(self, layer: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        placement = self.placements[layer]
        slots = physical_slots(ids, *self._tables[layer])
        owners = slots // placement.slots_per_rank
        parts = []
        for rank, shard in enumerate(self.shards):
            mine = (owners == rank).nonzero() if len(self.shards) > 1 else None
            if mine is None:
                rows = torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1])
                out = shard.compute(layer, x, rows, slots.reshape(-1), weights.reshape(-1))
                return _sum_ascending(out.view(*ids.shape, -1))
            rows, columns = mine[:, 0], mine[:, 1]
            if len(rows) == 0:
                continue
            local = slots[rows, columns] - rank * placement.slots_per_rank
            out = shard.compute(layer, x, rows, local, weights[rows, columns])
            parts.append((rows, columns, out))
        return combine(parts, ids.shape, x.shape[1], self._numerics.invariant)

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
            held = [self.shards[owner].weights[layer] for owner, _ in pieces]
            moved.append(
                (
                    torch.stack([w[0][slot] for w, (_, slot) in zip(held, pieces, strict=True)]),
                    torch.stack([w[1][slot] for w, (_, slot) in zip(held, pieces, strict=True)]),
                )
            )
        for shard, weights in zip(self.shards, moved, strict=True):
            shard.weights[layer] = weights
        self.placements[layer] = placement
        self._tables[layer] = placement.replicas()


def physical_slots(ids: Tensor, table: Tensor, counts: Tensor) -> Tensor:
    """Returns a slot per (row, expert): replicas take turns by row. [n, k]."""
    rows = torch.arange(ids.shape[0])[:, None]
    return table[ids, rows % counts[ids]]


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


class Exchange(Protocol):
    """All-to-all of tensors between the ranks of a group; every rank calls it together."""

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sends parts[r] to rank r; returns what each rank sent here. Equal type and width."""
        ...


class DistributedGroup:
    """One rank of a group whose ranks are processes; their rows are their own."""

    def __init__(
        self, model: Model, numerics: Numerics, exchange: Exchange, extra: int = 0
    ) -> None:
        self._numerics = numerics
        self._exchange = exchange
        self.placements = {
            layer: Placement.initial(count, exchange.num_ranks, extra)
            for layer, (count, _) in model.experts.items()
        }
        self.shard = make_shard(model, self.placements, exchange.rank, numerics)
        self._tables = {layer: p.replicas() for layer, p in self.placements.items()}

    def routed(self, layer: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As the protocol; ranks step together, one without rows passes none."""
        size = self.placements[layer].slots_per_rank
        slots = physical_slots(ids, *self._tables[layer])
        owners, ranks = slots // size, range(self._exchange.num_ranks)
        mine = [(owners == rank).nonzero() for rank in ranks]
        # A row travels once per rank, with the list of that rank's experts for it.
        unique = [m[:, 0].unique(return_inverse=True) for m in mine]
        sent_x = [x[rows] for rows, _ in unique]
        pairs = [
            torch.stack((at, slots[m[:, 0], m[:, 1]] - rank * size), 1)
            for rank, (m, (_, at)) in enumerate(zip(mine, unique, strict=True))
        ]
        got_x = self._exchange.swap(sent_x)
        got_pairs = self._exchange.swap(pairs)
        got_weights = self._exchange.swap([weights[m[:, 0], m[:, 1]][:, None] for m in mine])
        answers = [
            self.shard.compute(layer, rows, pair[:, 0], pair[:, 1], weight[:, 0])
            if len(pair)
            else rows.new_empty(0, x.shape[1])
            for rows, pair, weight in zip(got_x, got_pairs, got_weights, strict=True)
        ]
        back = self._exchange.swap(answers)
        parts = [(m[:, 0], m[:, 1], out) for m, out in zip(mine, back, strict=True) if len(m)]
        return combine(parts, ids.shape, x.shape[1], self._numerics.invariant)

    def move(self, layer: str, placement: Placement) -> None:
        """Changes a layer's placement; all ranks call it together, between two steps."""
        old, size = self.placements[layer], self.placements[layer].slots_per_rank
        first = {expert: slot for slot, expert in reversed(list(enumerate(old.logical)))}
        own = self._exchange.rank
        moved: list[Tensor] = []
        for part in (0, 1):
            held = self.shard.weights[layer][part]
            parts = []
            for rank in range(self._exchange.num_ranks):
                wanted = [first[expert] for expert in placement.of_rank(rank)]
                at = [slot - own * size for slot in wanted if slot // size == own]
                parts.append(held[torch.tensor(at, dtype=torch.long)].flatten(1))
            got = self._exchange.swap(parts)
            taken = [0] * len(got)
            rows = []
            for expert in placement.of_rank(own):
                owner = first[expert] // size
                rows.append(got[owner][taken[owner]])
                taken[owner] += 1
            moved.append(torch.stack(rows).view(-1, *held.shape[1:]))
        self.shard.weights[layer] = (moved[0], moved[1])
        self.placements[layer] = placement
        self._tables[layer] = placement.replicas()


class ProcessGroupExchange:
    """All-to-all over a `torch.distributed` process group (gloo on CPUs, NCCL on GPUs)."""

    def __init__(self, group: object, rank: int, num_ranks: int) -> None:
        self._group = group
        self.rank = rank
        self.num_ranks = num_ranks

    def swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        like = parts[0]
        counts = torch.tensor([len(part) for part in parts])
        incoming = torch.empty_like(counts)
        self._alltoall(incoming, counts, [1] * self.num_ranks, [1] * self.num_ranks)
        sizes = incoming.tolist()
        out = like.new_empty(sum(sizes), *like.shape[1:])
        self._alltoall(out, torch.cat(list(parts)), sizes, counts.tolist())
        return list(out.split(sizes))

    def _alltoall(self, out: Tensor, given: Tensor, got: list[int], sent: list[int]) -> None:
        work: Callable[..., object] = self._group.alltoall_base  # type: ignore[attr-defined]
        work(out, given.contiguous(), got, sent).wait()  # type: ignore[attr-defined]
