"""Decides which expert sits in which slot: replicates hot experts and spreads them over the ranks.

Loads are token counts per step and expert of one MoE layer. The result is a list of slots; slot i
belongs to rank i // (slots per rank). Everything is deterministic, ties included, so that engine
and balancer find the same answer. Source: engine.md, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]  # [steps, experts]
Slots = list[int]  # expert per slot


class Policy(StrEnum):
    """How a layer is placed."""

    WINDOW = "window"
    HIERARCHICAL = "hierarchical"
    GLOBAL = "global"


def num_slots(num_experts: int, num_ranks: int, spare_per_rank: int) -> int:
    """Returns the physical slots of a pool: a multiple of the ranks. Case T-EP-1."""
    return num_experts + num_extra_slots(num_experts, num_ranks, spare_per_rank)


def num_extra_slots(num_experts: int, num_ranks: int, spare_per_rank: int) -> int:
    """Returns the slots beyond one per expert: the spares asked for, rounded up to whole ranks."""
    floor = spare_per_rank * num_ranks
    return floor + (-(num_experts + floor)) % num_ranks


def initial_slots(num_experts: int, num_physical: int) -> Slots:
    """Returns the placement before any load is known: experts in order, spares from the start."""
    spares = range(num_physical - num_experts)
    return [*range(num_experts), *(i % num_experts for i in spares)]


def ranks_for_restart(
    num_experts: int, num_healthy: int, spare_per_rank: int, max_slots_per_rank: int
) -> int:
    """Returns the slots per rank after a restart with this many healthy cards.

    Raises: ValueError naming the smallest workable number of cards. Source: engine.md, section 2.9.
    """
    wanted = -(-(num_experts + num_healthy * spare_per_rank) // num_healthy)
    if wanted <= max_slots_per_rank:
        return wanted
    if num_healthy * max_slots_per_rank >= num_experts:
        return max_slots_per_rank
    smallest = -(-num_experts // max_slots_per_rank)
    raise ValueError(f"{num_healthy} cards cannot hold {num_experts} experts; {smallest} can")


def place(
    loads: Loads,
    num_physical: int,
    num_ranks: int,
    policy: Policy = Policy.WINDOW,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> Slots:
    """Returns the slots of one layer.

    Args:
        loads: [steps, experts], tokens.
        num_physical: slots, a multiple of num_ranks, at least the experts.
        num_groups, num_nodes: for the hierarchical policy; groups divide experts and nodes divide
            groups, ranks and slots.
    Raises: ValueError on shapes that do not fit.
    """
    _check_shapes(loads.shape[1], num_physical, num_ranks, policy, num_groups, num_nodes)
    if policy is Policy.WINDOW:
        return _place_by_window(loads, num_physical, num_ranks)
    if policy is Policy.GLOBAL:
        num_groups = num_nodes = 1
    sums = loads.sum(axis=0).tolist()
    return _place_by_sums(sums, num_physical, num_ranks, num_groups, num_nodes)


def moe_lb(loads: Loads, slots: Sequence[int], num_ranks: int) -> float:
    """Returns how much the busiest rank has over the mean one, summed over steps; 1.0 is perfect.

    Source: engine.md, section 4.6.
    """
    busiest, mean = balance_terms(loads, slots, num_ranks)
    return busiest / mean if mean > 0 else 1.0


def balance_terms(loads: Loads, slots: Sequence[int], num_ranks: int) -> tuple[float, float]:
    """Returns the two sums of moe_lb, so that layers can be added up."""
    per_rank = rank_loads(loads, slots, num_ranks)
    return float(per_rank.max(axis=1).sum()), float(per_rank.mean(axis=1).sum())


def rank_loads(loads: Loads, slots: Sequence[int], num_ranks: int) -> Loads:
    """Returns [steps, ranks]: tokens per rank when replicas share their expert's tokens evenly."""
    table = np.asarray(slots, dtype=np.int64)
    replicas = np.bincount(table, minlength=loads.shape[1])
    per_slot = loads[:, table] / replicas[table]
    per_rank: Loads = per_slot.reshape(loads.shape[0], num_ranks, -1).sum(axis=2)
    return per_rank


class _Replicas:
    """Replicas per expert, and to whom each spare went."""

    def __init__(self, num_experts: int) -> None:
        self.replicas = [1] * num_experts
        self.order: list[int] = []

    def add(self, expert: int) -> None:
        """Gives an expert one more slot."""
        self.replicas[expert] += 1
        self.order.append(expert)


# -- window: minimise the summed per-step peak


