"""T-PRE-5: what buckets and stealing cost on the conversation trace, one request at a time."""

import pytest

from services.common.cost_model import CostModel
from services.lb.prefill.policy import Steal
from services.lb.sim import prefill_sim
from services.lb.sim.trace import data_folder, read_trace


@pytest.fixture(scope="module")
def jobs():
    trace = read_trace(data_folder() / "kv-traces" / "conversation_trace.jsonl")
    return prefill_sim.jobs_of(trace, prefill_sim.PrefillSetup(), CostModel())


def test_t_pre_5_the_work_is_scaled_to_the_load(jobs):
    assert len(jobs) == 12_031
    assert sum(job.work_s for job in jobs) == pytest.approx(0.85 * 16 * 3_536.999)


@pytest.mark.parametrize(
    ("steal", "expected_s"), [(Steal.OFF, 6.65), (Steal.SHORTER, 5.06), (Steal.ANY, 4.19)]
)
def test_t_pre_5_mean_wait_with_buckets(jobs, steal, expected_s):
    wait_s = prefill_sim.mean_wait_s(jobs, prefill_sim.PrefillSetup(), steal)
    assert round(wait_s, 2) == expected_s


def test_t_pre_5_mean_wait_of_one_shared_fifo(jobs):
    wait_s = prefill_sim.mean_wait_s(jobs, prefill_sim.PrefillSetup(), Steal.OFF, buckets=False)
    assert round(wait_s, 2) == 3.86


def test_t_pre_5_mean_wait_of_round_robin(jobs):
    assert round(prefill_sim.round_robin_mean_wait_s(jobs, 16), 1) == 69.9


def test_a_trace_with_a_broken_line_names_the_line(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n{}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)
