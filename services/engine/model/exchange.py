"""Experts of ranks that are processes: all-to-all between them, over `torch.distributed`.

Source: model.md, sections 12 and 19; engine.md, section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.model.numerics import Numerics
from services.engine.model.parallel import (
    LoadCounter,
    Placement,
    combine,
    make_shard,
    physical_slots,
)
from services.engine.model.weights import Model


class Exchange(Protocol):
    """All-to-all of tensors between the ranks of a group; every rank calls it together."""

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sends parts[r] to rank r; returns what each rank sent here. Equal type and width."""
        ...

    def gather(self, own: Tensor) -> Tensor:
        """Returns one tensor of every rank, [ranks, *shape]."""
        ...

    def close(self) -> None:
        """Leaves the group; nothing is exchanged afterwards."""
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
        self._device = model.device
        self._loads = LoadCounter(model)
        self._left: list[str] = []
        self._width = model.config.text.hidden_size
        self._top_k = {layer.name: layer.moe.top_k for layer in model.layers}
        for layer in model.drafter.layers if model.drafter else ():
            self._top_k[layer.name] = layer.moe.top_k
        self._tables = {layer: self._placed(p) for layer, p in self.placements.items()}

    def _placed(self, placement: Placement) -> tuple[Tensor, Tensor]:
        table, counts = placement.replicas()
        return self._device.place(table), self._device.place(counts)

    def routed(self, layer: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As the protocol; ranks step together, one without rows passes none."""
        if self._left:
            expected = self._left.pop(0)
            if expected != layer:
                raise AssertionError(f"{layer} is asked for, the group is at {expected}")
        self._loads.count(layer, ids)
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

    @property
    def rank(self) -> int:
        return self._exchange.rank

    def begin(self, layers: Sequence[str]) -> None:
        """Starts a round: these layers' experts are asked by every rank, in this order."""
        self._left = list(layers)

    def finish(self) -> None:
        """Answers for the layers of the round that this rank had no rows for."""
        while self._left:
            layer = self._left[0]
            none = torch.zeros(0, self._top_k[layer], dtype=torch.int64)
            self.routed(layer, torch.zeros(0, self._width), none, torch.zeros(none.shape))

    def gather(self, own: Tensor) -> Tensor:
        """Returns one tensor of every rank, [ranks, *shape]; all have one shape."""
        return self._exchange.gather(own)

    def close(self) -> None:
        """Leaves the group."""
        self._exchange.close()

    def take_loads(self, layers: Sequence[str]) -> npt.NDArray[np.int64]:
        """Returns the loads over all ranks; every rank calls it together."""
        counts: npt.NDArray[np.int64] = self.gather(self._loads.take(layers)).sum(0).numpy()
        return counts

    def move(self, layer: str, placement: Placement) -> None:
        """Changes a layer's placement; all ranks call it together, between two steps."""
        old, size = self.placements[layer], self.placements[layer].slots_per_rank
        first = {expert: slot for slot, expert in reversed(list(enumerate(old.logical)))}
        own = self._exchange.rank
        moved: list[Tensor] = []
        for held in self.shard.weights[layer]:
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
        self.shard.replace(layer, tuple(moved))
        self.placements[layer] = placement
        for table, new in zip(self._tables[layer], self._placed(placement), strict=True):
            table.copy_(new)


class ProcessGroupExchange:
    """All-to-all over a `torch.distributed` process group (gloo on CPUs, NCCL on GPUs)."""

    def __init__(self, group: object, rank: int, num_ranks: int, store: object = None) -> None:
        self._group = group
        self._store = store  # outlives the group
        self.rank = rank
        self.num_ranks = num_ranks

    def close(self) -> None:
        """Ends the group's threads. Left to the interpreter's end, they may outlive their owner."""
        self._group = None
        self._store = None

    def swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        like = parts[0]
        counts = torch.tensor([len(part) for part in parts])
        incoming = torch.empty_like(counts)
        self._alltoall(incoming, counts, [1] * self.num_ranks, [1] * self.num_ranks)
        sizes = incoming.tolist()
        out = like.new_empty(sum(sizes), *like.shape[1:])
        self._alltoall(out, torch.cat(list(parts)), sizes, counts.tolist())
        return list(out.split(sizes))

    def gather(self, own: Tensor) -> Tensor:
        found = [torch.empty_like(own) for _ in range(self.num_ranks)]
        work: Callable[..., object] = self._group.allgather  # type: ignore[attr-defined]
        work([found], [own.contiguous()]).wait()  # type: ignore[attr-defined]
        return torch.stack(found)

    def _alltoall(self, out: Tensor, given: Tensor, got: list[int], sent: list[int]) -> None:
        work: Callable[..., object] = self._group.alltoall_base  # type: ignore[attr-defined]
        work(out, given.contiguous(), got, sent).wait()  # type: ignore[attr-defined]


def join_group(store: str, rank: int, num_ranks: int, timeout_s: float = 60.0) -> Exchange:
    """Meets the other ranks of a group over gloo; rank 0 listens at `store` (host:port).

    Raises: RuntimeError when not all have come in time; later, when a rank is lost.
    """
    import torch.distributed as dist

    host, _, port = store.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    held = dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), num_ranks, is_master=rank == 0, timeout=limit
    )
    group = dist.ProcessGroupGloo(held, rank, num_ranks, limit)
    return ProcessGroupExchange(group, rank, num_ranks, held)