def _place_by_window(loads: Loads, num_physical: int, num_ranks: int) -> Slots:
    given = _replicate_by_window(loads, num_physical)
    counts = given.replicas
    experts = [*range(loads.shape[1]), *given.order]
    sums = loads.sum(axis=0)
    # Slots in the order they were created: one per expert, then the spares.
    order = sorted(range(len(experts)), key=lambda i: (-sums[experts[i]] / counts[experts[i]], i))
    capacity = num_physical // num_ranks
    peak = np.zeros(loads.shape[0])
    load = np.zeros((num_ranks, loads.shape[0]))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    is_full = np.zeros(num_ranks, dtype=bool)
    for index in order:
        expert = experts[index]
        share = loads[:, expert] / counts[expert]
        cost = np.maximum(peak, load + share).sum(axis=1)
        cost[is_full] = np.inf
        rank = int(cost.argmin())  # the lowest on ties
        ranks[rank].append(expert)
        load[rank] += share
        np.maximum(peak, load[rank], out=peak)
        is_full[rank] = len(ranks[rank]) == capacity
    return [expert for rank in ranks for expert in rank]


def _replicate_by_window(loads: Loads, num_physical: int) -> _Replicas:
    """Gives each spare to the expert that lowers the sum of the steps' peaks most."""
    num_steps, num_experts = loads.shape
    result = _Replicas(num_experts)
    counts = np.ones(num_experts, dtype=np.int64)
    per_replica = loads.astype(np.float64, copy=True)
    sums = loads.sum(axis=0)
    steps = np.arange(num_steps)
    for _ in range(num_physical - num_experts):
        hottest = per_replica.argmax(axis=1)  # the lowest index on ties
        top = per_replica[steps, hottest]
        # The peak if the hottest had one replica more: its own smaller share, or the next expert.
        own = loads[steps, hottest] / (counts[hottest] + 1)
        per_replica[steps, hottest] = -1.0
        second = per_replica.max(axis=1) if num_experts > 1 else np.zeros(num_steps)
        per_replica[steps, hottest] = top
        credit = np.bincount(hottest, weights=top - np.maximum(own, second), minlength=num_experts)
        best = max(range(num_experts), key=lambda e: (credit[e], sums[e] / counts[e], -e))
        counts[best] += 1
        result.add(best)
        per_replica[:, best] = loads[:, best] / counts[best]
    return result


# -- hierarchical and global: summed loads


def _place_by_sums(
    sums: Sequence[float], num_physical: int, num_ranks: int, num_groups: int, num_nodes: int
) -> Slots:
    group_size = len(sums) // num_groups
    groups = [list(range(g * group_size, (g + 1) * group_size)) for g in range(num_groups)]
    group_sums = [sum(sums[e] for e in group) for group in groups]
    slots: Slots = []
    for node_groups in _pack(group_sums, num_nodes):
        experts = [e for g in node_groups for e in groups[g]]
        counts = _replicate_by_sums([sums[e] for e in experts], num_physical // num_nodes)
        # One slot per expert first, then the spares in the order they were given out.
        copies = [*range(len(experts)), *counts.order]
        shares = [sums[experts[i]] / counts.replicas[i] for i in copies]
        for rank in _pack(shares, num_ranks // num_nodes):
            slots += [experts[copies[slot]] for slot in rank]
    return slots


def _replicate_by_sums(sums: Sequence[float], num_physical: int) -> _Replicas:
    result = _Replicas(len(sums))
    for _ in range(num_physical - len(sums)):
        result.add(max(range(len(sums)), key=lambda e: (sums[e] / result.replicas[e], -e)))
    return result


def _pack(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    """Returns packs of equal size: heaviest first, each to the lightest pack that is not full."""
    size = len(weights) // num_packs
    if size == 1:
        return [[index] for index in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        pack = min(
            (p for p in range(num_packs) if len(packs[p]) < size), key=lambda p: (totals[p], p)
        )
        packs[pack].append(index)
        totals[pack] += weights[index]
    return packs


def _check_shapes(
    num_experts: int,
    num_physical: int,
    num_ranks: int,
    policy: Policy,
    num_groups: int,
    num_nodes: int,
) -> None:
    if num_experts < 1 or num_ranks < 1 or num_physical < num_experts:
        raise ValueError(f"{num_physical} slots on {num_ranks} ranks for {num_experts} experts")
    if num_physical % num_ranks:
        raise ValueError(f"{num_physical} slots are no multiple of {num_ranks} ranks")
    if policy is Policy.HIERARCHICAL and (
        num_groups < 1
        or num_nodes < 1
        or num_experts % num_groups
        or num_groups % num_nodes
        or num_ranks % num_nodes
        or num_physical % num_nodes
    ):
        raise ValueError(
            f"{num_groups} groups on {num_nodes} nodes do not divide {num_experts} experts, "
            f"{num_ranks} ranks and {num_physical} slots"
        )
