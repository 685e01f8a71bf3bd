"""Intervals: against published examples, and against what they promise."""

from __future__ import annotations

import random

import pytest

from services.engine.evaluation.statistics import paired_difference, share


def pairs(both, lost, gained, neither):
    first = [True] * (both + lost) + [False] * (gained + neither)
    second = [True] * both + [False] * lost + [True] * gained + [False] * neither
    return first, second


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), 857-872, table I: the score method.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)],
)
def test_wilson_intervals_are_those_of_the_literature(right, asked, low, high):
    found = share(right, asked)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_equal_answers_differ_by_nothing_within_bounds_that_shrink_with_their_number():
    widths = []
    for num in (10, 100, 1000):
        found = paired_difference(*pairs(num, 0, 0, 0))
        assert found.value == 0
        assert 0 in found
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.01


def test_the_difference_changes_sign_with_the_order_and_stays_possible():
    rng = random.Random(1)
    for _ in range(200):
        cells = [rng.randrange(12) for _ in range(4)]
        if not sum(cells):
            continue
        first, second = pairs(*cells)
        found, back = paired_difference(first, second), paired_difference(second, first)
        assert found.value == pytest.approx(-back.value)
        assert (found.low, found.high) == (pytest.approx(-back.high), pytest.approx(-back.low))
        assert -1 - 1e-9 <= found.low <= found.value <= found.high <= 1 + 1e-9


def test_nineteen_of_twenty_intervals_hold_the_true_difference():
    rng = random.Random(2)
    shares = [(0.7, 0.05, 0.1), (0.9, 0.02, 0.02), (0.3, 0.3, 0.1)]  # both, lost, gained
    for both, lost, gained in shares:
        kept = 0
        for _ in range(400):
            cells = [0, 0, 0, 0]
            for _ in range(60):
                draw = rng.random()
                at = (draw > both) + (draw > both + lost) + (draw > both + lost + gained)
                cells[at] += 1
            kept += gained - lost in paired_difference(*pairs(*cells))
        assert kept >= 0.93 * 400


def test_nothing_asked_says_nothing():
    assert share(0, 0).high == 1
    assert paired_difference([], []).low == -1
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_difference([True], [])
