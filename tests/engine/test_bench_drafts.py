"""The benchmark of drafts stays runnable on the model of the repository; no time is judged."""

from __future__ import annotations

import pytest
import torch

from services.engine.model.checkpoint import CheckpointReader
from services.engine.model.config import ModelConfig
from services.engine.model.network import load_network
from tests.bench.bench_drafts import DEFAULT_TO, MODES, VOCABULARY, measure

pytestmark = pytest.mark.engine


def test_drafts_change_no_answer_and_give_several_tokens_a_step():
    torch.set_num_threads(1)
    config = ModelConfig.load(DEFAULT_TO)
    with CheckpointReader(DEFAULT_TO, config) as source:
        network = load_network(config, source)
    # Raises when an answer with drafts is another one.
    lines = measure(network, DEFAULT_TO / VOCABULARY, rounds=1, batches=(1, 3))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [(row[0], row[1]) for row in rows] == [(b, mode) for b in "13" for mode in MODES]
    for _, mode, rate, _, per_step, _ in rows:
        assert float(rate) > 0
        assert (float(per_step) > 1.5) == (mode != "off")
