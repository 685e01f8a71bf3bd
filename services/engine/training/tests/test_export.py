"""What is written is what was trained: the engine says the same from the files, token by token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from services.engine.model.checkpoint import CheckpointReader
from services.engine.model.config import ModelConfig
from services.engine.model.network import load_network
from services.engine.model.presets import TINY
from services.engine.model.tests.kit import Driver, prompt
from services.engine.training.draft import TEMPERATURES
from services.engine.training.export import export, gathered, quantise
from services.engine.training.network import TrainingNetwork
from services.engine.training.parameters import from_source, initial, is_draft, is_vision
from services.engine.training.tokenizer import DEFAULT_FILE
from services.engine.training.train import STATE, VOCABULARY

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that ended before its first step, with louder routing biases than it would have."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("run")
    params = {n: p for n, p in initial(TINY, 4).items() if not is_draft(n) and not is_vision(n)}
    for name in params:
        if name.endswith("gate.bias"):
            params[name] = torch.linspace(-0.3, 0.3, len(params[name]))
    torch.save({"params": params}, out / STATE)
    (out / VOCABULARY).write_bytes(DEFAULT_FILE.read_bytes())
    (out / TEMPERATURES).write_text(json.dumps([1.0, 0.9, 0.8, 0.8, 0.7]))
    return out


def test_the_engine_says_from_the_files_what_the_training_network_would(run, tmp_path):
    export(run, tmp_path)
    config = ModelConfig.load(tmp_path)
    ids = prompt(70, 3, 2000)
    with CheckpointReader(tmp_path, config) as source:
        driver = Driver(load_network(config, source))
        network = TrainingNetwork(config, from_source(config, source))
    said = driver.generate(ids, 12, drafts=0)
    with torch.no_grad():
        logits = network.logits(network.forward(torch.tensor([[*ids, *said]])).x)
    assert said == logits[len(ids) - 1 : -1].argmax(1).tolist()
    assert config.system.confidence_temperatures == (1.0, 0.9, 0.8, 0.8, 0.7)


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "quantised"])
def test_every_tensor_comes_back_as_near_as_its_form_allows(run, tmp_path, quantised):
    export(run, tmp_path, quantised=quantised)
    config = ModelConfig.load(tmp_path)
    params = gathered(run)
    with CheckpointReader(tmp_path, config) as source:
        assert source.quantised == quantised
        found = from_source(config, source)
    np.testing.assert_array_equal(found["embed.weight"], found["head.weight"])
    for name, value in params.items():
        error = (found[name] - value).norm() / value.norm().clamp(min=1e-9)
        assert error < (0.2 if quantised else 0.004), name
    assert torch.equal(found["layers.3.ffn.gate.bias_vl"], params["layers.3.ffn.gate.bias"])


def test_files_can_be_quantised_where_the_run_is_gone(run, tmp_path):
    export(run, tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "small")
    export(run, tmp_path / "direct", quantised=True)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors"))
        for name in ("plain", "small", "direct")
    ]
    assert sizes[1] == sizes[2] < 0.6 * sizes[0]
    config = ModelConfig.load(tmp_path / "small")
    assert config == ModelConfig.load(tmp_path / "direct")
    with CheckpointReader(tmp_path / "small", config) as source:
        assert source.quantised
        found = from_source(config, source)
    for name, value in gathered(run).items():
        assert (found[name] - value).norm() / value.norm().clamp(min=1e-9) < 0.2, name
