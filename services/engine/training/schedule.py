"""What a step trains on and how far it moves. Pure functions of the step's number.

Source: small-model.md, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.training.tasks.stages import Stage

TOKENS_PER_STEP = 1536
_SEEDS_PER_STEP = 64  # rows of a step are fewer


@dataclass(frozen=True)
class Part:
    """A stretch of steps with rows of one length."""

    stage: Stage
    length: int
    steps: int


@dataclass(frozen=True)
class Schedule:
    """Parts one after the other; one warm-up and one linear decay over all of them.

    free: share of the steps in which later index sources choose among all entries, so that the
    candidate source learns to find what they need before they depend on it.
    """

    parts: tuple[Part, ...]
    warm_up: int = 40
    final: float = 0.05
    free: float = 0.7

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts)

    def part(self, step: int) -> Part:
        for part in self.parts:
            if step < part.steps:
                return part
            step -= part.steps
        return self.parts[-1]

    def rate(self, step: int) -> float:
        """Returns the factor of the learning rates at a step, counted from 0."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        left = (self.steps - step) / max(1, self.steps - self.warm_up)
        return self.final + (1 - self.final) * max(0.0, left)

    def is_free(self, step: int) -> bool:
        return step < self.free * self.steps

    def row_seeds(self, step: int) -> range:
        first = step * _SEEDS_PER_STEP
        return range(first, first + TOKENS_PER_STEP // self.part(step).length)


def curriculum(steps: int) -> Schedule:
    """Returns the four stages over so many steps; the short ones are short in any case."""
    short, mixed = min(350, steps // 8), min(450, steps // 6)
    long = min(900, steps // 4)
    return Schedule(
        (
            Part(Stage.SHORT, 96, short),
            Part(Stage.MIXED, 192, mixed),
            Part(Stage.LONG, 384, long),
            Part(Stage.RECALLS, 768, steps - short - mixed - long),
        )
    )
