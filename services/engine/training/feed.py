"""Rows made ahead of the steps that train on them, by a process of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.engine.training.rows import Corpus, Row
from services.engine.training.schedule import Schedule

_AHEAD = 16
_corpus: Corpus | None = None


def _open(tokenizer: Path) -> None:
    global _corpus
    _corpus = Corpus(tokenizer, "train")


def _make(schedule: Schedule, step: int, seed_from: int) -> list[Row]:
    assert _corpus is not None
    part = schedule.part(step)
    seeds = schedule.row_seeds(step)
    return [_corpus.row(part.stage, part.length, seed_from + seed) for seed in seeds]


def batches(
    tokenizer: Path, schedule: Schedule, first: int, *, seed_from: int = 0
) -> Iterator[list[Row]]:
    """Yields each step's rows from step `first` on. The process ends with the iterator."""
    with ProcessPoolExecutor(1, get_context("spawn"), _open, (tokenizer,)) as pool:
        waiting: deque[Future[list[Row]]] = deque()
        step = first
        try:
            while step < schedule.steps or waiting:
                while step < schedule.steps and len(waiting) < _AHEAD:
                    waiting.append(pool.submit(_make, schedule, step, seed_from))
                    step += 1
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def joined(rows: list[Row]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns ids [rows, length] and which of them are targets."""
    return np.stack([row.ids for row in rows]).astype(np.int64), np.stack([r.loss for r in rows])
