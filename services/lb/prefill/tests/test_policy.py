"""Layers 1 to 3 of the prefill balancer: the worked examples and what must hold for any input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.cost_model import CostModel
from services.lb.prefill import policy
from services.lb.prefill.policy import Lane, Puller, Steal


@pytest.mark.parametrize(
    ("num_tokens", "bucket"),
    [(1, 0), (16_383, 0), (16_384, 1), (65_536, 2), (262_143, 2), (262_144, 3)],
)
def test_buckets_are_bounded_at_16k_64k_and_256k(num_tokens, bucket):
    assert policy.bucket_of(num_tokens) == bucket


def test_without_bounds_there_is_one_bucket():
    assert policy.bucket_of(1_000_000, ()) == 0


def test_t_pre_1a_engines_follow_the_shares():
    assert policy.divide(16, (320, 480, 160, 40)) == (5, 8, 2, 1)


def test_t_pre_1b_every_bucket_keeps_its_minimum():
    assert policy.divide(16, (100, 100, 100, 1_700)) == (1, 1, 1, 13)


def test_t_pre_1c_the_minimum_is_taken_from_the_largest():
    assert policy.divide(5, (10, 10, 10, 970)) == (1, 1, 1, 2)


def test_t_pre_1_no_demand_keeps_the_division():
    assert policy.divide(16, (0, 0, 0, 0)) is None
    assert policy.divide_into_lanes(16, (0, 0, 0, 0)) is None


@given(st.integers(4, 200), st.lists(st.floats(0, 1e12), min_size=4, max_size=4))
def test_a_division_uses_every_engine_and_stays_near_the_shares(num_engines, demand):
    counts = policy.divide(num_engines, demand)
    if sum(demand) == 0:
        assert counts is None
        return
    assert sum(counts) == num_engines
    assert min(counts) >= 1
    for count, d in zip(counts, demand, strict=True):
        assert count <= num_engines * d / sum(demand) + 1


def test_few_engines_merge_the_shortest_lanes_upward():
    division = policy.divide_into_lanes(3, (10, 10, 10, 70))
    assert division.lanes == (Lane(0, 2), Lane(2, 3), Lane(3, 4))
    assert division.targets == (1, 1, 1)
    division = policy.divide_into_lanes(2, (10, 10, 10, 70))
    assert division.lanes == (Lane(0, 3), Lane(3, 4))
    division = policy.divide_into_lanes(1, (10, 10, 10, 70))
    assert division.lanes == (Lane(0, 4),)


def test_few_engines_give_no_engine_to_buckets_without_demand():
    division = policy.divide_into_lanes(2, (10, 0, 0, 0))
    assert division.lanes == (Lane(0, 4),)
    assert division.targets == (2,)
    division = policy.divide_into_lanes(2, (10, 0, 5, 0))
    assert division.lanes == (Lane(0, 1), Lane(1, 4))


@given(
    st.integers(1, 12),
    st.lists(st.floats(0, 1e9), min_size=4, max_size=4),
    st.integers(0, 3),
)
def test_lanes_cover_every_bucket_once_and_use_every_engine(num_engines, demand, minimum):
    division = policy.divide_into_lanes(num_engines, demand, minimum)
    if sum(demand) == 0:
        assert division is None
        return
    covered = [b for lane in division.lanes for b in range(lane.first, lane.end)]
    assert covered == [0, 1, 2, 3]
    assert sum(division.targets) == num_engines


def test_moves_take_idle_engines_first_then_the_lowest_id():
    lanes = {"e0": 0, "e1": 0, "e2": 0, "e3": 1}
    assert policy.plan_moves(lanes, (1, 3), idle={"e2"}) == [("e2", 1), ("e0", 1)]
    assert policy.plan_moves(lanes, (1, 3), idle=set(), max_moves=1) == [("e0", 1)]
    assert policy.plan_moves(lanes, (3, 1), idle={"e2"}) == []


def test_t_pre_2_a_dear_head_waits_for_an_empty_engine_and_blocks_the_next():
    model = CostModel()
    quota = 600_000_000
    held = {"A": 500_000_000, "B": 100_000_000, "C": 0}

    def pullers():
        return [Puller(name, quota - load, load == 0) for name, load in held.items()]

    x = policy.choose_puller(pullers(), 200_000_000)
    assert x.engine_id == "C"
    held["C"] += 200_000_000
    assert quota - held["C"] == 400_000_000
    # Y: B has 500 M left, C 400 M, A 100 M, nobody is idle. Z (64.7 M) would fit but is behind it.
    assert policy.choose_puller(pullers(), 700_000_000) is None
    assert policy.choose_puller(pullers(), int(model.cost(3_000, 0))).engine_id == "B"
    held["A"] = 0
    assert policy.choose_puller(pullers(), 700_000_000).engine_id == "A"


def test_an_engine_without_quota_left_gets_nothing():
    assert policy.choose_puller([Puller("A", 0, False)], 1) is None
    assert policy.choose_puller([Puller("A", -5, False)], 0) is None


def test_t_pre_3_a_request_goes_to_the_rank_with_least_outstanding_cost():
    loads = [90_000_000, 70_000_000, 70_000_000, 120_000_000]
    assert policy.pick_group_rank(loads) == 1


def test_the_rank_example_of_the_engine_document():
    charges = [25_490_000, 1_652_500, 1_052_500, 17_970_000, 450_400, 6_140_000]
    quota, ranks = [0, 0, 0, 0], []
    for charge in charges:
        ranks.append(policy.pick_group_rank(quota))
        quota[ranks[-1]] += charge
    assert ranks == [0, 1, 2, 3, 2, 2]
    assert quota == [25_490_000, 1_652_500, 7_642_900, 17_970_000]


def test_an_idle_engine_steals_from_the_queue_its_setting_names():
    lengths = [2, 0, 5, 5]
    assert policy.steal_from(1, lengths, Steal.ANY) == 2
    assert policy.steal_from(1, lengths, Steal.SHORTER) == 0
    assert policy.steal_from(3, [9, 4, 0, 0], Steal.SHORTER) == 1
    assert policy.steal_from(0, lengths, Steal.SHORTER) is None
    assert policy.steal_from(1, lengths, Steal.OFF) is None
    assert policy.steal_from(1, [0, 0, 0, 0], Steal.ANY) is None
