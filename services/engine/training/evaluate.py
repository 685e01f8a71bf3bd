"""Whole answers right or wrong on held-out rows, by kind and by distance.

An answer is exactly what greedy decoding says if and only if every one of its tokens is the
likeliest given the right ones before it, so one forward pass over the row judges all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from services.engine.training.feed import joined
from services.engine.training.network import TrainingNetwork
from services.engine.training.rows import Answer, Corpus, Row
from services.engine.training.schedule import TOKENS_PER_STEP
from services.engine.training.tasks.stages import Stage

DISTANCES = (0, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass
class Scores:
    """Counts (right, all) by kind; of recalls by the distance that they bridge."""

    loss: float = 0.0
    tokens: int = 0
    plain: dict[str, tuple[int, int]] = field(default_factory=dict)
    thinking: dict[str, tuple[int, int]] = field(default_factory=dict)
    distance: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, answer: Answer, right: bool) -> None:
        _count(self.thinking if answer.thinking else self.plain, answer.kind, right)
        if answer.kind == "recall" and not answer.thinking:
            bucket = max(d for d in DISTANCES if d <= answer.distance)
            _count(self.distance, bucket, right)

    def rates(self) -> dict[str, float]:
        """Returns the share of right answers by kind, without those that think first."""
        return {kind: right / all_ for kind, (right, all_) in sorted(self.plain.items())}

    def document(self) -> dict[str, object]:
        return {
            "loss": self.loss / max(1, self.tokens),
            "plain": self.plain,
            "thinking": self.thinking,
            "recall_by_distance": self.distance,
        }


def _count(table: dict, key: str | int, right: bool) -> None:  # type: ignore[type-arg]
    good, every = table.get(key, (0, 0))
    table[key] = (good + right, every + 1)


@torch.no_grad()
def evaluate(network: TrainingNetwork, rows: Iterable[Row]) -> Scores:
    """Judges rows of one length. Answers that the row's end cuts do not count."""
    scores = Scores()
    waiting: list[Row] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) * len(row.ids) >= TOKENS_PER_STEP:
            _judge(network, waiting, scores)
            waiting = []
    if waiting:
        _judge(network, waiting, scores)
    return scores


def _judge(network: TrainingNetwork, rows: list[Row], scores: Scores) -> None:
    ids, targets = (torch.from_numpy(part) for part in joined(rows))
    length = ids.shape[1]
    hidden = network.forward(ids)
    logits = network.logits(hidden.x).view(*ids.shape, -1)[:, :-1]
    right = logits.argmax(-1) == ids[:, 1:]
    wanted = targets[:, 1:]
    scores.loss += float(F.cross_entropy(logits[wanted], ids[:, 1:][wanted], reduction="sum"))
    scores.tokens += int(wanted.sum())
    for row, hits in zip(rows, right, strict=True):
        for answer in row.answers:
            if answer.end < length and answer.start > 0:
                scores.add(answer, bool(hits[answer.start - 1 : answer.end - 1].all()))


def held_out(tokenizer: Path, stage: Stage, length: int, count: int) -> list[Row]:
    """Returns rows of the test split; the first ones are the same for any count."""
    corpus = Corpus(tokenizer, "held_out")
    return [corpus.row(stage, length, seed) for seed in range(count)]
