"""Random choices of the tasks, and the values that training never sees."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

from services.engine.training.tasks.words import (
    ADJECTIVES,
    COLORS,
    NAMES,
    NOUNS,
    SYLLABLES,
    THINGS,
    VERBS,
)

Split = Literal["train", "held_out"]

_HELD_OUT_SHARE: Final = 10  # one value in so many is for tests only
_Item = TypeVar("_Item")


def is_held_out(value: str) -> bool:
    """Returns whether a value (a phrase, a code, a pair of words, a sum) is for tests only."""
    return zlib.crc32(value.encode("utf-8")) % _HELD_OUT_SHARE == 0


class Draw:
    """A stream of choices: a function of its seed and its split, on every machine alike."""

    def __init__(self, seed: str, split: Split, open_names: bool = True) -> None:
        """Starts a stream.

        Args:
            open_names: whether names that nobody has may occur; the vocabulary is made without.
        """
        self.rng = random.Random(seed)
        self._wants_held_out = split == "held_out"
        self._open_names = open_names
        # Whether what is learned slowly comes more often than the tests have it.
        self.stresses_hard = split == "train" and open_names

    def one(self, items: Sequence[_Item]) -> _Item:
        """Returns one of the items."""
        return items[int(self.rng.random() * len(items))]

    def some(self, items: Sequence[_Item], num: int) -> list[_Item]:
        """Returns different items in random order."""
        return self.rng.sample(items, num)

    def number(self, low: int, high: int) -> int:
        """Returns a whole number, both ends included."""
        return low + int(self.rng.random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        """Returns true in this share of the calls."""
        return self.rng.random() < share

    def weighted(self, shares: Sequence[tuple[_Item, float]]) -> _Item:
        """Returns an item as often as its share says."""
        items, weights = zip(*shares, strict=True)
        item: _Item = self.rng.choices(items, weights)[0]
        return item

    def value(self, make: Callable[[], str]) -> str:
        """Returns a made value of this stream's split."""
        while True:
            value = make()
            if is_held_out(value) == self._wants_held_out:
                return value

    def pair(self) -> str:
        """Returns two words of the split, as in `old lake`."""
        return self.value(lambda: f"{self.one(ADJECTIVES)} {self.one(NOUNS)}")

    def identifier(self) -> str:
        """Returns a made-up name of a tool of the split, as in `load_window`."""
        return self.value(lambda: f"{self.one(VERBS)}_{self.one(THINGS)}")

    def phrase(self, low: int, high: int) -> str:
        """Returns unrelated words of the split."""
        return self.value(lambda: " ".join(self.some(_PHRASE_WORDS, self.number(low, high))))

    def code(self, low: int, high: int) -> str:
        """Returns a number of so many digits of the split."""
        return self.value(
            lambda: "".join(str(self.number(0, 9)) for _ in range(self.number(low, high)))
        )

    def name(self) -> str:
        """Returns a first name, now and then one that nobody has."""
        if self._open_names and self.chance(0.3 if self.stresses_hard else 0.15):
            return "".join(self.one(SYLLABLES) for _ in range(self.number(2, 3))).capitalize()
        return self.one(NAMES)

    def typed(self, text: str) -> str:
        """Returns the text as people type it: often with a small letter and no last mark."""
        style = self.rng.random()
        if style < 0.35 and not text.startswith("I "):
            text = text[:1].lower() + text[1:]
        if 0.2 < style < 0.5 and text[-1:] in ".?!":
            text = text[:-1]
        return text


_PHRASE_WORDS: Final = (*NOUNS, *ADJECTIVES, *COLORS)
