"""Plans the placement of all layers of a pool: whether anything moves, and to where.

A pure function, so that an engine may plan alone and get what the service would answer.
Source: engine.md, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.lb.expert import policy
from services.lb.expert.policy import Policy, Slots

MIN_GAIN = 0.01


@dataclass(frozen=True)
class PlanInput:
    """Loads of one window of a pool.

    Args:
        loads: [steps, layers, experts], tokens.
        current: slots per layer in force; empty before the first plan.
        min_gain: gain in moe_lb below which nothing moves.
    """

    loads: npt.NDArray[np.uint32]
    num_slots: int
    num_ranks: int
    policy: Policy = Policy.WINDOW
    num_groups: int = 1
    num_nodes: int = 1
    current: tuple[tuple[int, ...], ...] = ()
    min_gain: float = MIN_GAIN


@dataclass(frozen=True)
class Plan:
    """Slots per layer, and the balance before and after over all layers."""

    slots: tuple[tuple[int, ...], ...]
    changed: bool
    moe_lb_before: float
    moe_lb_after: float


def plan(given: PlanInput) -> Plan:
    """Returns the placement to use next; the current one when the gain is too small.

    Raises: ValueError on shapes that do not fit.
    """
    num_steps, num_layers, num_experts = given.loads.shape
    if num_steps < 1 or num_layers < 1:
        raise ValueError(f"{num_steps} steps of {num_layers} layers hold no load")
    start = policy.initial_slots(num_experts, given.num_slots)
    current: list[Sequence[int]] = [list(s) for s in given.current] or [start] * num_layers
    _check_current(current, given, num_layers, num_experts)
    proposed: list[Slots] = []
    before = after = (0.0, 0.0)
    for layer in range(num_layers):
        loads = given.loads[:, layer, :].astype(np.float64)
        slots = policy.place(
            loads,
            given.num_slots,
            given.num_ranks,
            given.policy,
            given.num_groups,
            given.num_nodes,
        )
        old = policy.balance_terms(loads, current[layer], given.num_ranks)
        new = policy.balance_terms(loads, slots, given.num_ranks)
        if new[0] > old[0]:  # a layer that is better as it is stays
            slots, new = list(current[layer]), old
        proposed.append(slots)
        before = (before[0] + old[0], before[1] + old[1])
        after = (after[0] + new[0], after[1] + new[1])
    lb_before, lb_after = _ratio(before), _ratio(after)
    moved = [tuple(a) != tuple(b) for a, b in zip(current, proposed, strict=True)]
    if not any(moved) or lb_before - lb_after < given.min_gain:
        return Plan(tuple(tuple(s) for s in current), False, lb_before, lb_before)
    return Plan(tuple(tuple(s) for s in proposed), True, lb_before, lb_after)


def _ratio(terms: tuple[float, float]) -> float:
    busiest, mean = terms
    return busiest / mean if mean > 0 else 1.0


def _check_current(
    current: Sequence[Sequence[int]], given: PlanInput, num_layers: int, num_experts: int
) -> None:
    if len(current) != num_layers or any(len(slots) != given.num_slots for slots in current):
        raise ValueError(f"the current placement is not {num_layers} x {given.num_slots} slots")
    everyone = set(range(num_experts))
    if any(set(slots) != everyone for slots in current):
        raise ValueError("the current placement lacks an expert, or names one that is not there")
