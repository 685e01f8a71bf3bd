"""The drift guard on a model: ten turns of forced replays, with the guard and without.

A row computed behind a bounded replay saw a cut window, so its block KV is slightly off, and later
rows build on it. The guard marks such blocks; an exact one, whoever computes it, takes their place.
Without the mark the first one stays.
Source: kvcache-and-balancing.md, section 7 (step 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.engine.evaluation.drift import compare
from services.engine.evaluation.modes import hit_end
from services.engine.evaluation.tokens import Output
from services.engine.training.rows import Corpus
from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.memory import Memory
from services.engine.training.tasks.stages import turns_of
from services.engine.training.tasks.turns import Dialogue
from services.engine.training.tasks.turns import Turn as Asked

if TYPE_CHECKING:  # torch is loaded by whoever makes one
    from services.engine.evaluation.plain import PlainRun


def conversation(tokenizer: Path, num_turns: int, seed: int = 0) -> list[list[int]]:
    """Returns the prompts of a held-out conversation's turns, each beginning with the one before.

    Raises: ValueError when the file is no tokenizer.
    """
    draw, memory = Draw(f"guard/{seed}", "held_out"), Memory()
    turns: list[Asked] = []
    while len(turns) < num_turns:
        kind = "fact" if len(turns) % 2 == 0 else "recall"
        turns += turns_of(draw, kind, memory, is_long=False)
    encoded = Corpus(tokenizer, "held_out").encode(Dialogue(tuple(turns[:num_turns])))
    return [encoded.ids[:start].tolist() for start, _, _ in encoded.spans]


@dataclass
class Blocks:
    """What a store has of one conversation, by block number."""

    guarded: bool
    held: dict[int, tuple[bytes, bool]] = field(default_factory=dict)  # bytes, approximate

    def put(self, number: int, data: bytes, approximate: bool) -> None:
        """Takes a block unless one is there that it may not replace."""
        old = self.held.get(number)
        if old is None or (self.guarded and old[1] and not approximate):
            self.held[number] = (data, approximate)

    def leading(self, limit: int) -> list[bytes]:
        """Returns the first blocks, at most `limit` and as many as are there without a gap."""
        found: list[bytes] = []
        while len(found) < limit and len(found) in self.held:
            found.append(self.held[len(found)][0])
        return found

    @property
    def num_approximate(self) -> int:
        """Returns how many of the blocks are marked, or would be."""
        return sum(approximate for _, approximate in self.held.values())


@dataclass(frozen=True)
class Turn:
    """One turn behind a replay: how far its answer's log-probabilities are from a cold run's."""

    num_tokens: int
    moved: float
    changed: bool
    num_approximate: int


def replayed_turns(
    run: PlainRun,
    prompts: Sequence[Sequence[int]],
    *,
    guarded: bool,
    exact_turns: frozenset[int],
    block: int,
    ring: int,
    max_tokens: int = 12,
    stop_ids: Sequence[int] = (1,),
) -> list[Turn]:
    """Returns the turns of one conversation, each behind a hit without a window state.

    Args:
        prompts: of the turns; each begins with the one before.
        exact_turns: after these the prompt is run cold elsewhere too, and its blocks are put.
    """
    store = Blocks(guarded)
    turns: list[Turn] = []
    for number, prompt in enumerate(prompts):
        cold, exact = run.behind(prompt, (), max_tokens, stop_ids)
        hit = store.leading(hit_end(len(prompt), block, ring) // block)
        found, made = run.behind(prompt, hit, max_tokens, stop_ids) if hit else (cold, exact)
        turns.append(_turn(prompt, cold, found, store))
        for at in range(len(hit), len(made)):
            store.put(at, made[at], approximate=bool(hit))
        if number in exact_turns:
            for at, data in enumerate(exact):
                store.put(at, data, approximate=False)
    return turns


def _turn(prompt: Sequence[int], cold: Output, found: Output, store: Blocks) -> Turn:
    difference = compare(cold, found)
    return Turn(len(prompt), difference.moved, difference.changed, store.num_approximate)
