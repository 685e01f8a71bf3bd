"""Expert placement: every worked example of engine.md, section 4, and what must always hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.lb.expert import policy
from services.lb.expert.policy import Policy


def window(rows, num_physical, num_ranks):
    loads = np.array(rows, dtype=float)
    slots = policy.place(loads, num_physical, num_ranks)
    capacity = num_physical // num_ranks
    ranks = [slots[i : i + capacity] for i in range(0, num_physical, capacity)]
    return ranks, round(policy.moe_lb(loads, slots, num_ranks), 4)


@pytest.mark.parametrize(
    ("num_ranks", "spare", "total", "per_rank"),
    [(64, 1, 448, 7), (63, 1, 504, 8), (4, 4, 400, 100)],
)
def test_t_ep_1_physical_experts(num_ranks, spare, total, per_rank):
    assert policy.num_slots(384, num_ranks, spare) == total
    assert total // num_ranks == per_rank


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "spare", "extra", "per_rank"),
    [
        (384, 64, 1, 64, 7),
        (384, 72, 1, 120, 7),
        (384, 96, 1, 96, 5),
        (384, 128, 1, 128, 4),
        (384, 2, 4, 8, 196),
        (384, 4, 4, 16, 100),
        (256, 64, 1, 64, 5),
    ],
)
def test_layout_table_of_the_engine_document(num_experts, num_ranks, spare, extra, per_rank):
    assert policy.num_extra_slots(num_experts, num_ranks, spare) == extra
    assert policy.num_slots(num_experts, num_ranks, spare) // num_ranks == per_rank


def test_slots_after_a_restart_with_fewer_cards():
    assert policy.ranks_for_restart(384, 64, 1, 16) == 7
    assert policy.ranks_for_restart(384, 63, 1, 16) == 8
    assert policy.ranks_for_restart(384, 63, 1, 7) == 7
    with pytest.raises(ValueError, match="55 can"):
        policy.ranks_for_restart(384, 54, 1, 7)


def test_initial_slots_repeat_the_first_experts():
    assert policy.initial_slots(4, 6) == [0, 1, 2, 3, 0, 1]


def test_window_puts_experts_busy_at_different_times_on_one_rank():
    rows = [[100, 0, 100, 0], [0, 100, 0, 100]]
    assert window(rows, 4, 2) == ([[0, 1], [2, 3]], 1.0)
    by_sums = policy.place(np.array(rows, dtype=float), 4, 2, Policy.GLOBAL)
    assert by_sums == [0, 2, 1, 3]
    assert policy.moe_lb(np.array(rows, dtype=float), by_sums, 2) == 2.0


def test_window_replicates_the_hottest_three_times():
    rows = [[80, 20, 10, 10], [70, 30, 10, 10]]
    assert window(rows, 6, 2) == ([[0, 0, 2], [1, 0, 3]], 1.0556)
    loads = np.array(rows, dtype=float)
    per_rank = policy.rank_loads(loads, [0, 0, 2, 1, 0, 3], 2)
    assert per_rank.round(2).tolist() == [[63.33, 56.67], [56.67, 63.33]]


def test_window_reaches_perfect_balance_of_one_hot_expert():
    assert window([[60, 10, 10, 10, 10, 20]], 8, 4) == ([[0, 1], [5, 2], [0, 3], [0, 4]], 1.0)


def test_window_gives_a_spare_to_a_hot_expert_even_when_it_lowers_no_peak():
    slots = policy.place(np.array([[50.0, 50, 1, 1]]), 5, 5)
    assert sorted(slots) == [0, 0, 1, 2, 3]


def test_window_with_two_hot_experts_in_turn():
    rows = [[120, 30, 30, 30, 30, 60], [60, 30, 30, 30, 30, 120]]
    assert window(rows, 8, 4) == ([[0, 1], [5, 3], [0, 2], [5, 4]], 1.2)


LAYER_1 = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
LAYER_2 = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]


@pytest.mark.parametrize(
    ("loads", "kind", "slots", "ratio"),
    [
        (LAYER_1, Policy.HIERARCHICAL, [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], 1.2081),
        (LAYER_1, Policy.GLOBAL, [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1], 1.0726),
        (LAYER_2, Policy.HIERARCHICAL, [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1], 1.2422),
        (LAYER_2, Policy.GLOBAL, None, 1.1903),
    ],
)
def test_policies_on_summed_loads(loads, kind, slots, ratio):
    array = np.array([loads], dtype=float)
    placed = policy.place(array, 16, 8, kind, num_groups=4, num_nodes=2)
    assert slots is None or placed == slots
    assert round(policy.moe_lb(array, placed, 8), 4) == ratio


def test_rank_loads_of_the_hierarchical_example():
    array = np.array([LAYER_1], dtype=float)
    slots = [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]
    expected = [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152]
    assert policy.rank_loads(array, slots, 8)[0].tolist() == expected


def test_no_load_is_perfect_balance():
    assert policy.moe_lb(np.zeros((3, 4)), [0, 1, 2, 3], 2) == 1.0


@pytest.mark.parametrize(
    ("num_physical", "num_ranks", "kind", "groups", "nodes"),
    [
        (3, 1, Policy.WINDOW, 1, 1),
        (5, 2, Policy.WINDOW, 1, 1),
        (8, 4, Policy.HIERARCHICAL, 3, 1),
        (8, 4, Policy.HIERARCHICAL, 2, 4),
    ],
)
def test_shapes_that_do_not_fit_are_refused(num_physical, num_ranks, kind, groups, nodes):
    with pytest.raises(ValueError):
        policy.place(np.ones((1, 4)), num_physical, num_ranks, kind, groups, nodes)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([Policy.WINDOW, Policy.GLOBAL]),
    st.randoms(use_true_random=False),
)
def test_t14_every_expert_has_a_slot_and_every_rank_its_fill(ranks, per_rank, spare, kind, rng):
    num_experts = ranks * per_rank
    num_physical = policy.num_slots(num_experts, ranks, spare)
    loads = np.array([[rng.randrange(0, 500) for _ in range(num_experts)] for _ in range(4)], float)
    slots = policy.place(loads, num_physical, ranks, kind)
    assert len(slots) == num_physical
    assert set(slots) == set(range(num_experts))
    assert policy.place(loads, num_physical, ranks, kind) == slots


def _slow_replicate(loads, num_physical):
    """Section 4.3 word by word, with plain loops."""
    num_experts = len(loads[0])
    n = [1] * num_experts
    for _ in range(num_physical - num_experts):
        credit = [0.0] * num_experts
        for row in loads:
            shares = [row[e] / n[e] for e in range(num_experts)]
            hottest = shares.index(max(shares))
            shares[hottest] = row[hottest] / (n[hottest] + 1)
            credit[hottest] += row[hottest] / n[hottest] - max(shares)
        sums = [sum(row[e] for row in loads) / n[e] for e in range(num_experts)]
        best = max(range(num_experts), key=lambda e: (credit[e], sums[e], -e))
        n[best] += 1
    return n


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_fast_replication_equals_the_slow_one(num_experts, spares, steps, rng):
    # Powers of two and few replicas keep every quotient exact enough for equal ties.
    loads = [[rng.choice((0, 64, 192, 576)) for _ in range(num_experts)] for _ in range(steps)]
    total = num_experts + spares
    fast = policy._replicate_by_window(np.array(loads, dtype=float), total).replicas
    assert sum(fast) == num_experts + spares
    slow = _slow_replicate(loads, num_experts + spares)
    assert _sum_of_peaks(loads, fast) == pytest.approx(_sum_of_peaks(loads, slow))


def _sum_of_peaks(loads, n):
    return sum(max(row[e] / n[e] for e in range(len(n))) for row in loads)


def test_window_is_never_worse_than_the_summed_policy_on_zipf_loads():
    rng = np.random.default_rng(11)
    base = 1.0 / np.arange(1, 65) ** 0.9
    loads = rng.poisson(2_000 * base / base.sum(), size=(50, 64))[:, rng.permutation(64)]
    loads = loads.astype(float)
    by_window = policy.moe_lb(loads, policy.place(loads, 80, 16), 16)
    by_sums = policy.moe_lb(loads, policy.place(loads, 80, 16, Policy.GLOBAL), 16)
    start = policy.moe_lb(loads, policy.initial_slots(64, 80), 16)
    assert by_window <= by_sums + 1e-9
    assert by_sums < start
