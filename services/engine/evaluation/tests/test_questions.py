"""What is asked and what counts as right; the whole path is in tests/engine."""

from __future__ import annotations

from collections import Counter

import pytest

from services.engine.evaluation.document import with_section
from services.engine.evaluation.modes import MODES, named
from services.engine.evaluation.questions import KINDS, Said, is_right, pick
from services.engine.evaluation.report import scores_table
from services.engine.evaluation.scoring import Graded, Scores
from services.engine.training.tasks.turns import Call, Question


def test_every_kind_is_asked_as_often_and_the_same_seed_asks_the_same():
    asked = pick(2, seed=4, num_tokens=200)
    assert Counter(item.kind for item in asked) == dict.fromkeys(KINDS, 2)
    assert asked == pick(2, seed=4, num_tokens=200)
    assert asked != pick(2, seed=5, num_tokens=200)
    for item in asked:
        assert item.question.messages[-1]["role"] in ("user", "tool")


def test_what_nobody_can_ask_is_refused_before_anything_starts():
    for kinds, per_kind in ((("nope", "talk"), 1), (KINDS, 0)):
        with pytest.raises(ValueError, match=r"nope; there are|at least one"):
            pick(per_kind, kinds=kinds)
    with pytest.raises(ValueError, match=", ".join(mode.name for mode in MODES)):
        named("nope")


def question(expected):
    return Question("k", ({"role": "user", "content": "?"},), (), None, False, expected)


@pytest.mark.parametrize(
    ("expected", "said", "right"),
    [
        ("Yes.", Said(content="Yes."), True),
        ("Yes.", Said(content="Yes"), False),
        ("Yes.", Said(content="Yes.", calls=(("f", "{}"),)), False),
        (Call("f", (("a", 1),)), Said(calls=(("f", '{"a":1}'),)), True),
        (Call("f", (("a", 1),)), Said(calls=(("f", '{"a":"1"}'),)), False),
        (Call("f", (("a", 1),)), Said(calls=(("f", "{"),)), False),
        (Call("f", (("a", 1),)), Said(content="f"), False),
    ],
)
def test_only_the_whole_answer_is_right(expected, said, right):
    assert is_right(question(expected), said) is right


def test_answers_that_did_not_come_the_modes_way_are_left_out_on_both_sides():
    asked = pick(1, num_tokens=150, kinds=("talk", "fact"))
    scores = Scores(asked)
    said = [Said(content="a"), Said(content="b")]
    scores.by_mode["cold"] = {n: Graded(said[0], right=True, counts=True) for n in (0, 1)}
    scores.by_mode["warm"] = {
        0: Graded(said[1], right=False, counts=True),
        1: Graded(said[1], right=False, counts=False),
    }
    num, difference = scores.difference("cold", "warm")
    assert (num, difference.value) == (1, -1.0)
    assert scores.changed("cold", "warm") == [0]
    text = scores_table(scores)
    assert "1.00 (2)" in text
    assert "0.00 (1)" in text
    assert "1 of 1" in text


def test_modes_are_named_from_one_table():
    assert named("") == MODES
    assert [mode.name for mode in named("warm, cold")] == ["cold", "warm"]
    with pytest.raises(ValueError, match="no mode is named hot"):
        named("cold,hot")


def test_a_section_of_a_document_is_replaced_and_nothing_else():
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert with_section(text, "x", "new") == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    with pytest.raises(ValueError, match="no section y"):
        with_section(text, "y", "new")
