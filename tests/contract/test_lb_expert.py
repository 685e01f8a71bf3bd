"""The expert balancer: the same cases on the fake and on the real server."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from services.common.errors import Failure, Reason
from services.common.service import running
from services.lb.expert import main as expert_main
from services.lb.expert.client import ExpertLbClient, PlanInput, Policy, leader_of, plan_locally
from services.lb.expert.config import EplbConfig
from services.lb.expert.fake import FakeExpertLb

TWO_HOT = [[120, 30, 30, 30, 30, 60], [60, 30, 30, 30, 30, 120]]


@asynccontextmanager
async def real_planner():
    config = EplbConfig(listen="127.0.0.1:0")
    async with running("eplb", config, expert_main.build) as runtime:
        await runtime.view.wait_for(lambda view: view.leader("eplb") is not None)
        yield ExpertLbClient(runtime.channels, leader_of(runtime.view))


@asynccontextmanager
async def fake_planner():
    yield FakeExpertLb()


@pytest.fixture(params=["fake", "real"])
async def planner(request):
    async with fake_planner() if request.param == "fake" else real_planner() as opened:
        async with asyncio.timeout(60):
            yield opened


def given(rows=TWO_HOT, num_layers=2, num_slots=8, num_ranks=4, **more):
    loads = np.repeat(np.array(rows, dtype=np.uint32)[:, None, :], num_layers, axis=1)
    return PlanInput(loads, num_slots, num_ranks, **more)


async def test_a_plan_is_the_worked_example_on_every_layer(planner):
    placed = await planner.plan("p", 100, given())
    assert placed.slots == ((0, 1, 5, 3, 0, 2, 5, 4),) * 2
    assert placed.changed
    assert round(placed.moe_lb_after, 4) == 1.2
    assert placed.moe_lb_before > placed.moe_lb_after
    assert (placed.version, placed.term >= 1) == (1, True)


async def test_the_service_answers_what_an_engine_would_plan_alone(planner):
    rng = np.random.default_rng(5)
    loads = rng.integers(0, 1_000, size=(20, 3, 24), dtype=np.uint32)
    for policy in Policy:
        asked = PlanInput(loads, 32, 8, policy, num_groups=4, num_nodes=2)
        placed = await planner.plan(f"pool-{policy}", 1, asked)
        alone = plan_locally(asked)
        assert placed.slots == alone.slots
        assert placed.moe_lb_after == pytest.approx(alone.moe_lb_after)


async def test_a_plan_is_idempotent_per_step_and_versions_rise_with_changes(planner):
    first = await planner.plan("p", 100, given())
    assert await planner.plan("p", 100, given([[9, 9, 9, 9, 9, 9]])) == first
    same = await planner.plan("p", 200, given(current=first.slots))
    assert not same.changed
    assert same.slots == first.slots
    assert same.version == first.version
    turned = [row[::-1] for row in TWO_HOT]
    other = await planner.plan("p", 300, given([[1, 1, 500, 400, 1, 1], turned[0]]))
    assert other.changed
    assert other.version == first.version + 1


async def test_a_step_that_is_over_is_a_conflict(planner):
    await planner.plan("p", 100, given())
    with pytest.raises(Failure) as refused:
        await planner.plan("p", 99, given())
    assert refused.value.reason is Reason.CONFLICT


async def test_a_gain_too_small_moves_nothing(planner):
    placed = await planner.plan("p", 1, given([[10, 10, 10, 10]], num_slots=4, min_gain=0.5))
    assert not placed.changed
    assert placed.slots == ((0, 1, 2, 3),) * 2


async def test_the_placement_in_force_can_be_read(planner):
    with pytest.raises(Failure) as refused:
        await planner.placement("p")
    assert refused.value.reason is Reason.NOT_FOUND
    placed = await planner.plan("p", 100, given())
    term, version, slots = await planner.placement("p")
    assert (term, version) == (placed.term, placed.version)
    assert np.frombuffer(slots, "<u4").reshape(2, 8).tolist() == [list(s) for s in placed.slots]


@pytest.mark.parametrize(
    "asked",
    [
        given(num_slots=40_000),
        given(num_slots=7),
        given(num_slots=4),
        given(num_ranks=3),
        given(current=((0, 1, 2, 3, 4, 4, 4, 4),) * 2),
        given(policy=Policy.HIERARCHICAL, num_groups=4),
    ],
    ids=["too many", "uneven", "too few", "ranks", "lacks one", "groups"],
)
async def test_shapes_that_do_not_fit_are_refused(planner, asked):
    with pytest.raises(Failure) as refused:
        await planner.plan("p", 1, asked)
    assert refused.value.reason is Reason.INVALID_REQUEST


async def test_a_pool_needs_a_name(planner):
    with pytest.raises(Failure) as refused:
        await planner.plan("", 1, given())
    assert refused.value.reason is Reason.INVALID_REQUEST
