"""Builds the vocabulary of the small model out of the public one.

The result keeps the merges that the tasks' texts use, so it cuts them exactly as the large
tokenizer does, but for numbers: there one digit is one token, which makes sums and codes
learnable. Source: small-model.md, section 2.

    python -m services.engine.training.tokenizer [FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.engine.training.render import Rendered, render
from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.memory import Memory
from services.engine.training.tasks.stages import (
    SYSTEM_TEXTS,
    TURN_KINDS,
    Stage,
    dialogue,
    turns_of,
)
from services.engine.training.tasks.talk import every_talk
from services.engine.training.tasks.turns import Dialogue
from services.recipe.client import codec, make_tokenizer

DEFAULT_FILE: Final = (
    Path(__file__).resolve().parents[3] / "deploy" / "models" / "pelagos-mini" / "tokenizer.json"
)
NUM_IDS: Final = 2048
NUM_BASE_IDS: Final = 259  # three sentence tokens and the byte alphabet
FIRST_SPECIAL_ID: Final = 2020
NOISE_ID: Final = 2040
IMAGE_ID: Final = 2041

_NUM_SAMPLES: Final = 2_000  # of each kind of turn, enough to meet every word of it
_TURNS_AT_ONCE: Final = 50
_PLACEHOLDER: Final = "<｜place▁holder▁no▁{}｜>"


def special_ids() -> dict[str, int]:
    """Returns the ids of the named tokens: the first two as in the large vocabulary."""
    rows = [name for name in codec.SPECIAL_NAMES if name not in ("Bos", "Eos", "Image")]
    listed = {name: FIRST_SPECIAL_ID + index for index, name in enumerate(rows)}
    return {"Bos": 0, "Eos": 1, **listed, "Image": IMAGE_ID}


def corpus() -> Iterator[Rendered]:
    """Yields the texts whose merges are kept: all small talk, and samples of everything else.

    The shares of the kinds in training have no say in it, so that they may change.
    """
    turns = list(every_talk())
    for kind in TURN_KINDS:
        for seed in range(_NUM_SAMPLES):
            draw = Draw(f"vocabulary/{kind}/{seed}", "train", open_names=False)
            memory = Memory()
            turns += turns_of(draw, kind, memory, is_long=False)
            turns += turns_of(draw, "refer", memory, is_long=False)
    for start in range(0, len(turns), _TURNS_AT_ONCE):
        some = tuple(turns[start : start + _TURNS_AT_ONCE])
        yield render(Dialogue(some))
        yield from (Rendered(turn.thought, ()) for turn in some)
    for text in SYSTEM_TEXTS:
        for thinking in (False, True):
            yield render(Dialogue(tuple(turns[:1]), thinking, text))
    mix = Stage.TOOLS.value
    for mode in ("schema", "tools"):
        for seed in range(_NUM_SAMPLES // 2):
            draw = Draw(f"vocabulary/{mode}/{seed}", "train", open_names=False)
            yield render(dialogue(draw, mix, mode, 1, Memory()))


def used_tokens(large: codec.Tokenizer, texts: Iterable[Rendered]) -> set[int]:
    """Returns the ids of the base vocabulary that the texts are cut into."""
    used: set[int] = set()
    for text in texts:
        data = large.encode_prompt(text.text, text.ranges)
        used.update(memoryview(data).cast("I"))
    return used


@dataclass(frozen=True)
class Kept:
    """The merges of the small vocabulary."""

    token_ids: tuple[int, ...]  # what they make, in ids of the large vocabulary, ascending
    num_used: int  # by the tasks' texts; the rest are the lowest ASCII ones


def kept_merges(merges: Sequence[str], used: set[int], num: int) -> Kept:
    """Returns the merges to keep.

    Args:
        merges: the large file's, in order; merge k makes the token of id 259 + k.
        used: ids that texts are cut into.
        num: how many to keep.

    Raises: ValueError when the texts alone need more.
    """
    spelled = {NUM_BASE_IDS + k: merge.replace(" ", "", 1) for k, merge in enumerate(merges)}
    made_by = {symbols: id_ for id_, symbols in spelled.items()}
    parts = {
        NUM_BASE_IDS + k: [made_by[side] for side in merge.split(" ") if side in made_by]
        for k, merge in enumerate(merges)
    }
    keep: set[int] = set()
    waiting = [id_ for id_ in used if id_ in parts and not _is_number(spelled[id_])]
    while waiting:
        id_ = waiting.pop()
        if id_ not in keep:
            keep.add(id_)
            waiting += parts[id_]
    if len(keep) > num:
        raise ValueError(f"the texts use {len(keep)} merges, and only {num} fit")
    num_used = len(keep)
    for id_, symbols in spelled.items():  # ascending
        if len(keep) == num:
            break
        if _is_plain(symbols) and all(part in keep for part in parts[id_]):
            keep.add(id_)
    return Kept(tuple(sorted(keep)), num_used)


def _is_number(symbols: str) -> bool:
    return sum(symbol.isascii() and symbol.isdigit() for symbol in symbols) > 1


def _is_plain(symbols: str) -> bool:
    """Returns whether a token is ASCII letters and marks, with at most a space in front."""
    text = symbols.removeprefix("Ġ")
    return bool(text) and all("!" <= symbol <= "~" for symbol in text) and not _is_number(text)


def small_tokenizer(large: Mapping[str, Any], keep: Sequence[int]) -> dict[str, Any]:
    """Returns the small file: the large one's layout with its own vocabulary.

    Args:
        large: the parsed `tokenizer.json` of the large vocabulary.
        keep: ids of merged tokens, ascending.
    """
    model = large["model"]
    spelled = {id_: symbols for symbols, id_ in model["vocab"].items()}
    ids = [*range(NUM_BASE_IDS), *keep]
    merges = [model["merges"][id_ - NUM_BASE_IDS] for id_ in keep]
    vocab = {spelled[id_]: index for index, id_ in enumerate(ids)}
    flags = {token["content"]: token for token in large["added_tokens"]}
    names = {id_: codec.DEFAULT_SPELLINGS[name] for name, id_ in special_ids().items()}
    names[2] = large["added_tokens"][2]["content"]
    # The rest is spelled too: every row of the embedding stands for something.
    rest = [id_ for id_ in range(len(vocab), NUM_IDS) if id_ not in names]
    names |= {id_: _PLACEHOLDER.format(index) for index, id_ in enumerate(rest)}
    added = [{**flags[names[id_]], "id": id_} for id_ in sorted(names)]
    return {**large, "added_tokens": added, "model": {**model, "vocab": vocab, "merges": merges}}


def build(large_file: Path) -> tuple[str, int]:
    """Returns the text of the small file, and how many merges the tasks' texts use.

    Raises: ValueError when the texts use more merges than there is room for.
    """
    large = json.loads(large_file.read_text(encoding="utf-8"))
    tokenizer = codec.Tokenizer(large_file, num_threads=1, cache_bytes=0)
    used = used_tokens(tokenizer, corpus())
    kept = kept_merges(large["model"]["merges"], used, FIRST_SPECIAL_ID - NUM_BASE_IDS)
    small = small_tokenizer(large, kept.token_ids)
    return json.dumps(small, ensure_ascii=False, indent=1) + "\n", kept.num_used


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file and says what is in it."""
    parser = argparse.ArgumentParser(description="Builds the small model's tokenizer.")
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE)
    arguments = parser.parse_args(argv)
    text, num_used = build(make_tokenizer.build()["v4.1"])
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(text, encoding="utf-8")
    print(f"{arguments.file}: {NUM_IDS} ids; the tasks use {num_used} merges")
    return 0


if __name__ == "__main__":
    sys.exit(main())
