"""The stages of the curriculum, and conversations mixed for them.

Source: small-model.md, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from services.engine.training.tasks import copying, facts, structured, sums, tools
from services.engine.training.tasks.draw import Draw, Split
from services.engine.training.tasks.memory import Memory
from services.engine.training.tasks.talk import talk
from services.engine.training.tasks.turns import Dialogue, Turn

Mode = Literal["plain", "thinking", "schema", "tools"]
Kind = str
Shares = tuple[tuple[Kind, float], ...]

# The kinds that an answer of a row can be of.
KINDS: Final[tuple[Kind, ...]] = (
    *("talk", "copy_words", "copy_digits", "fact", "recall", "unknown", "needle", "list", "refer"),
    *("sum1", "sum2", "product", "json", "tool_call", "tool_result"),
)
SYSTEM_TEXTS: Final = (
    "You are a helpful assistant.",
    "You are Pelagos Mini.",
    "You are Pelagos Mini, a small language model.",
    "Be brief.",
    "Be kind and brief.",
    "Answer in one sentence.",
    "You are a friendly assistant. Answer briefly.",
    "Answer the user.",
)


@dataclass(frozen=True)
class Mix:
    """Shares of modes (of a row's tokens) and of kinds (of a conversation's turns)."""

    modes: tuple[tuple[Mode, float], ...]
    kinds: Shares
    max_fillers: int = 10


_ALL: Final = (
    *(("talk", 0.11), ("copy_words", 0.09), ("copy_digits", 0.05), ("fact", 0.1)),
    *(("recall", 0.27), ("unknown", 0.03), ("needle", 0.16), ("list", 0.03), ("refer", 0.05)),
    *(("sum1", 0.04), ("sum2", 0.07), ("product", 0.03), ("json", 0.12)),
)


class Stage(Enum):
    """A stage of training; its value is its mix."""

    SHORT = Mix(
        (("plain", 0.8), ("thinking", 0.2)),
        (
            *(("talk", 0.14), ("copy_words", 0.36), ("copy_digits", 0.08)),
            *(("fact", 0.12), ("recall", 0.26)),
        ),
    )
    MIXED = Mix((("plain", 0.58), ("thinking", 0.34), ("schema", 0.08)), _ALL, max_fillers=4)
    LONG = Mix((("plain", 0.58), ("thinking", 0.34), ("schema", 0.08)), _ALL)
    # Of what is still hard when the others are learned, more.
    TOOLS = Mix(
        (("plain", 0.34), ("thinking", 0.2), ("schema", 0.05), ("tools", 0.41)),
        (
            *(("talk", 0.12), ("copy_words", 0.05), ("copy_digits", 0.03), ("fact", 0.09)),
            *(("recall", 0.28), ("unknown", 0.06), ("needle", 0.26), ("list", 0.03)),
            *(("refer", 0.06), ("sum1", 0.02), ("sum2", 0.07), ("product", 0.02), ("json", 0.08)),
        ),
    )

    # As above for training: recalls from far back and of much that was told take the most lessons.
    RECALLS = Mix(
        (("plain", 0.44), ("thinking", 0.22), ("schema", 0.04), ("tools", 0.3)),
        (
            *(("talk", 0.11), ("copy_words", 0.04), ("copy_digits", 0.03), ("fact", 0.11)),
            *(("recall", 0.4), ("unknown", 0.05), ("needle", 0.16), ("list", 0.03)),
            *(("refer", 0.06), ("sum1", 0.02), ("sum2", 0.07), ("product", 0.01), ("json", 0.06)),
        ),
    )

    @property
    def judged_by(self) -> Stage:
        """The stage whose held-out rows tell how far training in this one is."""
        return Stage.TOOLS if self is Stage.RECALLS else self

    @classmethod
    def of_number(cls, number: int) -> Stage:
        """Returns the stage of the curriculum's table, from 1."""
        return tuple(cls)[number - 1]


_TURNS: Final[dict[Kind, Callable[[Draw, Memory], Turn | None]]] = {
    "talk": lambda draw, _: talk(draw),
    "copy_words": copying.copy_words,
    "copy_digits": copying.copy_digits,
    "fact": facts.tell,
    "recall": facts.recall,
    "unknown": facts.unknown,
    "needle": facts.needle,
    "list": copying.list_position,
    "refer": lambda draw, memory: (
        (sums.more(draw, memory) if draw.chance(0.4) else None) or copying.refer(draw, memory)
    ),
    "sum1": sums.sum1,
    "sum2": sums.sum2,
    "product": sums.product,
    "json": lambda draw, _: structured.json_in_words(draw),
}
# Turns of a conversation; the last entry is one that fills the row.
_PLAIN_TURNS: Final = ((1, 0.06), (2, 0.08), (3, 0.08), (4, 0.08), (6, 0.1), (1_000, 0.6))
_THINKING_TURNS: Final = ((1, 0.5), (2, 0.26), (3, 0.14), (1_000, 0.1))
# Of a conversation that tells a lot and asks for some of it.
_NOTEBOOK: Final[Shares] = (("fact", 0.7), ("recall", 0.26), ("unknown", 0.04))
# The kinds that need neither a tool nor a schema.
TURN_KINDS: Final = tuple(_TURNS)
_SUMS: Final = ("sum1", "sum2", "product")
# What comes first where there is nothing yet to ask about.
_BEFORE: Final = {"recall": "fact", "refer": "copy_words"}


