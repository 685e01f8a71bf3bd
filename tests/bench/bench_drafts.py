"""Pelagos Mini with and without its drafts, by batch: `make bench-drafts`.

    python -m tests.bench.bench_drafts --write docs/performance/drafts.md

Answers to held-out questions through `ModelRunner`, as the decode service runs it: without drafts,
with every draft verified, and with as many as `choose_budget` takes by the step times measured so
far. The three take turns; time is processor time of one thread, a point is the median of its
rounds. The answers must be the same, token for token, or the run fails.
Source: engine.md, sections 3.2 and 3.6.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import platform
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from services.decode.speculation import Curve as StepCurve
from services.decode.speculation import StepTimes, choose_budget, curve_sizes, survival
from services.engine.model.cache import geometry, kv_layout
from services.engine.model.checkpoint import CheckpointReader
from services.engine.model.config import ModelConfig
from services.engine.model.network import Network, load_network
from services.engine.model.runner import TorchRunner
from services.engine.requests import Sampling, Tokens
from services.engine.runner import DecodeBatch, DecodeRow, PrefillBatch, PrefillRow, Start
from services.engine.training.evaluate import held_out
from services.engine.training.export import DEFAULT_TO
from services.engine.training.rows import Answer
from services.engine.training.tasks.stages import Stage
from services.engine.training.train import VOCABULARY

BATCHES = (1, 8, 32)
ROUNDS = 5
MODES = ("off", "every draft", "by step times")
_LENGTH = 384
_SHORTEST = 10  # tokens of an answer; shorter ones are over before drafts matter
_PREFILL_TOKENS = 512  # of a pass


@dataclass(frozen=True)
class Case:
    """A prompt and how many tokens its right answer has."""

    ids: tuple[int, ...]
    count: int


@dataclass
class Run:
    """What one pass over a batch said and took."""

    said: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    turns: int = 0  # of a sequence in a step
    rows: int = 0

    @property
    def tokens(self) -> int:
        """Returns the tokens that decoding made; the first of each answer is the prefill's."""
        return sum(len(answer) - 1 for answer in self.said)


def cases(tokenizer: Path, num: int) -> list[Case]:
    """Returns answers of the test split with all that was said before them."""

    def is_long(answer: Answer) -> bool:
        return answer.end - answer.start >= _SHORTEST and answer.end < _LENGTH

    found: list[Case] = []
    for row in held_out(tokenizer, Stage.LONG, _LENGTH, 4 * num):
        answer = next((a for a in reversed(row.answers) if is_long(a)), None)
        if answer is not None:
            found.append(Case(tuple(row.ids[: answer.start].tolist()), answer.end - answer.start))
        if len(found) == num:
            return found
    raise ValueError(f"only {len(found)} answers of {_SHORTEST} tokens and more")


