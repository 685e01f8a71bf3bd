"""Held-out questions for a running stack: so many of each kind, a function of the seed alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.memory import Memory
from services.engine.training.tasks.stages import KINDS as KINDS
from services.engine.training.tasks.stages import Mode, Stage, dialogue
from services.engine.training.tasks.turns import Call, Question

_MAX_DIALOGUES: Final = 4_000
# Shares of the conversations; tools need most of them for their two kinds.
_MODES: Final[tuple[tuple[Mode, float], ...]] = (
    ("plain", 0.5),
    ("thinking", 0.15),
    ("schema", 0.1),
    ("tools", 0.25),
)


@dataclass(frozen=True)
class Asked:
    """A question under its number, which is the same in every run."""

    number: int
    question: Question

    @property
    def kind(self) -> str:
        """Returns the kind under which it is scored."""
        return self.question.kind


@dataclass(frozen=True)
class Said:
    """What a stack answered, and how it came by it."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments as JSON text
    finish: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    instances: tuple[str, ...] = ()
    error: str = ""


def pick(
    per_kind: int,
    *,
    seed: int = 0,
    num_tokens: int = 700,
    kinds: Sequence[str] = KINDS,
    per_dialogue: int = 2,
) -> list[Asked]:
    """Returns `per_kind` questions of each kind, deep in conversations of about `num_tokens`.

    A conversation gives few of them, its later turns first: those look back the farthest.

    Raises: ValueError naming kinds that no conversation has, and for less than one of each.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"no kind is named {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if per_kind < 1:
        raise ValueError("at least one question of each kind is asked")
    wanted = Counter(dict.fromkeys(kinds, per_kind))
    found: list[Question] = []
    for number in range(_MAX_DIALOGUES):
        if not +wanted:
            break
        draw = Draw(f"evaluation/{seed}/{number}", "held_out")
        mode = draw.weighted(_MODES)
        talk = dialogue(draw, Stage.TOOLS.value, mode, num_tokens, Memory())
        taken = 0
        for index in reversed(range(len(talk.turns))):
            kind = talk.turns[index].kind
            if wanted[kind] > 0 and taken < per_dialogue and index not in talk.silent:
                wanted[kind] -= 1
                taken += 1
                found.append(talk.question(index))
    found.sort(key=lambda question: kinds.index(question.kind))
    return [Asked(number, question) for number, question in enumerate(found)]


def is_right(question: Question, said: Said) -> bool:
    """Returns whether the whole answer is exactly the one that is right."""
    expected = question.expected
    if isinstance(expected, Call):
        return len(said.calls) == 1 and _same_call(expected, *said.calls[0])
    return not said.calls and said.content == expected


def _same_call(expected: Call, name: str, arguments: str) -> bool:
    try:
        given: Any = json.loads(arguments)
    except ValueError:
        return False
    return name == expected.name and given == dict(expected.arguments)
