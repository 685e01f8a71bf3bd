"""What has been said so far in a conversation that is being made."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fact:
    """Something told, how it is asked for, and the answer."""

    key: str  # no two facts of a conversation have the same
    told: str  # the sentence in the user's words, for reasoning
    questions: tuple[str, ...]
    answer: str
    value: str
    kind: str = "recall"
    is_split: bool = False  # whether the split decides over the value


@dataclass
class Memory:
    """One conversation's facts and its last answer."""

    facts: dict[str, Fact] = field(default_factory=dict)
    # Keys of other conversations in the same row: not to be asked for as unknown.
    keys_before: frozenset[str] = frozenset()
    last: str | None = None  # the last answer; None where repeating it would be odd
    phrase: str = ""  # the words that were to be repeated last
    total: int | None = None  # what the last sum came to
    max_fillers: int = 10  # sentences of a passage that nobody asks about
