from __future__ import annotations

import pytest

from services.lb.prefill.wire import prefix_key

BLOCK = 128


def key_of(num_tokens: int, num_present: int, min_follow_tokens: int = 2_048) -> int | None:
    """Returns the number of the block whose key it is; keys are 32 bytes, here all the number."""
    keys = b"".join(bytes([index]) * 32 for index in range(num_tokens // BLOCK))
    key = prefix_key(keys, num_tokens, num_present, min_follow_tokens)
    return key[0] if key else None


def test_p_35_the_key_lies_as_far_into_the_cold_part_as_others_must_share():
    assert key_of(10_000, 0) == 2_048 // BLOCK - 1
    for num_present in range(0, 6_000, BLOCK):
        block = key_of(10_000, num_present)
        assert block is not None
        assert 2_048 <= (block + 1) * BLOCK - num_present < 2_048 + 1_024


def test_p_35_equal_prompts_with_slightly_different_hits_get_one_key():
    assert {key_of(10_000, num_present) for num_present in range(2_176, 3_073, BLOCK)} == {39}
    # Near the end all of them have the last whole block.
    assert {key_of(5_510, num_present) for num_present in range(3_200, 3_457, BLOCK)} == {42}


@pytest.mark.parametrize("num_present", [3_500, 5_000])
def test_p_35_too_little_that_is_cold_has_no_key(num_present):
    assert key_of(5_510, num_present) is None


def test_a_prompt_without_keys_or_with_too_few_has_none():
    assert prefix_key(b"", 5_000, 0, 2_048) == b""
    assert prefix_key(b"x" * 32 * 7, 5_000, 0, 2_048) == b""
