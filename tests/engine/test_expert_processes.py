"""Expert ranks as processes: two of them hold one network's experts and answer their own requests.

Real processes over gloo, through the runner that engines use. Source: model.md, section 21.4 (9);
engine.md, sections 2.10, 4.2 and 4.5.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.model.presets import NANO
from services.engine.model.tests.kit import INVARIANT, Driver, network, prompt

pytestmark = pytest.mark.engine

RANK = Path(__file__).with_name("expert_rank.py")


def run_ranks(num_ranks: int, plan: dict) -> list[dict]:
    """Runs the ranks to their end; returns what each reports. No process outlives this call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(num_ranks), store, json.dumps(plan)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        told = [process.communicate(timeout=280) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(ranks, told, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


@pytest.mark.timeout(300)
def test_two_processes_answer_as_one_and_move_experts_between_steps():
    """Ranks have other requests, other lengths, and one is idle while the other works."""
    plan = {
        "0": {"prompts": [30, 11], "tokens": 12, "move": True},
        "1": {"prompts": [45], "tokens": 4},
    }
    told = run_ranks(2, plan)
    alone = network(NANO, INVARIANT, predictable=True)
    for rank, wanted in plan.items():
        driver = Driver(alone)
        for at, num in enumerate(wanted["prompts"]):
            said = driver.generate(prompt(num, 10 * int(rank) + at), wanted["tokens"], seq=at + 1)
            assert told[int(rank)]["said"][at] == said
    # Each process holds half of the slots, replicas included, and both know the new placement.
    assert told[0]["slots_held"] == told[1]["slots_held"] == 5
    assert told[0]["slots"] == told[1]["slots"] != told[0]["slots_before"]
    assert sum(map(sum, told[0]["loads"])) > 0
    assert told[0]["moved"] == told[1]["moved"] == 1


@pytest.mark.timeout(300)
def test_a_rank_whose_peer_dies_says_so():
    told = run_ranks(2, {"0": {"then_lost": True}, "1": {"dies": True}})
    assert "rank of the expert group is gone" in told[0]["lost"]
