import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.speculation import (
    Curve,
    StepTimes,
    choose_budget,
    clamp_confidences,
    curve_sizes,
    runtime_sampler_ms,
    runtime_slope,
    split_budget,
    survival,
)
from services.engine.sim.split import split_rows

G = 5
CURVE = Curve((1, 2, 4, 8, 16, 24), (10.0, 10.2, 10.6, 12.0, 15.0, 18.5), sampler_ms=1.0)
FLAT = Curve((24,), (10.0,))
OLD = [
    [0.9, 0.8, 0.7, 0.6, 0.5],
    [0.5] * 5,
    [0.95, 0.95, 0.9, 0.9, 0.8],
    [0.2, 0.9, 0.9, 0.9, 0.9],
]
NEW = [
    [0.6, 0.9, 0.9, 0.9, 0.9],
    [0.9, 0.9, 0.8, 0.5, 0.5],
    [0.95, 0.9, 0.9, 0.2, 0.9],
    [0.1, 0.9, 0.9, 0.9, 0.9],
]


def test_the_survivals_of_3_5():
    assert survival(OLD[0]) == pytest.approx([0.9, 0.72, 0.504, 0.3024, 0.1512])
    assert survival(OLD[2]) == pytest.approx([0.95, 0.9025, 0.8123, 0.7310, 0.5848], abs=1e-4)


def test_the_worked_example_of_3_5():
    survivals = [survival(row) for row in OLD]
    flat = sorted((s for row in survivals for s in row), reverse=True)
    for budget, rate in (
        (4, 0.3448),
        (8, 0.5819),
        (9, 0.5185),
        (15, 0.6973),
        (16, 0.7098),
        (17, 0.5916),
        (24, 0.6331),
    ):
        got = (4 + sum(flat[: budget - 4])) / CURVE.at(budget)
        assert got == pytest.approx(rate, abs=5e-5)
    assert choose_budget(survivals, CURVE, G) == 16
    assert split_budget(16, [survival(row) for row in NEW], G) == [6, 5, 4, 1]


def test_a_fresh_sequence_gets_one_row():
    new = [survival(row) for row in NEW[:3]] + [[0.0] * G]
    assert split_budget(16, new, G) == [6, 5, 4, 1]


def test_a_flat_curve_verifies_everything():
    survivals = [survival(row) for row in OLD]
    assert choose_budget(survivals, FLAT, G) == 24
    assert split_budget(24, survivals, G) == [6, 6, 6, 6]
    assert choose_budget(survivals, Curve(), G) == 24


def test_ties_fill_the_first_sequence():
    ones = [[1.0] * G, [1.0] * G]
    assert split_budget(3, ones, G) == [2, 1]
    assert split_budget(7, ones, G) == [6, 1]
    assert split_budget(9, ones, G) == [6, 3]


def test_equal_rates_keep_the_smaller_budget():
    assert choose_budget([[0.0] * G, [0.0] * G], FLAT, G) == 2


confidence = st.sampled_from([0.0, 1.0, 0.5]) | st.floats(0, 1)
batches = st.lists(st.lists(confidence, min_size=G, max_size=G), min_size=1, max_size=10)


def device_split(budget, survivals):
    """The device's rule, row by row: rank(i, j) counts larger survivals and earlier equal ones."""
    flat = [s for row in survivals for s in row]
    rows = []
    for i in range(len(survivals)):
        taken = 0
        for j in range(G):
            at = i * G + j
            rank = sum(1 for k, s in enumerate(flat) if s > flat[at] or (s == flat[at] and k < at))
            taken += rank < budget - len(survivals)
        rows.append(1 + taken)
    return rows


@settings(max_examples=150)
@given(batches, st.integers(0, 60))
def test_t13_the_split_is_exact_a_prefix_and_equal_to_the_devices(batch, extra):
    survivals = [survival(row) for row in batch]
    budget = min(len(batch) + extra, len(batch) * (G + 1))
    rows = split_budget(budget, survivals, G)
    assert sum(rows) == budget
    assert all(1 <= q <= G + 1 for q in rows)
    assert rows == device_split(budget, survivals)


@pytest.mark.parametrize("seed", range(5))
def test_t13_two_thousand_random_batches_agree_with_the_device(seed):
    rng = random.Random(seed)
    for _ in range(400):
        batch = [
            survival([rng.choice([0.0, 1.0, 0.5, rng.random()]) for _ in range(G)])
            for _ in range(rng.randint(1, 8))
        ]
        budget = rng.randint(len(batch), len(batch) * (G + 1))
        assert split_budget(budget, batch, G) == device_split(budget, batch)


