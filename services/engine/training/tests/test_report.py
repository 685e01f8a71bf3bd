"""The figures of the model card."""

from __future__ import annotations

import json

import numpy as np
import pytest

from services.engine.training import plots
from services.engine.training.acceptance import Trials
from services.engine.training.report import put_between, tables

pytestmark = pytest.mark.engine

TRIALS = Trials(
    raw=np.array([[2.0, -1.0], [0.5, 0.5], [1.0, 3.0]]),
    right=np.array([[True, True], [True, False], [False, True]]),
    tested=np.array([[True, True], [True, True], [True, False]]),
    inside=np.array([[True, True], [True, True], [True, False]]),
    kinds=np.array(["talk", "fact", "talk"]),
)


def test_acceptance_counts_a_draft_only_where_those_before_it_were_accepted():
    assert TRIALS.by_position() == pytest.approx([2 / 3, 1 / 2])
    assert TRIALS.accepted.tolist() == [2, 1, 0]
    assert TRIALS.by_kind() == {"fact": (1.0, 1), "talk": (2.0, 1)}


def test_the_card_has_a_row_for_every_kind_that_was_asked():
    scores = {"plain": {"talk": [3, 4]}, "thinking": {"json": [1, 2]}, "recall_by_distance": {}}
    scores["recall_by_distance"] = {"64": [9, 10]}
    drafts = {
        "by_position": [0.9, 0.8],
        "mean_accepted": 1.5,
        "mean_where_all_fit": 1.7,
        "by_kind": {"copy_words": [1.9, 30]},
        "calibration_error": {"plain": 0.08, "fitted": 0.03},
    }
    text = tables({"lengths": {"384": scores, "768": scores}, "drafts": drafts})
    assert "| talk | 0.75 (4) | 0.75 (4) |" in text
    assert "| json, thinking | 0.50 (2) | 0.50 (2) |" in text
    assert "| 64 to 128 tokens | 0.90 (10) | 0.90 (10) |" in text
    assert "| accepted, given those before | 0.90 | 0.80 | 1.50 | 1.70 |" in text
    assert "copy words 1.9" in text
    assert "0.030 (without temperatures 0.080)" in text


def test_figures_stand_between_their_marks():
    card = "a\n<!-- scores -->\nold\n<!-- /scores -->\nb\n"
    assert put_between(card, "scores", "new") == card.replace("old", "new")
    assert put_between(put_between(card, "scores", "x"), "scores", "old") == card
    with pytest.raises(ValueError, match="no marks for scores"):
        put_between("nothing", "scores", "new")


def test_plots_are_the_same_bytes_each_time(tmp_path):
    log = tmp_path / "log.jsonl"
    held = {"loss": 0.5, "plain": {"talk": [1, 2]}}
    facts = [{"step": 10, "loss": 1.0}, {"step": 20, "loss": 0.7}]
    facts += [{"step": step, "length": 96 * step, "held_out": held} for step in (10, 20)]
    log.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    for name in ("a", "b"):
        plots.training(log, tmp_path / f"{name}.svg")
        plots.calibration(TRIALS, np.array([1.2, 0.8]), tmp_path / f"{name}-c.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a-c.svg").read_bytes() == (tmp_path / "b-c.svg").read_bytes()
