"""The hit rule, with the numbers of its worked examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.hit_policy import (
    EndedBy,
    decide,
    swa_candidates,
    swa_kept_positions,
    swa_store_position,
    usable_tokens,
)


def hit(num_prompt: int, num_stored: int, *swa_at: int):
    return decide(num_prompt, num_stored, lambda position: position in swa_at)


def check(
    result, l1: int, hit_tokens: int, num_forward: int, num_prompt: int, replay: bool
) -> None:
    assert (result.stored_tokens, result.hit_tokens, result.replay) == (l1, hit_tokens, replay)
    assert num_prompt - result.replay_from == num_forward


def test_t_hit_1_state_at_the_capped_prefix() -> None:
    check(hit(1000, 896, 768), 768, 768, 232, 1000, False)


def test_t_hit_2_state_only_past_the_cap_replays_one_block() -> None:
    result = hit(1000, 896, 896)
    check(result, 768, 640, 360, 1000, True)
    assert (result.replay_from, result.swa_position, result.ended_by) == (640, None, "swa_miss")


def test_t_hit_3_a_prompt_of_261_hits_nothing() -> None:
    check(hit(261, 128, 128), 0, 0, 261, 261, False)


def test_t_hit_4_a_prompt_of_262_hits_one_block() -> None:
    check(hit(262, 128, 128), 128, 128, 134, 262, False)


def test_t_hit_4b_no_state_replays_from_the_start() -> None:
    result = hit(262, 128)
    check(result, 128, 0, 262, 262, True)
    assert result.replay_from == 0


def test_t_hit_5_second_turn() -> None:
    check(hit(3700, 3456, 3456, 2944), 3456, 3456, 244, 3700, False)


def test_t_hit_6_short_follow_up_falls_below_the_state() -> None:
    check(hit(3520, 3456, 3456, 2944), 3328, 3200, 320, 3520, True)


def test_t_hit_6_with_two_kept_copies_hits_in_full() -> None:
    # 3000 prompt tokens, 500 of output: the boundaries crossed are 3072 ... 3456.
    assert swa_kept_positions(3000, 3500, 1) == (3456,)
    assert swa_kept_positions(3000, 3500, 2) == (3328, 3456)
    check(hit(3520, 3456, *swa_kept_positions(3000, 3500, 2)), 3328, 3328, 192, 3520, False)


def test_t_hit_7_a_follow_up_of_90_tokens_never_meets_the_trap() -> None:
    check(hit(3590, 3456, 3456), 3456, 3456, 134, 3590, False)


def test_t_hit_8_a_million_tokens() -> None:
    check(hit(1_048_576, 1_048_576, 1_048_320), 1_048_320, 1_048_320, 256, 1_048_576, False)


def test_a_state_one_block_earlier_starts_exact_instead_of_a_replay() -> None:
    result = hit(1000, 896, 640)
    check(result, 768, 640, 360, 1000, False)
    assert (result.swa_position, result.ended_by) == (640, EndedBy.SWA_MISS)


@pytest.mark.parametrize(
    ("num_tokens", "position"),
    [(100, None), (128, None), (129, 128), (256, 128), (257, 256), (1000, 896), (3000, 2944)],
)
def test_t_swa_pos(num_tokens, position) -> None:
    assert swa_store_position(num_tokens) == position


def test_copies_kept_at_the_end_of_decode() -> None:
    assert swa_kept_positions(100, 127, 1) == ()
    assert swa_kept_positions(100, 128, 1) == (128,)
    assert swa_kept_positions(128, 255, 2) == ()
    assert swa_kept_positions(128, 600, 0) == ()
    assert swa_kept_positions(128, 600, 9) == (256, 384, 512)


def test_why_a_hit_ended() -> None:
    state_everywhere = lambda _position: True  # noqa: E731
    assert decide(1000, 5000, state_everywhere).ended_by is EndedBy.CAP
    assert decide(1000, 768, state_everywhere).ended_by is EndedBy.CAP
    assert decide(1000, 640, state_everywhere).ended_by is EndedBy.ABSENT
    evicted = decide(1000, 640, state_everywhere, stored_ended_by=EndedBy.EVICTED)
    assert evicted.ended_by is EndedBy.EVICTED
    assert decide(100, 0, state_everywhere).ended_by is EndedBy.CAP
    assert decide(1000, 0, state_everywhere).ended_by is EndedBy.ABSENT


@given(
    st.integers(0, 5000),
    st.integers(0, 6000),
    st.sets(st.integers(0, 40).map(lambda n: n * 8)),
    st.sampled_from([(128, 134), (8, 14), (16, 22)]),
)
def test_the_rule_holds_for_any_input(num_prompt, num_stored, swa_at, sizes) -> None:
    block, ring = sizes
    result = decide(
        num_prompt,
        num_stored,
        lambda position: position in swa_at,
        block_tokens=block,
        ring_tokens=ring,
    )
    assert result.hit_tokens % block == 0 == result.stored_tokens % block
    assert result.stored_tokens <= min(usable_tokens(num_prompt, block, ring), num_stored)
    assert result.stored_tokens - result.hit_tokens in (0, block)
    assert num_prompt - result.stored_tokens >= min(ring, num_prompt)
    if result.swa_position is not None:
        assert result.swa_position in swa_at
        assert result.swa_position in swa_candidates(result.stored_tokens, block)
        assert not result.replay
    if result.replay:
        assert result.stored_tokens not in swa_at
