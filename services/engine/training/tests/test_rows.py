"""Training rows: what is a target, that the codec agrees, and that held-out values stay out."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from services.engine.training.rows import Corpus, Row
from services.engine.training.tasks import facts
from services.engine.training.tasks.draw import Draw, Split, is_held_out
from services.engine.training.tasks.memory import Memory
from services.engine.training.tasks.stages import (
    KINDS,
    Stage,
    dialogues,
)
from services.engine.training.tasks.talk import every_talk
from services.engine.training.tasks.turns import MODEL, Call, Dialogue, Turn
from services.engine.training.tasks.words import NAMES
from services.engine.training.tokenizer import DEFAULT_FILE, special_ids
from services.recipe.client import codec

IDS = special_ids()
LENGTHS = {
    Stage.SHORT: 96,
    Stage.MIXED: 192,
    Stage.LONG: 384,
    Stage.TOOLS: 768,
    Stage.RECALLS: 768,
}
TOKENIZER = codec.Tokenizer(DEFAULT_FILE, num_threads=1, cache_bytes=0)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(DEFAULT_FILE, "train")


def text_of(ids: np.ndarray) -> str:
    return TOKENIZER.decode(ids.astype("<u4").tobytes())


def first_dialogues(split: Split, num_seeds: int) -> Iterator[Dialogue]:
    for stage in Stage:
        for seed in range(num_seeds):
            yield next(dialogues(stage, LENGTHS[stage], seed, split))


@pytest.mark.parametrize("stage", Stage)
def test_rows_are_exactly_as_long_as_asked_and_functions_of_their_seed(stage: Stage) -> None:
    for seed in range(5):
        length = LENGTHS[stage] - seed  # odd ones too
        first = Corpus(DEFAULT_FILE, "train").row(stage, length, seed)
        again = Corpus(DEFAULT_FILE, "train").row(stage, length, seed)
        assert first.ids.shape == first.loss.shape == (length,)
        assert np.array_equal(first.ids, again.ids)
        assert np.array_equal(first.loss, again.loss)
        assert first.answers == again.answers


def test_other_seeds_stages_and_splits_give_other_rows(corpus: Corpus) -> None:
    rows = [corpus.row(Stage.LONG, 384, seed) for seed in (1, 2)]
    rows.append(corpus.row(Stage.MIXED, 384, 1))
    rows.append(Corpus(DEFAULT_FILE, "held_out").row(Stage.LONG, 384, 1))
    assert len({row.ids.tobytes() for row in rows}) == len(rows)


def written_by_assistant(row: Row) -> np.ndarray:
    """Returns a slow, obvious mask: from behind an assistant's header to its end token."""
    mask = np.zeros(len(row.ids), bool)
    is_inside = False
    for index, id_ in enumerate(row.ids.tolist()):
        if index >= 2 and row.ids[index - 2] == IDS["Assistant"]:
            is_inside = True
        mask[index] = is_inside
        if id_ == IDS["Eos"]:
            is_inside = False
    return mask


@pytest.mark.parametrize("stage", Stage)
def test_the_loss_covers_exactly_what_the_assistant_writes(corpus: Corpus, stage: Stage) -> None:
    for seed in range(30):
        row = corpus.row(stage, LENGTHS[stage], seed)
        mask = written_by_assistant(row)
        covered = np.zeros_like(mask)
        for answer in row.answers:
            assert 0 < answer.start < answer.end <= len(row.ids)
            header = row.ids[answer.start - 2 : answer.start].tolist()
            mark = IDS["ThinkingStart" if answer.thinking else "ThinkingEnd"]
            assert header == [IDS["Assistant"], mark]
            is_cut = answer.end == len(row.ids)
            assert is_cut or row.ids[answer.end - 1] == IDS["Eos"]
            covered[answer.start : answer.end] = True
        assert np.array_equal(row.loss, covered)
        # Where reasoning got lost on the way, what is left is context and no target.
        assert not np.any(row.loss & ~mask)
        lost = mask & ~row.loss
        assert not lost.any() or LENGTHS[stage] == 768


def options() -> object:
    return codec.Options(models={MODEL: "v4.1"}).native()


def test_every_question_of_a_conversation_is_the_row_up_to_its_answer(corpus: Corpus) -> None:
    num = 0
    for split in ("train", "held_out"):
        for item in first_dialogues(split, 12):
            encoded = corpus.encode(item)
            assert len(encoded.spans) == len(item.turns)
            for index, (start, _, thinking) in enumerate(encoded.spans):
                is_reasoned = item.thinking and (bool(item.tools) or index == len(item.turns) - 1)
                assert thinking == is_reasoned
                if item.thinking != thinking:
                    continue  # an old answer, whose reasoning the template has dropped
                body = json.dumps(item.question(index).body()).encode()
                asked = codec.encode("chat", body, options(), TOKENIZER, 8192)
                prompt = np.frombuffer(asked.token_ids(), "<u4")
                assert np.array_equal(encoded.ids[:start], prompt)
                num += 1
    assert num > 400


