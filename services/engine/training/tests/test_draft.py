"""The draft head in training drafts what the engine's would."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.engine.model.checkpoint import RandomSource
from services.engine.model.presets import NANO
from services.engine.model.tests.naive import Naive
from services.engine.training.acceptance import Trials, calibration, fit_temperatures, trials
from services.engine.training.draft import DraftTrainer, anchors
from services.engine.training.parameters import from_source
from services.engine.training.rows import Answer, Row

pytestmark = pytest.mark.engine

EOS = 1


def test_drafts_and_confidences_are_those_of_the_slow_network():
    torch.set_num_threads(1)
    source = RandomSource(NANO, 1)
    ids = np.random.default_rng(5).integers(3, 240, 48)
    loss = np.zeros(48, bool)
    loss[20:40] = True
    row = Row(ids.astype(np.int32), loss, (Answer("talk", 20, 40, 0, False),))
    head = DraftTrainer(from_source(NANO, source), config=NANO)
    found = trials(head, [row])
    slow = Naive(NANO, source)
    trace = slow.run(ids.tolist())
    for at in (19, 24):
        features = {p: f for p, f in trace.features.items() if p <= at}
        drafts, confidences = slow.draft(features, at, int(ids[at + 1]))
        number = at - 19
        chances = 1 / (1 + np.exp(-found.raw[number]))
        np.testing.assert_allclose(chances, confidences, atol=1e-4)
        said = [int(trace.logits[at + 1 + i].argmax()) for i in range(5)]
        assert found.right[number].tolist() == [a == b for a, b in zip(drafts, said, strict=True)]


def test_anchors_lie_in_answers_and_look_no_further_than_their_end():
    ids = torch.full((1, 32), 9)
    loss = torch.zeros(1, 32, dtype=torch.bool)
    loss[0, 8:14] = True
    ids[0, 13] = EOS
    found = anchors(ids, loss, 100, 5, EOS, 0)
    # The golden token, one further, is of the answer and does not end it.
    assert found.at.tolist() == [7, 8, 9, 10, 11]
    assert found.inside.sum(1).tolist() == [5, 4, 3, 2, 1]
    some = anchors(ids, loss, 3, 5, EOS, 0)
    assert len(some.at) == 3
    assert set(some.at.tolist()) < set(found.at.tolist())


def test_a_temperature_makes_boastful_confidences_honest():
    rng = np.random.default_rng(1)
    chance = rng.uniform(0.05, 0.95, (4000, 1))
    right = rng.random((4000, 1)) < chance
    everywhere = np.ones_like(right)
    raw = 2.5 * np.log(chance / (1 - chance))  # twice and a half too sure
    found = Trials(raw, right, everywhere, everywhere, np.full(4000, "talk"))
    fitted = fit_temperatures(found)
    assert fitted[0] == pytest.approx(2.5, rel=0.15)
    before, _ = calibration(1 / (1 + np.exp(-raw[:, 0])), right[:, 0])
    after, _ = calibration(1 / (1 + np.exp(-raw[:, 0] / fitted[0])), right[:, 0])
    assert after < before / 3