@given(batches, st.integers(1, 30), st.randoms(use_true_random=False))
def test_t13_permuting_the_batch_permutes_the_rows_when_nothing_ties(batch, extra, rng):
    survivals = [survival(row) for row in batch]
    flat = [s for row in survivals for s in row]
    if len(set(flat)) < len(flat):
        return
    budget = min(len(batch) + extra, len(batch) * (G + 1))
    order = list(range(len(batch)))
    rng.shuffle(order)
    rows = split_budget(budget, survivals, G)
    assert split_budget(budget, [survivals[i] for i in order], G) == [rows[i] for i in order]


@given(batches, st.integers(0, 9), st.integers(0, G - 1), st.integers(1, 30))
def test_t13_raising_a_confidence_never_lowers_that_sequences_rows(batch, i, j, extra):
    i %= len(batch)
    budget = min(len(batch) + extra, len(batch) * (G + 1))
    before = split_budget(budget, [survival(row) for row in batch], G)[i]
    raised = [list(row) for row in batch]
    raised[i][j] = min(1.0, raised[i][j] + 0.3)
    assert split_budget(budget, [survival(row) for row in raised], G)[i] >= before


@settings(max_examples=100)
@given(batches)
def test_the_budget_is_the_first_best_of_all(batch):
    survivals = [survival(row) for row in batch]
    curve = Curve((4, 8, 16, 32, 60), (10.0, 11.0, 13.0, 18.0, 30.0))
    flat = sorted((s for row in survivals for s in row), reverse=True)
    num = len(batch)
    rates = []
    expected = float(num)
    for k in range(len(flat) + 1):
        expected += flat[k - 1] if k else 0.0
        rates.append(expected / curve.at(num + k))
    assert choose_budget(survivals, curve, G) == num + rates.index(max(rates))


def test_bad_confidences_are_clamped_and_counted():
    assert clamp_confidences([0.5, math.nan, 1.5, -0.1]) == ([0.5, 0.0, 1.0, 0.0], 3)


def test_curve_sizes_are_powers_then_multiples_then_the_largest():
    assert curve_sizes(5, 5) == (1, 2, 4, 8, 16, 24, 30)
    assert CURVE.padded(5) == 8
    assert CURVE.at(25) is None


def test_online_corrections_need_enough_samples():
    assert runtime_sampler_ms([1.0] * 4, [2.0, 4.0, 6.0]) == 4.0
    assert runtime_sampler_ms([1.0, 2.0, 3.0, 4.0, 5.0], [9.0]) == 3.0
    assert runtime_sampler_ms([], []) == 0.0
    assert runtime_slope({8: [12.8] * 10, 16: [15.0] * 9}, CURVE) == pytest.approx(0.1)
    assert runtime_slope({8: [11.0] * 10}, CURVE) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_t13_the_simulated_device_splits_like_the_cpu(seed):
    rng = random.Random(seed)
    for _ in range(2500):
        batch = [
            [rng.choice([0.0, 1.0, 0.5, rng.random()]) for _ in range(G)]
            for _ in range(rng.randint(1, 8))
        ]
        budget = rng.randint(len(batch), len(batch) * (G + 1))
        cpu = split_budget(budget, [survival(row) for row in batch], G)
        assert split_rows(budget, batch, G) == cpu


def test_a_measured_curve_takes_the_place_of_the_guess_where_steps_were_seen():
    guess = Curve((1, 2, 4, 8), (8.0, 9.0, 10.0, 12.0))
    times = StepTimes(guess, needed=3)
    times.add(1, 50.0)
    times.add(1, 60.0)
    assert times.curve() == guess, "two steps say nothing yet"
    times.add(1, 1000.0)  # one slow step does not count
    assert times.curve().base_ms == (60.0, 67.5, 75.0, 90.0), "the rest keeps the guess's shape"
    for _ in range(3):
        times.add(3, 40.0)  # padded to 4
    assert times.curve().base_ms == (60.0, 67.5, 67.5, 67.5), "times never fall with more rows"
    for _ in range(20):
        times.add(1, 20.0)
        times.add(9, 5.0)  # above the largest size
    assert times.curve().base_ms == (20.0, 22.5, 40.0, 48.0)