def folded(question_body: dict, ids: np.ndarray) -> dict:
    """Returns the message that the codec's own parser makes of an answer's ids."""
    body = json.dumps(question_body).encode()
    asked = codec.encode("chat", body, options(), TOKENIZER, 8192)
    streams = codec.Streams()
    spec = codec.StreamSpec("r", 0, 1, writes_events=False, keeps_response=True)
    handle = streams.open(asked.parse_state().encode(), TOKENIZER, spec)
    streams.ready(handle, 1, 0, None, 0)
    assert ids[-1] == IDS["Eos"]
    streams.tokens(handle, ids[:-1].astype("<u4").tobytes(), 0)
    streams.finish(handle, "stop", 0)
    return json.loads(streams.folded(handle))["choices"][0]["message"]


def test_the_api_reads_back_what_is_expected_out_of_every_answer(corpus: Corpus) -> None:
    kinds: Counter[str] = Counter()
    for item in first_dialogues("held_out", 15):
        encoded = corpus.encode(item)
        for index, (start, end, thinking) in enumerate(encoded.spans):
            if item.thinking != thinking:
                continue
            turn, question = item.turns[index], item.question(index)
            message = folded(question.body(), encoded.ids[start:end])
            if isinstance(question.expected, Call):
                function = message["tool_calls"][0]["function"]
                assert function["name"] == question.expected.name
                assert json.loads(function["arguments"]) == dict(question.expected.arguments)
            else:
                assert message["content"] == question.expected
            if thinking and index not in item.silent:
                assert message["reasoning_content"] == turn.thought
            kinds[turn.kind] += 1
    assert set(kinds) == set(KINDS)


def values_of(split: Split, num_seeds: int) -> Iterator[str]:
    for item in first_dialogues(split, num_seeds):
        for turn in item.turns:
            yield from turn.values


def test_held_out_values_never_occur_in_training() -> None:
    trained = set(values_of("train", 400))
    tested = set(values_of("held_out", 100))
    assert len(trained) > 5_000
    assert len(tested) > 1_000
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, tested))


def test_no_training_text_asks_for_a_held_out_value() -> None:
    """Looks at the words themselves: what a task forgot to name as its value would be seen here."""
    told = r"(?:project|password|team|boat|secret word|code|number) is ([a-z]+ [a-z]+|\d+)\.?$"
    num = 0
    for item in first_dialogues("train", 200):
        for turn in item.turns:
            found = re.findall(r"The code of [a-z ]+ is (\d+)\.", turn.question)
            if turn.kind.startswith("copy"):
                found.append(turn.answer)
            elif turn.kind == "fact":
                found += re.findall(told, turn.question)
            elif turn.kind in ("sum1", "sum2", "product"):
                left, sign, right = turn.answer.split(" = ")[0].split(" ")
                low, high = sorted((int(left), int(right)))
                found.append(f"{low}{sign}{high}")
            for value in found:
                assert not is_held_out(value), turn
            num += len(found)
    assert num > 1_000


def told_before(item: Dialogue, index: int) -> str:
    turns = item.turns[:index]
    return " ".join(f"{turn.question} {turn.answer}" for turn in turns)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_answer_follows_from_the_context(split: Split) -> None:
    """Works the answers out again, by other means than the tasks do."""
    num: Counter[str] = Counter()
    for item in first_dialogues(split, 60):
        for index, turn in enumerate(item.turns):
            check = CHECKS.get(turn.kind)
            if check:
                check(turn, told_before(item, index))
                num[turn.kind] += 1
    assert set(num) == set(CHECKS)


def check_sum(turn: Turn, _before: str) -> None:
    left, sign, right, total = re.fullmatch(r"(\d+) ([+*]) (\d+) = (\d+)\.", turn.answer).groups()
    numbers = re.findall(r"\d+", turn.question)
    assert numbers == [left, right]
    expected = int(left) + int(right) if sign == "+" else int(left) * int(right)
    assert int(total) == expected
    for term, result in re.findall(r"([\d +]+) = (\d+)\.", turn.thought):
        assert sum(map(int, term.split(" + "))) == int(result)


def check_copy(turn: Turn, _before: str) -> None:
    assert turn.question.endswith(turn.answer)


