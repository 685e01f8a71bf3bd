"""T-DEC-2: imbalance of four rules on the conversation trace."""

import pytest

from services.lb.sim import decode_sim
from services.lb.sim.decode_sim import RULES, DecodeSetup
from services.lb.sim.trace import data_folder, read_trace


@pytest.fixture(scope="module")
def trace():
    return read_trace(data_folder() / "kv-traces" / "conversation_trace.jsonl", 6_000)


@pytest.mark.parametrize(
    ("name", "kv_tokens", "requests"),
    [
        ("round-robin", 2.996, 1.561),
        ("least-request", 2.720, 1.093),
        ("least-token", 1.873, 2.006),
        ("pelagos", 1.706, 1.201),
    ],
)
def test_t_dec_2_imbalance_on_the_conversation_trace(trace, name, kv_tokens, requests):
    result = decode_sim.imbalance(trace, DecodeSetup(), RULES[name])
    assert (round(result.kv_tokens, 3), round(result.requests, 3)) == (kv_tokens, requests)


def test_a_trace_too_short_to_sample_is_an_error(trace):
    with pytest.raises(ValueError, match="no sample"):
        decode_sim.imbalance(trace[:10], DecodeSetup(), RULES["pelagos"])
