import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.cost_model import CostModel
from services.engine.layout import Geometry
from services.prefill.scheduler import (
    ZERO_FILL,
    Ledger,
    LoadRow,
    Pool,
    Resume,
    Span,
    StepLimits,
    StopReason,
    Waiting,
    clip,
    cut_for_images,
    load_deadline_s,
    paged_segments,
    pick_rank,
    plan_step,
    resume_point,
    swa_store_position,
    window_segments,
    window_start,
)

FLASH = Geometry()
NANO = Geometry(block_tokens=8, window=8, keep_tokens=16)
COST = CostModel(50_000, 2_000, 0.02, 0.01)
WIDE = Pool(num_blocks=1 << 20, free_blocks=1 << 20, free_slots=1 << 10)
LIMITS = StepLimits(
    budget_ns=100_000_000, max_batched_tokens=1 << 20, max_seqs=64, max_sum_k=1 << 30
)


def plan(fifo, limits=LIMITS, pool=WIDE, cost=COST):
    return plan_step(fifo, pool, limits, cost)


def sizes(result):
    return [(chunk.key, chunk.num_tokens) for chunk in result.chunks]


# --- ranks and the ledger (1.4, T3) ---------------------------------------------------------------


def test_the_worked_example_of_1_4_spreads_by_predicted_cost():
    ledger, ranks, charges = Ledger(4), [], []
    for index, (q, c) in enumerate(
        [(12000, 0), (500, 60000), (500, 0), (8000, 8000), (200, 0), (3000, 0)]
    ):
        rank = pick_rank(ledger.outstanding_ns)
        charges.append(COST.charge(q, c))
        ledger.charge(str(index), rank, charges[-1])
        ranks.append(rank)
    assert charges == [25_490_000, 1_652_500, 1_052_500, 17_970_000, 450_400, 6_140_000]
    assert ranks == [0, 1, 2, 3, 2, 2]
    assert ledger.outstanding_ns == [25_490_000, 1_652_500, 7_642_900, 17_970_000]


