"""Training rows: conversations in token ids, with what of them the assistant wrote.

corpus = Corpus(Path("deploy/models/pelagos-mini/tokenizer.json"), "train")
row = corpus.row(Stage.MIXED, 192, seed=7)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.engine.training.render import render
from services.engine.training.tasks.draw import Split
from services.engine.training.tasks.stages import Stage, dialogues
from services.engine.training.tasks.turns import Dialogue, Turn
from services.recipe.client import codec

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Answer:
    """One assistant turn inside a row."""

    kind: str
    start: int  # first token that the assistant writes, thinking included
    end: int  # past the end token, or past the row's end when cut
    distance: int  # tokens since the last mention of what it must recall; 0 where nothing is
    thinking: bool


@dataclass(frozen=True)
class Row:
    """Conversations up to exactly `length` tokens: the last turn is cut, nothing is padded."""

    ids: Ids  # [length]
    loss: npt.NDArray[np.bool_]  # [length]: whether the id is a target
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Encoded:
    """One whole conversation in ids; `spans` are its answers, one per turn."""

    ids: Ids
    spans: tuple[tuple[int, int, bool], ...]  # start, end, thinking


class Corpus:
    """Rows of one split. Holds a tokenizer and nothing that changes."""

    def __init__(self, tokenizer_path: Path, split: Split) -> None:
        """Loads the tokenizer. Raises: ValueError when the file is none that the codec knows."""
        self._tokenizer = codec.Tokenizer(tokenizer_path, num_threads=1, cache_bytes=0)
        self.split: Split = split
        ids = {
            name: self._tokenizer.added_id(codec.DEFAULT_SPELLINGS[name])
            for name in ("Assistant", "ThinkingStart", "Eos")
        }
        if missing := [name for name, found in ids.items() if found is None]:
            raise ValueError(f"{tokenizer_path}: no token for {', '.join(missing)}")
        self._assistant, self._thinking, self._eos = ids.values()

    def row(self, stage: Stage, length: int, seed: int) -> Row:
        """Returns one row: a function of the split and of these arguments."""
        return self.pack(dialogues(stage, length, seed, self.split), length)

    def pack(self, items: Iterable[Dialogue], length: int) -> Row:
        """Returns conversations one behind the other, cut at `length` tokens.

        Raises: ValueError when they are shorter than that.
        """
        ids = np.zeros(length, np.int32)
        loss = np.zeros(length, np.bool_)
        answers: list[Answer] = []
        used = 0
        for item in items:
            encoded = self.encode(item)
            num = min(len(encoded.ids), length - used)
            ids[used : used + num] = encoded.ids[:num]
            for index, (turn, span) in enumerate(zip(item.turns, encoded.spans, strict=True)):
                start, end, thinking = span
                if start >= num or index in item.silent:
                    continue
                loss[used + start : used + min(end, num)] = True
                distance = self._distance(turn, encoded.ids[:start])
                answers.append(
                    Answer(turn.kind, used + start, used + min(end, num), distance, thinking)
                )
            used += num
            if used == length:
                return Row(ids, loss, tuple(answers))
        raise ValueError(f"the conversations have {used} tokens, not {length}")

    def encode(self, item: Dialogue) -> Encoded:
        """Returns one whole conversation in ids. Raises: CodecError."""
        rendered = render(item)
        data = self._tokenizer.encode_prompt(rendered.text, rendered.ranges)
        ids = np.frombuffer(data, "<u4").astype(np.int32)
        # Text that spells a special token is never one, so the ids alone tell who wrote what.
        heads = np.flatnonzero(ids == self._assistant)
        ends = np.flatnonzero(ids == self._eos)
        spans = []
        for head in heads.tolist():
            end = int(ends[np.searchsorted(ends, head)]) + 1
            spans.append((head + 2, end, bool(ids[head + 1] == self._thinking)))
        return Encoded(ids, tuple(spans))

    def _distance(self, turn: Turn, before: Ids) -> int:
        """Returns how many ids follow the last mention of what a turn recalls; 0 for nothing."""
        if not turn.recalled:
            return 0
        return len(before) - self.last_mention(turn.recalled, before)[1]

    def last_mention(self, text: str, ids: Ids) -> tuple[int, int]:
        """Returns where ids hold a text the last time, from and to; at their end if nowhere."""
        data = ids.tobytes()
        # A word is written behind a space nearly everywhere; other forms are the exception.
        for spelled in (f" {text}", text):
            wanted = self._tokenizer.encode_plain(spelled)
            found = data.rfind(wanted)
            if found >= 0:
                return found // 4, (found + len(wanted)) // 4
        return len(ids), len(ids)
