"""The checkpoint in the repository still answers what its card says."""

from __future__ import annotations

import pytest
import torch

from services.engine.model.checkpoint import CheckpointReader
from services.engine.model.network import load_network
from services.engine.model.tests.kit import Driver
from services.engine.training.evaluate import evaluate, held_out
from services.engine.training.export import DEFAULT_TO, QUANTISED_TO
from services.engine.training.report import load
from services.engine.training.tasks.stages import Stage
from services.engine.training.tokenizer import DEFAULT_FILE
from services.engine.training.vision import VisionTrainer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def head():
    torch.set_num_threads(1)
    return load(DEFAULT_TO)


@pytest.fixture(scope="module", params=[DEFAULT_TO, QUANTISED_TO], ids=["bf16", "quantised"])
def form(request):
    return request.param


@pytest.fixture(scope="module")
def rows():
    return held_out(DEFAULT_FILE, Stage.TOOLS, 768, 8)


def test_what_it_has_learned_is_right_on_rows_it_never_saw(form, rows):
    scores = evaluate(load(form).network, rows)
    assert scores.loss / scores.tokens < 0.1
    learned = (
        *("talk", "copy_words", "copy_digits", "fact", "recall", "needle"),
        *("json", "tool_call", "tool_result"),
    )
    counts = [scores.plain[kind] for kind in learned if kind in scores.plain]
    assert sum(right for right, _ in counts) >= 0.9 * sum(every for _, every in counts) > 20


def test_drafts_change_no_answer_of_the_engine_and_most_are_accepted(head, rows):
    with CheckpointReader(DEFAULT_TO, head.config) as source:
        network = load_network(head.config, source)
    accepted = steps = 0
    for row in rows[:3]:
        answer = next(a for a in reversed(row.answers) if a.end - a.start > 8 and a.end < 768)
        ids, count = row.ids[: answer.start].tolist(), answer.end - answer.start
        plain = Driver(network).generate(ids, count, drafts=0)
        driver = Driver(network)
        said = [driver.start(1, ids)]
        while len(said) < count:
            new = driver.step([1])[1].tokens
            said += [token.token_id for token in new]
            accepted, steps = accepted + len(new) - 1, steps + 1
        assert said[:count] == plain
    assert accepted > steps


def test_four_squares_are_named_in_order(head):
    trainer = VisionTrainer(head.params, DEFAULT_FILE, 1)
    assert trainer.exact(20) >= 0.9
