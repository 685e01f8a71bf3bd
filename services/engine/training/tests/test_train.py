"""Steps, rates and rules of training; a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.engine.training.evaluate import evaluate
from services.engine.training.losses import balance, target_rows
from services.engine.training.muon import orthogonalised, uses_muon
from services.engine.training.rows import Answer, Corpus, Row
from services.engine.training.schedule import TOKENS_PER_STEP, curriculum
from services.engine.training.tasks.stages import Stage
from services.engine.training.tokenizer import DEFAULT_FILE
from services.engine.training.train import Trainer

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("steps", [16, 400, 4200])
def test_every_step_has_the_same_number_of_tokens_and_its_own_rows(steps):
    schedule = curriculum(steps)
    assert schedule.steps == steps
    seen: set[int] = set()
    for step in range(steps):
        seeds = schedule.row_seeds(step)
        assert len(seeds) * schedule.part(step).length == TOKENS_PER_STEP
        assert not seen & set(seeds)
        seen |= set(seeds)
    lengths = [schedule.part(step).length for step in range(steps)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 768


def test_the_rate_rises_for_forty_steps_and_falls_in_a_line_to_a_twentieth():
    schedule = curriculum(1000)
    rates = [schedule.rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 40)
    assert max(rates) == rates[39] == pytest.approx(1.0)
    falls = -np.diff(rates[40:])
    np.testing.assert_allclose(falls, falls[0], rtol=1e-6)
    assert rates[-1] == pytest.approx(0.05, abs=2e-3)


def test_the_target_of_a_token_is_the_next_one_of_its_own_row():
    loss = torch.tensor([[True, False, True, True], [True, True, False, False]])
    assert target_rows(loss).tolist() == [1, 2, 4]


def test_a_step_of_muon_moves_every_direction_alike():
    x = torch.randn(3, 32, 96, generator=torch.Generator().manual_seed(1))
    x[0, 3] = x[0, 4] * 1.01  # nearly singular
    values = torch.linalg.svdvals(orthogonalised(x))
    assert values[1:].min() > 0.6
    assert values.max() < 1.3
    assert not uses_muon("embed.weight")
    assert not uses_muon("layers.1.ffn.gate.weight")
    assert uses_muon("layers.1.attn.compressor.wkv.weight")
    assert uses_muon("layers.1.engram.wkv.weight")


def test_the_routing_bias_moves_towards_equal_load():
    params = {"a.gate.bias": torch.zeros(3)}
    worst = balance(params, {"a": [10, 4, 1]}, 0.5)
    assert params["a.gate.bias"].tolist() == [-0.5, 0.5, 0.5]
    assert worst == pytest.approx(2.0)


def steps(trainer: Trainer, count: int) -> Trainer:
    corpus = Corpus(DEFAULT_FILE, "train")
    for _ in range(count):
        trainer.advance([corpus.row(Stage.SHORT, 96, seed) for seed in (trainer.step, 1000)])
    return trainer


def test_a_run_that_was_stopped_goes_on_bit_by_bit(tmp_path):
    torch.set_num_threads(1)
    whole = steps(Trainer(curriculum(16), 3), 4)
    first = steps(Trainer(curriculum(16), 3), 2)
    first.save(tmp_path / "state.pt")
    second = Trainer(curriculum(16), 8)  # another seed: everything comes from the file
    second.load(tmp_path / "state.pt")
    steps(second, 2)
    assert second.step == whole.step == 4
    for name, value in whole.params.items():
        assert torch.equal(second.params[name], value), name
    with pytest.raises(ValueError, match="16 steps"):
        Trainer(curriculum(17), 3).load(tmp_path / "state.pt")


class Parrot:
    """A network that says the id after each id."""

    def forward(self, ids: torch.Tensor) -> object:
        return type("Hidden", (), {"x": ids.flatten()})()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x + 1, 64).float()


def test_an_answer_is_right_when_every_token_of_it_is_the_likeliest():
    ids = np.array([5, 9, 10, 11, 20, 30, 31, 33, 40, 41], np.int32)
    loss = np.zeros(10, bool)
    loss[[2, 3, 6, 7, 9]] = True
    answers = (
        Answer("talk", 2, 4, 0, False),
        Answer("recall", 6, 8, 40, False),
        Answer("talk", 9, 10, 0, False),  # cut by the row's end
    )
    scores = evaluate(Parrot(), [Row(ids, loss, answers)])  # type: ignore[arg-type]
    assert scores.plain == {"talk": (1, 1), "recall": (0, 1)}
    assert scores.distance == {32: (0, 1)}
    assert scores.tokens == 5
