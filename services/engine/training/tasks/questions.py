"""Single questions out of the tasks' conversations, for asking a running stack."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from services.engine.training.tasks.draw import Split
from services.engine.training.tasks.stages import KINDS, Stage, dialogues
from services.engine.training.tasks.turns import Question


def questions(
    stage: Stage,
    length: int,
    *,
    split: Split = "held_out",
    kinds: Collection[str] = KINDS,
    first_seed: int = 0,
) -> Iterator[Question]:
    """Yields the questions of these kinds without end: those that the split's rows hold.

    Each comes with all that was said before it, which is at most about `length` tokens.
    """
    seed = first_seed
    while True:
        item = next(dialogues(stage, length, seed, split))
        for index, turn in enumerate(item.turns):
            if turn.kind in kinds:
                yield item.question(index)
        seed += 1
