"""Probe conversations: many similar facts, one a block, and a question that needs one of them.

A fact is told once and answered with `Noted.`, so a lost or foreign block shows in the answer, and
in its log-probabilities where the words still hold. Source: small-model.md, section 6.

    corpus = Corpus(DEFAULT_FILE, "held_out")
    for probe in probes(corpus, seed=1, tenant="a", num_blocks=12):
        ask(probe.question)  # its answer stands in probe.blocks and nowhere else
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from services.engine.training.rows import Corpus
from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.turns import Dialogue, Question, Turn
from services.engine.training.tasks.words import NAMES

# Values of one sort take equally many tokens, so that positions do not depend on them.
_CODES: Final = ("code", "door code", "room number")
_PAIRS: Final = ("project", "password", "team", "boat", "secret word")
_NOTED: Final = ("Note: {}", "Note {}", "Note that {}", "Please note: {}", "Please note that {}")
_ASKED: Final = ("What is {}?", "What's {}?", "Tell me {}.", "Do you know {}?", "Say {}.")
_SLACK_TOKENS: Final = 3  # between the last boundary and the question
_MAX_TRIES: Final = 1_000


@dataclass(frozen=True)
class Probe:
    """A question whose answer stands in some blocks of its prompt and nowhere else."""

    question: Question
    blocks: tuple[int, ...]  # by index, from 0: those that hold a token of the value
    num_prompt_tokens: int


@dataclass(frozen=True)
class _Told:
    """A fact before it has a value. Positions count from the start of its turn."""

    key: str  # `my code`, `Ana's team`
    form: str
    is_code: bool
    num_tokens: int
    value_start: int
    value_end: int


def probes(
    corpus: Corpus, seed: int, tenant: str, num_blocks: int, block_tokens: int = 16
) -> Iterator[Probe]:
    """Yields one probe per fact; together they need every full block of the facts.

    Tenants of one seed are asked the same at the same positions, and their values differ. Half of
    the prompts have an odd number of tokens.

    Args:
        num_blocks: full blocks before the question, which starts close behind the last of them.

    Raises: ValueError when facts cannot be laid out so, as for blocks of a few tokens.
    """
    draw = Draw(f"probe/{seed}", corpus.split)
    facts = _layout(corpus, draw, num_blocks * block_tokens, block_tokens)
    values = _values(facts, Draw(f"probe/{seed}/{tenant}", corpus.split))
    turns = tuple(_turn(fact, value) for fact, value in zip(facts, values, strict=True))
    start = 1  # behind the start token
    for index, (fact, value) in enumerate(zip(facts, values, strict=True)):
        first = (start + fact.value_start) // block_tokens
        last = (start + fact.value_end - 1) // block_tokens
        question, num_tokens = _question(corpus, draw, turns, fact, value, index % 2 == 1)
        yield Probe(question, tuple(range(first, last + 1)), num_tokens)
        start += fact.num_tokens


def _layout(corpus: Corpus, draw: Draw, num_tokens: int, block_tokens: int) -> list[_Told]:
    """Returns facts that leave no block without a value and end close behind a boundary."""
    for _ in range(_MAX_TRIES):
        facts: list[_Told] = []
        length, num_covered = 1, 0
        while length < num_tokens:
            fact = _fact(corpus, draw)
            if fact.key in {other.key for other in facts}:
                continue
            if (length + fact.value_start) // block_tokens > num_covered:
                break  # a block in between would hold no value
            num_covered = (length + fact.value_end - 1) // block_tokens + 1
            length += fact.num_tokens
            facts.append(fact)
        if num_tokens <= length <= num_tokens + _SLACK_TOKENS:
            return facts
    raise ValueError(f"no facts fit {num_tokens} tokens in blocks of {block_tokens}")


def _fact(corpus: Corpus, draw: Draw) -> _Told:
    is_code = draw.chance(0.5)
    owner = "my" if draw.chance(0.2) else f"{draw.one(NAMES)}'s"
    key = f"{owner} {draw.one(_CODES if is_code else _PAIRS)}"
    unmeasured = _Told(key, draw.one(_NOTED), is_code, 0, 0, 0)
    (value,) = _values([unmeasured], draw)
    ids = corpus.encode(Dialogue((_turn(unmeasured, value),))).ids[1:]
    value_start, value_end = corpus.last_mention(value, ids)
    return _Told(key, unmeasured.form, is_code, len(ids), value_start, value_end)


def _values(facts: Sequence[_Told], draw: Draw) -> list[str]:
    """Returns different values, one per fact."""
    found: dict[str, None] = {}
    for fact in facts:
        make = partial(draw.code, 4, 4) if fact.is_code else draw.pair
        value = make()
        while value in found:
            value = make()
        found[value] = None
    return list(found)


def _turn(fact: _Told, value: str) -> Turn:
    asked = fact.form.format(f"{fact.key} is {value}.")
    return Turn("fact", asked, "Noted.", values=(value,))


def _question(
    corpus: Corpus, draw: Draw, turns: tuple[Turn, ...], fact: _Told, value: str, is_odd: bool
) -> tuple[Question, int]:
    """Returns the question for a fact in a wording of the parity asked for, and its length.

    The pooling state of an odd length is not empty, which only such a prompt can show.
    """
    owner = "Your" + fact.key[2:] if fact.key.startswith("my ") else fact.key
    answer = f"{owner} is {value}."
    for form in draw.some(_ASKED, len(_ASKED)):
        turn = Turn("recall", form.format(fact.key), answer, recalled=value, values=(value,))
        dialogue = Dialogue((*turns, turn))
        num_tokens = corpus.encode(dialogue).spans[-1][0]
        if num_tokens % 2 == is_odd:
            break
    return dialogue.question(len(turns)), num_tokens
