"""T-PRE-5: what buckets and stealing cost on the conversation trace, one request at a time."""

import pytest

from services.common.cost_model import CostModel
from services.lb.prefill.policy import Steal
from services.lb.sim import prefill_sim
from services.lb.sim.trace import TraceRequest, data_folder, read_trace


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
    outcome = prefill_sim.replay(jobs, prefill_sim.PrefillSetup(), steal)
    assert round(outcome.mean_wait_s, 2) == expected_s


def test_t_pre_5_mean_wait_of_one_shared_fifo(jobs):
    outcome = prefill_sim.replay(jobs, prefill_sim.PrefillSetup(), Steal.OFF, buckets=False)
    assert round(outcome.mean_wait_s, 2) == 3.86


def test_t_pre_5_mean_wait_of_round_robin(jobs):
    assert round(prefill_sim.replay_round_robin(jobs, 16).mean_wait_s, 1) == 69.9


def test_a_trace_with_a_broken_line_names_the_line(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n{}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


def test_ur_51_a_popular_prefix_pins_no_traffic_to_one_engine():
    # 90% of requests share one 8k prefix. Engines pull: nobody is chosen for what it holds.
    shared = tuple(range(16))
    trace = [
        TraceRequest(0.1 * i, 8_192 + 500, 10, (*shared, 1_000 + i))
        if i % 10
        else TraceRequest(0.1 * i, 8_192 + 500, 10, tuple(range(10_000 * i, 10_000 * i + 17)))
        for i in range(1, 2_000)
    ]
    setup = prefill_sim.PrefillSetup(num_engines=4, start_lanes=(2, 1, 1))
    jobs = prefill_sim.jobs_of(trace, setup, CostModel())
    outcome = prefill_sim.replay(jobs, setup, Steal.ANY)
    assert outcome.imbalance <= 1.25