def check_list(turn: Turn, _before: str) -> None:
    words = re.search(r": ([a-z, ]+)\.", turn.question)[1].split(", ")
    place = re.search(r"The (\w+) word is (\w+)\.", turn.answer)
    names = ["first", "second", "third", "fourth", "fifth", "sixth"][: len(words)]
    position = len(words) - 1 if place[1] == "last" else names.index(place[1])
    assert place[2] == words[position]
    assert place[1] in turn.question


def check_needle(turn: Turn, before: str) -> None:
    told = [s for s in re.findall(r"The [^.]*\.", f"{before} {turn.question}") if s == turn.answer]
    assert told
    key = re.fullmatch(r"The (.*) is \w+\.", turn.answer)[1]
    assert f"the {key}" in turn.question.lower()


def check_recall(turn: Turn, before: str) -> None:
    assert re.search(rf"\b{turn.recalled}\b", before)
    assert turn.recalled in turn.answer
    assert turn.recalled not in turn.question or turn.recalled in turn.answer.split(" is ")[0]


def check_json(turn: Turn, _before: str) -> None:
    values = json.loads(turn.answer)
    assert values
    for value in values.values():
        assert re.search(rf"\b{value}\b", turn.question)


def check_result(turn: Turn, _before: str) -> None:
    assert turn.answer == f"The result is {turn.question}."


def check_call(turn: Turn, _before: str) -> None:
    assert turn.call
    for _, value in turn.call.arguments:
        assert re.search(rf"\b{value}\b", turn.question)


CHECKS = {
    "sum1": check_sum,
    "sum2": check_sum,
    "product": check_sum,
    "copy_words": check_copy,
    "copy_digits": check_copy,
    "list": check_list,
    "needle": check_needle,
    "recall": check_recall,
    "json": check_json,
    "tool_result": check_result,
    "tool_call": check_call,
}


def test_the_same_question_has_one_answer() -> None:
    """Small talk is asked without context: no spelling may stand for two answers."""
    answers: dict[str, set[str]] = {}
    for turn in every_talk():
        answers.setdefault(turn.question.lower().rstrip(".?!"), set()).add(turn.answer)
    assert len(answers) > 1_000
    assert not {asked: said for asked, said in answers.items() if len(said) > 1}


def test_recall_reaches_past_any_window(corpus: Corpus) -> None:
    distances = [
        answer.distance
        for seed in range(60)
        for answer in corpus.row(Stage.TOOLS, 768, seed).answers
        if answer.kind == "recall"
    ]
    assert sum(distance >= 8 * 16 for distance in distances) > 0.25 * len(distances)
    assert all(distance > 0 for distance in distances)


def test_what_is_learned_slowly_comes_more_often_in_training_than_in_tests() -> None:
    def share_of_homes(split: Split) -> float:
        draw = Draw("homes", split)
        keys = [facts.fresh_fact(draw, Memory()).key for _ in range(4000)]
        return sum(key.endswith("'s home") for key in keys) / len(keys)

    def share_of_open_names(split: Split) -> float:
        draw = Draw("names", split)
        return sum(draw.name() not in NAMES for _ in range(4000)) / 4000

    assert share_of_homes("train") > 1.5 * share_of_homes("held_out")
    assert share_of_open_names("train") > 1.5 * share_of_open_names("held_out")


def test_distances_count_the_tokens_since_the_last_mention(corpus: Corpus) -> None:
    turns = (
        Turn("fact", "My code is 471.", "Noted."),
        Turn("copy_words", "Say: old lake", "old lake", recalled="old lake"),
        Turn("recall", "What is my code?", "Your code is 471.", recalled="471"),
    )
    row = corpus.pack([Dialogue(turns)], 43)
    told, _, asked = row.answers
    assert told.distance == 0
    before = text_of(row.ids[: asked.start])
    since = before[before.index("471") + 3 :]
    num_tokens = TOKENIZER.count_full(since)
    assert asked.distance == num_tokens


def test_the_last_turn_is_cut_and_nothing_is_padded(corpus: Corpus) -> None:
    turn = Turn("copy_words", "Say: old lake", "old lake")
    whole = corpus.encode(Dialogue((turn,)))
    row = corpus.pack([Dialogue((turn,))] * 2, len(whole.ids) + whole.spans[0][0] + 1)
    assert row.answers[1].end == len(row.ids)
    assert row.answers[1].end - row.answers[1].start == 1
    assert row.loss[-1]
    with pytest.raises(ValueError, match="tokens, not"):
        corpus.pack([Dialogue((turn,))], 100)
