"""The cost model: worked examples of engine.md 1.4-1.5 and of kvcache-and-balancing.md 12."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.cost_model import (
    CostModel,
    PendingPrompt,
    Sample,
    budget_scale,
    fit,
    plan_chunks,
)

BALANCING = CostModel()  # a = 0.5, b = 1.0, d = 20,000, e = 200,000
ENGINE = CostModel(k0_ns=50_000, k1_ns=2_000, k2_ns=0.02, k3_ns=0.01)
NO_END = 1 << 40


def test_costs_of_the_balancing_document():
    assert BALANCING.cost(3_000, 0) == 64_700_000
    assert BALANCING.cost(5_000, 4_096) == 133_180_000
    assert BALANCING.cost(0, 4_096) == 0


@pytest.mark.parametrize(
    ("budget_ns", "expected"),
    [
        (100_000_000, [41_403, 37_044, 27_847, 13_546, 4_533]),
        (20_000_000, [9_521, 8_276, 5_920, 2_744, 906]),
    ],
)
def test_inversion_gives_the_table_of_the_engine_document(budget_ns, expected):
    present = [0, 16_384, 65_536, 262_144, 1_000_000]
    assert [ENGINE.invert(budget_ns, c, NO_END) for c in present] == expected


def test_inversion_with_alignment_16_gives_the_table_of_the_engine_document():
    present = [0, 16_384, 65_536, 262_144, 1_000_000]
    chunks = [
        plan_chunks(ENGINE, 100_000_000, [PendingPrompt(NO_END, c)], alignment=16)[0]
        for c in present
    ]
    assert chunks == [41_392, 37_040, 27_840, 13_536, 4_528]


def test_inversion_at_its_edges():
    assert ENGINE.invert(52_000, 0, NO_END) == 0
    assert ENGINE.invert(52_001, 0, NO_END) == 1
    assert ENGINE.invert(49_999, 0, NO_END) == 0
    assert ENGINE.invert(100_000_000, 0, 70) == 70
    flat = CostModel(k0_ns=10, k1_ns=0, k2_ns=0, k3_ns=0)
    assert flat.invert(10, 5, 321) == 321
    assert flat.invert(9, 5, 321) == 0


def test_t_pre_4a_one_prompt_against_a_budget_of_300_ms():
    present = [0, 4_096, 100_000, 900_000]
    assert [BALANCING.invert(300_000_000, c, NO_END) for c in present] == [
        11_616,
        10_258,
        2_472,
        325,
    ]


def test_t_pre_4b_three_prompts_fill_one_step():
    queue = [PendingPrompt(3_000, 0), PendingPrompt(5_000, 4_096), PendingPrompt(20_000, 100_000)]
    chunks = plan_chunks(BALANCING, 300_000_000, queue)
    assert chunks == [3_000, 5_000, 846]
    predicted = sum(BALANCING.cost(q, p.num_present) for q, p in zip(chunks, queue, strict=True))
    assert predicted == 299_957_858
    assert plan_chunks(BALANCING, 300_000_000, queue, alignment=128) == [3_000, 5_000, 768]


def test_a_step_progresses_when_the_budget_is_too_small_for_anything():
    assert plan_chunks(BALANCING, 1, [PendingPrompt(500, 0), PendingPrompt(500, 0)]) == [128]
    assert plan_chunks(BALANCING, 1, [PendingPrompt(50, 0)]) == [50]


def test_charges_of_the_rank_example_are_whole_numbers():
    work = [(12_000, 0), (500, 60_000), (500, 0), (8_000, 8_000), (200, 0), (3_000, 0)]
    assert [ENGINE.charge(q, c) for q, c in work] == [
        25_490_000,
        1_652_500,
        1_052_500,
        17_970_000,
        450_400,
        6_140_000,
    ]


TOKENS = st.integers(0, 1 << 20)


@settings(max_examples=500, deadline=None)
@given(
    budget=st.floats(0, 1e13),
    present=TOKENS,
    k=st.tuples(st.floats(0, 1e6), st.floats(1, 1e5), st.floats(0, 10), st.floats(0, 10)),
)
def test_t2_inversion_is_the_exact_maximum_and_monotone(budget, present, k):
    model = CostModel(*k)
    q = model.invert(budget, present, 1 << 20)
    assert model.cost(q, present) <= budget or q == 0
    if q < 1 << 20:
        assert model.cost(q + 1, present) > budget
    assert model.invert(budget, present + 1_000, 1 << 20) <= q
    assert model.invert(budget * 1.5, present, 1 << 20) >= q


@settings(max_examples=200, deadline=None)
@given(q1=st.integers(1, 1 << 20), q2=st.integers(1, 1 << 20), present=TOKENS)
def test_t1_cutting_a_prompt_costs_one_k0(q1, q2, present):
    whole = BALANCING.cost(q1 + q2, present)
    cut = BALANCING.cost(q1, present) + BALANCING.cost(q2, present + q1)
    assert cut - whole == pytest.approx(BALANCING.k0_ns, abs=whole * 1e-12 + 1e-3)


def test_a_fit_finds_the_constants_again():
    grid = [(q, c) for q in (64, 256, 1_024, 4_096, 16_384) for c in (0, 4_096, 65_536)]
    samples = [Sample(q, c, ENGINE.cost(q, c)) for q, c in grid]
    result = fit(samples, version=3)
    assert result is not None
    assert not result.degenerate
    assert result.model.version == 3
    for name in ("k0_ns", "k1_ns", "k2_ns", "k3_ns"):
        assert getattr(result.model, name) == pytest.approx(getattr(ENGINE, name), rel=1e-4)


def test_a_fit_of_few_points_is_flagged_and_leaves_the_quadratic_terms_out():
    result = fit([Sample(q, 0, 1_000 + 10.0 * q) for q in (64, 128, 256)])
    assert result is not None
    assert result.degenerate
    assert (result.model.k2_ns, result.model.k3_ns) == (0, 0)
    assert result.model.k1_ns == pytest.approx(10)


def test_a_poor_fit_is_refused():
    samples = [Sample(q, c, 1e6 if q % 3 else 1e9) for q in range(64, 80) for c in (0, 4_096)]
    assert fit(samples) is None
    assert fit([]) is None


def test_a_negative_constant_is_refused():
    with pytest.raises(ValueError, match="k1_ns"):
        CostModel(k1_ns=-1)


def test_the_budget_scale_is_a_clamped_median_of_recent_steps():
    assert budget_scale([]) == 1.0
    assert budget_scale([9.0] * 100) == 2.0
    assert budget_scale([9.0] * 100 + [1.1] * 64) == 1.1
    assert budget_scale([0.1]) == 0.5