def dialogues(stage: Stage, length: int, seed: int, split: Split) -> Iterator[Dialogue]:
    """Yields conversations of one mode without end, each of at most about `length` tokens.

    A training row is the first `length` tokens of them.
    """
    draw = Draw(f"{split}/{stage.name}/{length}/{seed}", split)
    mode: Mode = draw.weighted(stage.value.modes)
    keys: frozenset[str] = frozenset()
    while True:
        memory = Memory(keys_before=keys)
        yield dialogue(draw, stage.value, mode, length, memory)
        keys |= memory.facts.keys()


def dialogue(draw: Draw, mix: Mix, mode: Mode, budget: int, memory: Memory) -> Dialogue:
    """Returns a conversation of roughly `budget` tokens, or a short one of a few turns.

    Args:
        memory: of this conversation; empty but for what the row's other conversations told.
    """
    memory.max_fillers = min(mix.max_fillers, max(1, budget // 24))
    if mode == "schema":
        return _schema_dialogue(draw, budget)
    if mode == "tools":
        return _tools_dialogue(draw, mix, budget, memory)
    thinking = mode == "thinking"
    # Without tools old reasoning is dropped: a thinking conversation reasons once, at its end.
    lengths = _THINKING_TURNS if thinking else _PLAIN_TURNS
    num_turns = draw.weighted(lengths)
    kinds = _NOTEBOOK if num_turns > 6 and draw.chance(0.12) else mix.kinds
    turns = _turns(draw, kinds, budget, num_turns, memory)
    system = draw.one(SYSTEM_TEXTS) if draw.chance(0.15) else ""
    return Dialogue(turns, thinking, system, effort=_effort(draw) if thinking else None)


def _turns(
    draw: Draw, kinds: Shares, budget: int, num_turns: int, memory: Memory
) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    num_tokens = 0.0
    while len(turns) < num_turns and num_tokens < budget:
        new = turns_of(draw, draw.weighted(kinds), memory, num_turns > 6)
        turns += new
        num_tokens += sum(map(estimated_tokens, new))
    return tuple(turns)


def turns_of(draw: Draw, kind: Kind, memory: Memory, is_long: bool) -> list[Turn]:
    """Returns a turn of this kind, behind another one where that is what it asks about.

    In a long conversation the other one comes alone: what it tells is asked for later.
    """
    turn = _TURNS[kind](draw, memory)
    first: list[Turn] = []
    if turn is None:
        first = turns_of(draw, _BEFORE[kind], memory, is_long)
        if is_long:
            return first
        turn = _TURNS[kind](draw, memory)
    if turn is None:
        raise AssertionError(f"nothing to ask about after {_BEFORE[kind]}")
    memory.last = turn.answer if turn.kind != "json" else None
    if turn.kind not in _SUMS and turn.kind != "refer":
        memory.total = None
    return [*first, turn]


def estimated_tokens(turn: Turn) -> float:
    """Returns about how many tokens a turn takes, without its reasoning."""
    return 4 + (len(turn.question) + len(turn.answer)) / 4


def _effort(draw: Draw) -> str | None:
    return draw.weighted(((None, 0.7), ("low", 0.1), ("high", 0.1), ("max", 0.1)))


def _schema_dialogue(draw: Draw, budget: int) -> Dialogue:
    keys = structured.schema_keys(draw)
    thinking = draw.chance(0.25)
    num_turns = 1 if thinking else draw.number(2, 6)
    turns: list[Turn] = []
    while len(turns) < num_turns and sum(map(estimated_tokens, turns)) < budget:
        turns.append(structured.json_by_schema(draw, keys))
    return Dialogue(
        tuple(turns),
        thinking,
        response_format=structured.response_format(keys),
        effort=_effort(draw) if thinking else None,
    )


def _tools_dialogue(draw: Draw, mix: Mix, budget: int, memory: Memory) -> Dialogue:
    box = tools.toolbox(draw)
    thinking = draw.chance(0.4)
    memory.max_fillers = 3
    turns: list[Turn] = []
    num_tokens = 330.0 + 60 * len(box)  # the tool prompt
    while num_tokens < budget or not turns:
        if draw.chance(0.65):
            new = list(tools.tool_call(draw, box))
            memory.last = memory.total = None
        else:
            new = turns_of(draw, draw.weighted(mix.kinds), memory, is_long=True)
        turns += new
        num_tokens += sum(map(estimated_tokens, new)) + (60 if len(new) > 1 else 0)
    silent = (
        frozenset(i for i in range(len(turns)) if draw.chance(0.1)) if thinking else frozenset()
    )
    return Dialogue(
        tuple(turns),
        thinking,
        draw.one(SYSTEM_TEXTS) if draw.chance(0.15) else "",
        tuple(tool.definition() for tool in box),
        effort=_effort(draw) if thinking else None,
        silent=silent,
    )