def test_t_pre_3_the_least_loaded_rank_wins_ties_to_the_lowest():
    assert pick_rank([90_000_000, 70_000_000, 70_000_000, 120_000_000]) == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 3), st.integers(0, 6), st.booleans()),
        max_size=40,
    )
)
def test_t3_the_ledger_returns_to_zero_whatever_is_cut_or_aborted(requests):
    ledger = Ledger(4)
    for index, (num_tokens, rank, cuts, aborted) in enumerate(requests):
        key = str(index)
        ledger.charge(key, rank, COST.charge(num_tokens, 0))
        start, step = 0, max(1, num_tokens // (cuts + 1))
        while start < num_tokens:
            num = min(step, num_tokens - start)
            ledger.paid(key, COST.charge(num, start))
            start += num
            if aborted and start > num_tokens // 2:
                break
        assert min(ledger.outstanding_ns) >= 0
        ledger.settle(key)
        ledger.settle(key)
    assert ledger.outstanding_ns == [0, 0, 0, 0]


# --- one step (1.6) ----------------------------------------------------------------------------


def fifo_of_1_6():
    # (remaining, c): prompts of c + remaining tokens of which c are present.
    pairs = [(2000, 0), (9000, 30000), (64000, 0)]
    return [Waiting(str(i), c + left, c) for i, (left, c) in enumerate(pairs)]


def test_the_worked_example_of_1_6_where_the_token_cap_binds():
    cost = CostModel(50_000, 2_000, 0.02, 0.01, step0_ns=5_000_000)
    limits = StepLimits(100_000_000, 16_384, 64, 1 << 30)
    result = plan(fifo_of_1_6(), limits, cost=cost)
    assert sizes(result) == [("0", 2000), ("1", 9000), ("2", 5384)]
    assert result.left_ns == 55_542_125
    assert [chunk.last for chunk in result.chunks] == [True, True, False]


def test_the_worked_example_of_1_6_where_the_budget_binds():
    cost = CostModel(50_000, 2_000, 0.02, 0.01, step0_ns=5_000_000)
    limits = StepLimits(100_000_000, 65_536, 64, 1 << 30)
    assert sizes(plan(fifo_of_1_6(), limits, cost=cost)) == [
        ("0", 2000),
        ("1", 9000),
        ("2", 29_073),
    ]


def test_a_budget_too_small_slows_the_engine_and_never_stops_it():
    limits = StepLimits(budget_ns=1, max_batched_tokens=8192, max_seqs=8, max_sum_k=1 << 20)
    assert sizes(plan([Waiting("a", 1000, 0), Waiting("b", 10, 0)], limits)) == [("a", 128)]
    assert sizes(plan([Waiting("a", 100, 0)], limits)) == [("a", 100)]


def test_a_small_request_never_overtakes_one_that_waits_for_blocks():
    pool = Pool(num_blocks=100, free_blocks=5, free_slots=4)
    result = plan(
        [Waiting("big", 1280, 0, blocks_needed=10), Waiting("small", 10, 0, 1)], pool=pool
    )
    assert result.chunks == []
    assert result.stopped is StopReason.BLOCKS


def test_ur_59_a_request_that_never_fits_is_rejected_and_the_others_go_on():
    pool = Pool(num_blocks=64, free_blocks=63, free_slots=4)
    result = plan([Waiting("huge", 8320, 0, blocks_needed=65), Waiting("ok", 10, 0, 1)], pool=pool)
    assert result.rejected == ["huge"]
    assert sizes(result) == [("ok", 10)]


def test_terminal_requests_are_dropped_and_cost_nothing():
    result = plan([Waiting("gone", 1000, 0, terminal=True), Waiting("ok", 10, 0)])
    assert result.dropped == ["gone"]
    assert sizes(result) == [("ok", 10)]


def test_no_slot_no_seat_and_no_sum_of_lengths_end_the_walk():
    no_slot = Pool(100, 100, free_slots=0)
    assert plan([Waiting("a", 10, 0, needs_slot=True)], pool=no_slot).stopped is StopReason.BLOCKS
    one_seat = StepLimits(10**9, 8192, 1, 1 << 20)
    assert plan([Waiting("a", 10, 0), Waiting("b", 10, 0)], one_seat).stopped is StopReason.SEQS
    short = StepLimits(10**9, 8192, 8, 15)
    assert sizes(plan([Waiting("a", 10, 0), Waiting("b", 10, 0)], short)) == [("a", 10)]


def test_alignment_holds_for_every_chunk_but_the_last_of_a_prompt():
    limits = StepLimits(100_000_000, 1 << 20, 64, 1 << 30, align=16)
    for start, num in ((0, 41_392), (16_384, 37_040), (65_536, 27_840), (262_144, 13_536)):
        result = plan([Waiting("a", start + 900_000, start)], limits)
        assert result.chunks[0].num_tokens == num
    assert sizes(plan([Waiting("a", 37, 0), Waiting("b", 5, 0)], limits)) == [("a", 37), ("b", 5)]


def test_a_forced_cut_point_ends_the_chunk_there_even_a_short_one():
    result = plan([Waiting("a", 1000, 0, cut_points=(40, 896))])
    assert sizes(result) == [("a", 40)]
    assert sizes(plan([Waiting("a", 1000, 40, cut_points=(40, 896))])) == [("a", 856)]


def test_a_chunk_never_ends_inside_an_image():
    image = [Span(100, 300)]
    assert cut_for_images(0, 200, image, room=1000, may_extend=True) == 300
    assert cut_for_images(0, 200, image, room=250, may_extend=True) == 100
    assert cut_for_images(0, 200, image, room=1000, may_extend=False) == 100
    assert cut_for_images(0, 100, image, room=1000, may_extend=False) == 100  # at its first token
    assert cut_for_images(0, 300, image, room=1000, may_extend=False) == 300
    # A chunk that begins at the image ends the walk unless it may grow.
    assert cut_for_images(100, 50, image, room=1000, may_extend=False) == 0
    # An image longer than a step is cut after all: a step always progresses.
    assert cut_for_images(100, 50, image, room=60, may_extend=True) == 50


@settings(max_examples=120)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 400)), min_size=1, max_size=8),
    budget_us=st.integers(1, 20_000),
    align=st.sampled_from([1, 4, 16]),
    blocks=st.integers(2, 60),
)
def test_t4_every_request_finishes_in_order_and_within_the_limits(
    prompts, budget_us, align, blocks
):
    """An adversarial mix runs to its end: no starvation, FIFO completion, limits held."""
    limits = StepLimits(budget_us * 1000, 2048, 4, 6000, align=align)
    waiting = [
        Waiting(str(i), num, 0, FLASH.num_blocks(num), True) for i, (num, _) in enumerate(prompts)
    ]
    free, slots, done, rejected = blocks - 1, 3, [], []
    for _ in range(10_000):
        if not waiting:
            break
        result = plan(waiting, limits, Pool(blocks, free, slots))
        assert sum(-(-c.num_tokens // align) * align for c in result.chunks) <= 2048
        assert len(result.chunks) <= 4
        if len(result.chunks) > 1:
            assert sum(c.cost_ns for c in result.chunks[:-1]) <= limits.budget_ns
        rejected += result.rejected
        assert result.chunks or result.rejected, "a step must progress"
        waiting = [w for w in waiting if w.key not in result.rejected]
        for chunk in result.chunks:
            at = next(i for i, w in enumerate(waiting) if w.key == chunk.key)
            request = waiting[at]
            if request.needs_slot:
                free, slots = free - request.blocks_needed, slots - 1
            if chunk.last:
                done.append(int(chunk.key))
                free, slots = free + FLASH.num_blocks(request.num_tokens), slots + 1
                del waiting[at]
            else:
                waiting[at] = Waiting(chunk.key, request.num_tokens, chunk.start + chunk.num_tokens)
    assert not waiting
    assert done == sorted(done)
    assert len(done) + len(rejected) == len(prompts)
    assert (free, slots) == (blocks - 1, 3)


# --- hits (1.8, kvcache-and-balancing.md 10) -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_tokens", "stored", "swa_at", "hit", "forward"),
    [
        ("T-HIT-1", 1000, 896, {768}, 768, 232),
        ("T-HIT-2", 1000, 896, {896}, 640, 360),
        ("T-HIT-3", 261, 128, {128}, 0, 261),
        ("T-HIT-4", 262, 128, {128}, 128, 134),
        ("T-HIT-4b", 262, 128, set(), 0, 262),
        ("T-HIT-5", 3700, 3456, {3456, 2944}, 3456, 244),
        ("T-HIT-6", 3520, 3456, {3456, 2944}, 3200, 320),
        ("T-HIT-6 keeping two", 3520, 3456, {3456, 3328, 2944}, 3328, 192),
        ("T-HIT-7", 3590, 3456, {3456}, 3456, 134),
        ("T-HIT-8", 1_048_576, 1_048_576, {1_048_320}, 1_048_320, 256),
    ],
)
def test_t_hit_the_engine_agrees_with_the_store(name, num_tokens, stored, swa_at, hit, forward):
    resume = resume_point(num_tokens, stored, swa_at, FLASH)
    assert resume.hit == hit, name
    assert num_tokens - resume.start == forward, name


def test_the_caps_of_1_8():
    for num_tokens, cap in ((1000, 768), (262, 128), (261, 0), (134, 0), (1, 0)):
        assert resume_point(num_tokens, 1 << 20, {cap}, FLASH).hit == cap


def test_a_state_one_block_earlier_is_exact_and_preferred_to_a_cut_window():
    assert resume_point(1000, 896, {640}, FLASH) == Resume(640, 640, 0, 768, 640)
    assert not resume_point(1000, 896, {640}, FLASH).replayed_inexact
    cut = resume_point(1000, 896, set(), FLASH)
    assert cut == Resume(640, 640, 640, 768, None)
    assert cut.replayed_inexact
    assert cut.num_replayed == 128
    # A replay from the very start sees whole windows: exact.
    assert not resume_point(262, 128, set(), FLASH).replayed_inexact


def test_the_window_of_a_replayed_row_begins_at_the_replay_in_every_chunk():
    assert window_start(700, 640, FLASH) == 640
    assert window_start(800, 640, FLASH) == 673
    assert window_start(5, 0, FLASH) == 0


def test_t_swa_pos_one_token_is_left_out():
    examples = ((0, 0), (100, 0), (128, 0), (129, 128), (256, 128), (257, 256), (1000, 896))
    for num_tokens, position in (*examples, (1024, 896), (1025, 1024), (3000, 2944)):
        assert swa_store_position(num_tokens, FLASH) == position
    assert swa_store_position(17, NANO) == 16


def test_the_window_before_the_stored_position_is_still_in_a_prefill_ring():
    for num_tokens in range(129, 2000):
        position = swa_store_position(num_tokens, FLASH)
        assert num_tokens - FLASH.prefill_ring <= max(0, position - FLASH.ring)


def test_truncation_keeps_the_last_tokens_and_at_least_one_row():
    assert clip(1000, 0, 600, FLASH) == 599
    assert clip(1000, 600, 400, FLASH) == 260
    assert 400 - clip(1000, 600, 400, FLASH) == 140
    assert clip(100, 0, 100, FLASH) == 0


def test_keeping_too_few_tokens_is_a_start_up_error():
    with pytest.raises(ValueError, match="keep_tokens"):
        Geometry(keep_tokens=133)


# --- load plans (1.7) ----------------------------------------------------------------------------


def test_the_window_examples_of_1_7():
    assert window_segments(300, 0, 7, 134, 128) == [LoadRow(7, 38, 134, 0), LoadRow(7, 0, 32, 96)]
    assert window_segments(50, 0, 7, 134, 128) == [
        LoadRow(ZERO_FILL, 0, 78, 0),
        LoadRow(7, 0, 50, 78),
    ]
    assert window_segments(0, 0, 7, 134, 128) == [LoadRow(ZERO_FILL, 0, 128, 0)]


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_a_window_plan_covers_exactly_one_window_without_overlap(start, valid_start):
    rows = window_segments(start, valid_start, 3, FLASH.ring, FLASH.window)
    at = 0
    for row in rows:
        assert row.destination == at
        assert row.length > 0
        at += row.length
        if row.source != ZERO_FILL:
            assert row.end_slot <= FLASH.ring
            # The slot holds the position its destination stands for.
            position = start - FLASH.window + row.destination
            assert position % FLASH.ring == row.first_slot
            assert position >= valid_start
    assert at == FLASH.window


def test_a_paged_plan_is_cut_at_block_edges_and_never_empty():
    assert paged_segments(150, [9, 4, 6], 64) == [
        LoadRow(9, 0, 64, 0),
        LoadRow(4, 0, 64, 64),
        LoadRow(6, 0, 22, 128),
    ]
    assert paged_segments(0, [], 64) == [LoadRow(ZERO_FILL, 0, 1, 0)]


def test_the_load_deadline_grows_with_the_hit_and_is_capped():
    assert load_deadline_s(0) == 2.0
    assert load_deadline_s(10_240) == pytest.approx(3.0)
    assert load_deadline_s(1 << 20) == 30.0
