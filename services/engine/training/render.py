"""Conversations as the running stack renders them, answers in the model's own output form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from services.engine.training.tasks.turns import MODEL, Dialogue
from services.recipe.client import codec

_OPTIONS: Final = codec.Options(models={MODEL: "v4.1"}).native()
_EOS: Final = codec.DEFAULT_SPELLINGS["Eos"]
_THINKING_END: Final = codec.DEFAULT_SPELLINGS["ThinkingEnd"]
_NUM_SUFFIX_TOKENS: Final = 2  # an assistant's header: its start and the thinking mark


@dataclass(frozen=True)
class Rendered:
    """A whole conversation as text; `ranges` are its special tokens, in UTF-8 bytes."""

    text: str
    ranges: tuple[tuple[int, int], ...]


def render(dialogue: Dialogue) -> Rendered:
    """Returns a conversation up to the end token of its last answer.

    Raises: CodecError for a conversation that the API would refuse.
    """
    if dialogue.thinking and not dialogue.tools:
        # The template drops old reasoning, so the last answer is written behind its prompt.
        last = dialogue.turns[-1]
        return _with_answer(_prompt(dialogue, is_answered=False), last.thought, last.answer)
    whole = _prompt(dialogue, is_answered=True)
    end = whole.ranges[-_NUM_SUFFIX_TOKENS][0]
    text = whole.text.encode("utf-8")[:end].decode("utf-8")
    return Rendered(text, whole.ranges[:-_NUM_SUFFIX_TOKENS])


def _prompt(dialogue: Dialogue, *, is_answered: bool) -> Rendered:
    body = dialogue.body(len(dialogue.turns), is_answered)
    data = json.dumps(body, ensure_ascii=False).encode("utf-8")
    converted = codec.convert("chat", data, _OPTIONS)
    return Rendered(converted.prompt, tuple(converted.special_ranges))


def _with_answer(prompt: Rendered, thought: str, answer: str) -> Rendered:
    text, ranges = prompt.text, list(prompt.ranges)
    for plain, special in ((thought, _THINKING_END), (answer, _EOS)):
        text += plain
        start = len(text.encode("utf-8"))
        text += special
        ranges.append((start, start + len(special.encode("utf-8"))))
    return Rendered(text, tuple(ranges))