class Bench:
    """One runner over all modes and batches, and the step times it has seen."""

    def __init__(self, network: Network, most: int) -> None:
        self._shape = geometry(network.config)
        layout = kv_layout(network.config, network.numerics, model_id="bench", weights_id="bench")
        self._num_blocks = most * self._blocks(2 * _LENGTH) + 1
        self._runner = TorchRunner(
            network, layout, self._num_blocks, ring_slots=self._shape.prefill_ring, num_threads=1
        )
        self._max_draft = self._shape.back - 1
        sizes = curve_sizes(most, self._max_draft)
        # A guess that says nothing yet: the first steps are all drafted and measured.
        self._times = StepTimes(StepCurve(sizes, tuple(1.0 for _ in sizes)))
        self._ids = itertools.count(1)

    def _blocks(self, num_tokens: int) -> int:
        return self._shape.num_blocks(num_tokens + 2 * self._shape.back)

    def run(self, batch: Sequence[Case], mode: str) -> Run:
        """Answers a batch; only decoding is timed."""
        first_block, live, run = 1, dict[int, _Sequence](), Run()
        for slot, case in enumerate(batch, 1):
            num = self._blocks(len(case.ids) + case.count)
            table = tuple(range(first_block, first_block + num))
            first_block += num
            seq = next(self._ids)
            tokens = Tokens(self._shape, array("I", case.ids))
            size = len(case.ids)
            sampling = Sampling(max_tokens=case.count)
            self._runner.open(Start(seq, f"r{seq}", tokens, sampling, size, size, slot))
            live[seq] = _Sequence(case, tokens, table, size)
        everything = dict(live)
        self._prefill(live)
        began = time.process_time()
        asyncio.run(self._decode(live, mode, run))
        run.seconds = time.process_time() - began
        for seq, sequence in everything.items():
            self._runner.close(seq)
            run.said.append(sequence.said[: sequence.case.count])
        return run

    def _prefill(self, live: dict[int, _Sequence]) -> None:
        waiting = list(live.items())
        while waiting:
            rows, room = [], _PREFILL_TOKENS
            while waiting and (not rows or len(waiting[0][1].case.ids) <= room):
                seq, sequence = waiting.pop(0)
                size = len(sequence.case.ids)
                rows.append(PrefillRow(seq, 0, size, 0, 0, True, sequence.table))
                room -= size
            result = asyncio.run(self._runner.prefill(PrefillBatch(tuple(rows))))
            for seq, token in result.first.items():
                live[seq].take([token.token_id])

    async def _decode(self, live: dict[int, _Sequence], mode: str, run: Run) -> None:
        before: dict[int, int] = {}  # row of each sequence in the step before
        while live := {seq: one for seq, one in live.items() if len(one.said) < one.case.count}:
            most = 1 if mode == "off" else self._max_draft + 1
            rows = tuple(
                DecodeRow(seq, before.get(seq, -1), one.num_cached, one.table, most)
                for seq, one in live.items()
            )
            budget = len(rows) * most
            if mode == "by step times":
                survivals = [survival(one.confidences) for one in live.values()]
                budget = choose_budget(survivals, self._times.curve(), self._max_draft)
            step = self._runner.launch(DecodeBatch(rows, budget))
            self._runner.sample(step, {})
            result = await self._runner.result(step)
            num_rows = 0
            for at, (seq, one) in enumerate(live.items()):
                output = result.outputs[seq]
                one.num_cached += len(output.tokens)
                one.take([token.token_id for token in output.tokens])
                one.confidences = output.confidences
                before[seq] = at
                num_rows += output.num_rows
            self._times.add(num_rows, result.measured_ms)
            run.turns += len(rows)
            run.rows += num_rows


@dataclass
class _Sequence:
    case: Case
    tokens: Tokens
    table: tuple[int, ...]
    num_cached: int
    said: list[int] = field(default_factory=list)
    confidences: Sequence[float] = ()

    def take(self, token_ids: list[int]) -> None:
        self.tokens.append(token_ids)
        self.said += token_ids


def measure(
    network: Network, tokenizer: Path, rounds: int, batches: Sequence[int] = BATCHES
) -> list[str]:
    """Returns the table. Raises: RuntimeError when drafts changed an answer."""
    bench = Bench(network, max(batches))
    lines = [
        "| batch | mode | tokens per CPU second | over off | tokens a step | rows a token |",
        "|---|---|---|---|---|---|",
    ]
    everything = cases(tokenizer, max(batches))
    for batch in batches:
        # Small batches are run over several of the questions, so that each point has as many.
        groups = [everything[at : at + batch] for at in range(0, len(everything), batch)][:8]
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        shown: dict[str, tuple[float, float]] = {}
        for number in range(rounds + 1):
            said: dict[str, list[list[list[int]]]] = {}
            for mode in MODES if number % 2 else MODES[::-1]:
                runs = [bench.run(group, mode) for group in groups]
                said[mode] = [run.said for run in runs]
                tokens = sum(run.tokens for run in runs)
                if number:  # the first round warms up
                    rates[mode].append(tokens / sum(run.seconds for run in runs))
                    shown[mode] = (
                        tokens / sum(run.turns for run in runs),
                        sum(run.rows for run in runs) / tokens,
                    )
            if any(answers != said["off"] for answers in said.values()):
                raise RuntimeError(f"batch {batch}: drafts changed an answer")
        off = median(rates["off"])
        for mode in MODES:
            rate = median(rates[mode])
            per_step, per_token = shown[mode]
            lines.append(
                f"| {batch} | {mode} | {rate:.0f} | {rate / off:.2f} | {per_step:.2f} "
                f"| {per_token:.2f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_TO)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", type=Path, help="also write the table into this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = ModelConfig.load(options.model)
    with CheckpointReader(options.model, config) as source:
        network = load_network(config, source)
    lines = measure(network, options.model / VOCABULARY, options.rounds)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    where = f"{platform.machine()}, one thread, torch {torch.__version__}, {commit}"
    text = "\n".join([f"{where}; median of {options.rounds} rounds.", "", *lines])
    print(text)
    if options.write:
        head, mark, _ = options.write.read_text().partition("<!-- table -->\n")
        options.write.write_text(f"{head}{mark}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
