"""Placements reach the network between steps, and only good ones. Source: engine.md, 4.2."""

from __future__ import annotations

import numpy as np

from services.common.errors import Failure, Reason
from services.decode.experts import FIRST, LOOKS, ExpertBalance, PlacesExperts
from services.lb.expert.fake import FakeExpertLb


class Runner:
    """Two ranks of three slots for four experts; the third expert has most of the work."""

    expert_ranks = 2
    leads_experts = True

    def __init__(self) -> None:
        self.expert_slots = ((0, 1, 2, 3, 0, 1),)
        self.loads = np.array([[1, 2, 90, 1]])
        self.placed: list[object] = []

    async def expert_loads(self):
        return self.loads

    async def place_experts(self, slots):
        self.placed.append(slots)
        self.expert_slots = slots


class Away:
    async def plan(self, pool, step, given):
        raise Failure(Reason.NO_INSTANCE, "no expert balancer leads")


async def test_a_window_ends_in_a_plan_and_a_hot_expert_is_spread():
    runner = Runner()
    assert isinstance(runner, PlacesExperts)
    balance = ExpertBalance(runner, FakeExpertLb(), "decode-0")
    moved = [await balance.turn(step) for step in range(1, LOOKS + 1)]
    assert moved == [False] * (FIRST - 1) + [True] + [False] * (LOOKS - FIRST)
    (slots,) = runner.placed[0]
    first, second = slots[:3], slots[3:]
    assert 2 in first, "each rank holds the hot expert"
    assert 2 in second
    assert balance.last_success_step == LOOKS, "nothing moved at the window's end: no gain"


async def test_without_a_balancer_or_load_experts_stay():
    runner = Runner()
    balance = ExpertBalance(runner, Away(), "decode-0")
    for step in range(1, LOOKS + 1):
        assert not await balance.turn(step)
    assert (runner.placed, balance.num_failed) == ([], 2)
    quiet = ExpertBalance(runner, FakeExpertLb(), "decode-0")
    runner.loads = np.zeros((1, 4), np.int64)
    assert not any([await quiet.turn(step) for step in range(1, LOOKS + 1)])


async def test_an_older_placement_is_refused():
    runner = Runner()
    balance = ExpertBalance(runner, FakeExpertLb(), "decode-0")
    balance._seen = (7, 1)
    for step in range(1, FIRST + 1):
        assert not await balance.turn(step)
    assert balance.num_failed == 1
