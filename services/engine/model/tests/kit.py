"""Small networks, and a loop around a runner that does what an engine's does, in one thread."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from services.engine.keys import MediaSpan
from services.engine.model.cache import geometry, kv_layout
from services.engine.model.checkpoint import RandomSource
from services.engine.model.config import ModelConfig
from services.engine.model.device import CpuDevice
from services.engine.model.network import Network, load_network
from services.engine.model.numerics import Numerics
from services.engine.model.presets import NANO
from services.engine.model.runner import TorchRunner
from services.engine.requests import Sampling, Tokens
from services.engine.runner import (
    DecodeBatch,
    DecodeOutput,
    DecodeRow,
    PrefillBatch,
    PrefillRow,
    Start,
)

torch.set_num_threads(1)

EXACT = Numerics()
INVARIANT = Numerics(invariant=True)
NATIVE = Numerics(native=True, quantised_kv=True, invariant=True)


class PredictableSource(RandomSource):
    """Random weights whose drafts are often right: both heads favour one token after another.

    Layers add little to the streams, so that a row is close to its own embedding; the head then
    says the token that a fixed permutation puts after it, and so does the draft head's bias.
    """

    def matrix(self, name: str) -> torch.Tensor:
        value = super().matrix(name)
        vocab = self.config.text.vocab_size
        after = torch.from_numpy(np.random.default_rng(5).permutation(vocab))
        if name == "head.weight":
            embed = super().matrix("embed.weight")
            value = 0.35 * value
            value[after] += embed / embed.shape[1] ** 0.5
        elif name.endswith("markov_head.head.weight"):
            embed = super().matrix(name.replace("head.weight", "embed.weight"))
            value[after] += 2 * embed / embed.shape[1] ** 0.5
        elif name.endswith(("wo_b.weight", "w2.weight")):
            value = 0.3 * value
        return value


@lru_cache(maxsize=16)
def network(
    config: ModelConfig = NANO,
    numerics: Numerics = EXACT,
    seed: int = 1,
    ranks: int = 1,
    predictable: bool = False,
    resident: bool = False,
) -> Network:
    kind = PredictableSource if predictable else RandomSource
    device = CpuDevice(is_resident=resident)
    return load_network(config, kind(config, seed), numerics, num_expert_ranks=ranks, device=device)


def with_text(config: ModelConfig, **changes: object) -> ModelConfig:
    return replace(config, text=replace(config.text, **changes))


def prompt(num: int, seed: int = 0, vocab: int = 240) -> list[int]:
    return np.random.default_rng([9, seed]).integers(3, vocab, num).tolist()


class Driver:
    """Owns block numbers and state slots; every call runs to its end."""

    def __init__(
        self,
        net: Network,
        *,
        num_blocks: int = 400,
        prefill: bool = True,
        **options: object,
    ) -> None:
        self.net = net
        config = net.config
        layout = kv_layout(config, net.numerics, model_id="m", weights_id="w")
        shape = geometry(config)
        self.geometry = shape
        self.runner = TorchRunner(
            net,
            layout,
            num_blocks,
            ring_slots=shape.prefill_ring if prefill else shape.ring,
            **options,
        )
        self._free = list(range(num_blocks - 1, 0, -1))
        self.tables: dict[int, list[int]] = {}
        self._slots = 0
        self.tokens: dict[int, Tokens] = {}
        self.cached: dict[int, int] = {}
        self.last_rows: dict[int, tuple[int, int]] = {}  # step, row of the step before

    def open(
        self,
        seq: int,
        ids: Sequence[int],
        *,
        num_computed: int | None = None,
        media: tuple[MediaSpan, ...] = (),
        **sampling: object,
    ) -> None:
        tokens = Tokens(self.geometry, array("I", ids), media)
        self._slots += 1
        num = len(ids) if num_computed is None else num_computed
        fields = {"max_tokens": 1000} | sampling
        self.runner.open(Start(seq, f"r{seq}", tokens, Sampling(**fields), num, num, self._slots))
        self.tokens[seq] = tokens
        self.tables[seq] = []
        self.cached[seq] = 0
        self._room(seq, num + 3 * self.geometry.back)

    def _room(self, seq: int, num_tokens: int) -> None:
        table = self.tables[seq]
        while len(table) < self.geometry.num_blocks(num_tokens):
            table.append(self._free.pop())

    def row(
        self,
        seq: int,
        start: int,
        end: int,
        *,
        valid_start: int = 0,
        write_from: int = 0,
        embeddings: tuple[tuple[int, bytes], ...] = (),
    ) -> PrefillRow:
        return PrefillRow(
            seq,
            start,
            end - start,
            valid_start,
            write_from,
            end == len(self.tokens[seq]),
            tuple(self.tables[seq]),
            embeddings,
        )

    def prefill(self, *rows: PrefillRow) -> dict[int, int]:
        """Runs one step; returns the first tokens of sequences that were last."""
        result = asyncio.run(self.runner.prefill(PrefillBatch(tuple(rows))))
        assert not result.faults, result.faults
        for row in rows:
            self.cached[row.seq_id] = row.start + row.num_tokens
        first = {seq: token.token_id for seq, token in result.first.items()}
        for seq, token in first.items():
            self.tokens[seq].append([token])
        return first

    def start(self, seq: int, ids: Sequence[int], cuts: Sequence[int] = (), **options) -> int:
        """Opens and prefills a sequence, cut into chunks at `cuts`; returns its first token."""
        self.open(seq, ids, **options)
        borders = [0, *cuts, len(ids)]
        first = {}
        for low, high in itertools.pairwise(borders):
            first = self.prefill(self.row(seq, low, high))
        return first[seq]

    def step(
        self, seqs: Sequence[int], *, drafts: int | None = None, masks: dict | None = None
    ) -> dict[int, DecodeOutput]:
        """Runs one decode step. `drafts`: how many each may verify; None as many as there are."""
        runner = self.runner
        number = runner.num_steps + 1
        most = self.geometry.back if drafts is None else drafts + 1
        rows = []
        for seq in seqs:
            self._room(seq, len(self.tokens[seq]) + 2 * self.geometry.back)
            step, row = self.last_rows.get(seq, (-1, -1))
            remap = row if step == number - 1 else -1
            rows.append(DecodeRow(seq, remap, self.cached[seq], tuple(self.tables[seq]), most))
        budget = len(rows) * most

        async def run():
            launched = runner.launch(DecodeBatch(tuple(rows), budget))
            runner.sample(launched, masks or {})
            return await runner.result(launched)

        result = asyncio.run(run())
        assert not result.faults, result.faults
        for at, seq in enumerate(seqs):
            said = [token.token_id for token in result.outputs[seq].tokens]
            self.tokens[seq].append(said)
            self.cached[seq] += len(said)
            self.last_rows[seq] = (number, at)
        return result.outputs

    def decode(self, seq: int, count: int, *, drafts: int | None = None) -> list[int]:
        """Decodes one sequence; returns its next `count` tokens."""
        said: list[int] = []
        while len(said) < count:
            out = self.step([seq], drafts=drafts)[seq]
            said += [token.token_id for token in out.tokens]
        return said[:count]

    def generate(self, ids: Sequence[int], count: int, seq: int = 1, **options) -> list[int]:
        drafts = options.pop("drafts", None)
        return [self.start(seq, ids, **options), *self.decode(seq, count - 1, drafts=drafts)]

    def blocks(self, seq: int, num: int | None = None) -> list[bytes]:
        """Returns the stored form of a sequence's complete blocks."""
        full = (self.cached[seq] if num is None else num) // self.geometry.block_tokens
        return [self.runner.read_block(block) for block in self.tables[seq][:full]]
