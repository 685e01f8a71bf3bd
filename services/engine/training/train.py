"""Trains the backbone of the small model on a CPU; goes on where it stopped.

python -m services.engine.training.train --out build/training/pelagos-mini
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from services.engine.model.presets import TINY
from services.engine.training.evaluate import evaluate, held_out
from services.engine.training.feed import batches, joined
from services.engine.training.losses import balance, next_token_loss
from services.engine.training.muon import Optimiser
from services.engine.training.native import ops_for
from services.engine.training.network import TrainingNetwork
from services.engine.training.parameters import (
    Params,
    initial,
    is_buffer,
    is_draft,
    is_vision,
)
from services.engine.training.schedule import TOKENS_PER_STEP, Schedule, curriculum
from services.engine.training.tokenizer import DEFAULT_FILE

STATE = "state.pt"
LOG = "log.jsonl"
VOCABULARY = "tokenizer.json"
DEFAULT_OUT = Path("build/training/pelagos-mini")
DEFAULT_STEPS = 8000


class Trainer:
    """One run: parameters, optimisers and the step that they are at."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        everything = initial(TINY, seed)
        self.params: Params = {
            name: value
            for name, value in everything.items()
            if not is_draft(name) and not is_vision(name)
        }
        for name, value in self.params.items():
            value.requires_grad_(not is_buffer(name))
        self.schedule = schedule
        self.network = TrainingNetwork(TINY, self.params, ops_for(TINY.text))
        self._optimiser = Optimiser(self.params, TINY.text.o_groups)
        self.step = 0

    def advance(self, rows: Sequence[Any]) -> dict[str, float]:
        """Trains on one step's rows; returns what to write down."""
        ids, targets = (torch.from_numpy(part) for part in joined(list(rows)))
        hidden = self.network.forward(ids, free=self.schedule.is_free(self.step))
        loss, right = next_token_loss(self.network, hidden, ids, targets)
        (loss + hidden.index_loss).backward()  # type: ignore[no-untyped-call]
        rate = self.schedule.rate(self.step)
        norm = self._optimiser.step(rate)
        load = balance(self.params, hidden.loads)
        self.step += 1
        return {
            "loss": float(loss.detach()),
            "index_loss": float(hidden.index_loss.detach()),
            "accuracy": float(right.float().mean()),
            "norm": norm,
            "rate": rate,
            "load": load,
        }

    def save(self, path: Path) -> None:
        document = {
            "step": self.step,
            "steps": self.schedule.steps,
            "params": {name: value.detach() for name, value in self.params.items()},
            "optimiser": self._optimiser.state(),
        }
        part = path.with_suffix(".part")
        torch.save(document, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Goes on from a file. Raises: ValueError when it belongs to another schedule."""
        document = torch.load(path, weights_only=True)
        if document["steps"] != self.schedule.steps:
            raise ValueError(f"{path} is of a run of {document['steps']} steps")
        with torch.no_grad():
            for name, value in self.params.items():
                value.copy_(document["params"][name])
        self._optimiser.load(document["optimiser"])
        self.step = document["step"]


def run(
    out: Path,
    tokenizer: Path,
    steps: int,
    *,
    seed: int = 0,
    stop: int | None = None,
    save_every: int = 100,
    judge_every: int = 200,
    judge_rows: int = 16,
) -> Trainer:
    """Trains up to `stop`, or to the schedule's end; state, log and vocabulary lie in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / VOCABULARY).exists():
        shutil.copy(tokenizer, out / VOCABULARY)
    tokenizer = out / VOCABULARY  # of the run: ids must not change below it
    trainer = Trainer(curriculum(steps), seed)
    schedule, state = trainer.schedule, out / STATE
    if state.exists():
        trainer.load(state)
    last = min(stop or schedule.steps, schedule.steps)
    bar = tqdm(total=schedule.steps, initial=trainer.step, unit="step", mininterval=5)
    with (out / LOG).open("a") as log:
        began, at = time.monotonic(), trainer.step
        for rows in batches(tokenizer, schedule, trainer.step):
            if trainer.step >= last:
                break
            facts: dict[str, Any] = {"step": trainer.step + 1, **trainer.advance(rows)}
            facts["seconds"] = time.monotonic() - began
            bar.update()
            bar.set_postfix(loss=f"{facts['loss']:.3f}", refresh=False)
            done = trainer.step
            if done % 10 == 0:
                facts["tokens_per_s"] = (done - at) * TOKENS_PER_STEP / facts["seconds"]
                log.write(json.dumps(facts) + "\n")
                log.flush()
            if done % judge_every == 0 or done == schedule.steps:
                part = schedule.part(done - 1)
                count = judge_rows * max(1, 768 // part.length)
                scores = evaluate(
                    trainer.network, held_out(tokenizer, part.stage.judged_by, part.length, count)
                )
                found = {"step": done, "length": part.length, "held_out": scores.document()}
                log.write(json.dumps(found) + "\n")
                log.flush()
                rates = " ".join(f"{kind} {rate:.2f}" for kind, rate in scores.rates().items())
                bar.write(f"{done}: loss {scores.loss / scores.tokens:.3f}  {rates}")
            if done % save_every == 0 or done == schedule.steps:
                trainer.save(state)
    trainer.save(state)
    bar.close()
    return trainer


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="of the whole schedule")
    parser.add_argument("--stop", type=int, default=None, help="end early, to go on later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(options.threads)
    run(options.out, options.tokenizer, options.steps, seed=options.seed, stop=options.stop)


if __name__ == "__main__":
    main()
