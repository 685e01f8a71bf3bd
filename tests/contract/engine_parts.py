"""What the contract tests of the engines share: prompts, and sequences prefilled on the spot."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any

from pelagos.engine.v1 import records_pb2 as pb

from services.engine.config import ModelConfig
from services.engine.handoff import outgoing_pieces
from services.engine.layout import Geometry
from services.engine.records import sampling_from_proto, tokens_from_spec
from services.engine.requests import Tokens
from services.engine.runner import (
    DecodeBatch,
    DecodeRow,
    ModelRunner,
    PrefillBatch,
    PrefillRow,
    Start,
)
from services.engine.sim.config import SimConfig
from services.engine.transfer_client import Outgoing, checksum

GEOMETRY = Geometry(block_tokens=16, window=16, keep_tokens=24)


def quick_model(**sim: Any) -> ModelConfig:
    """A model of small blocks that answers at once."""
    settings = {"mode": "hash", "stop_every": 0, "time_scale": 0.0} | sim
    return ModelConfig(geometry=GEOMETRY, max_model_len=2048, sim=SimConfig(**settings))


def prompt_ids(num: int, seed: int = 0) -> array[int]:
    rng = random.Random(seed)
    return array("I", [rng.randrange(3, 128000) for _ in range(num)])


def spec(request_id: str, ids: array[int], *, max_tokens: int = 20, **key: int) -> pb.RequestSpec:
    return pb.RequestSpec(
        key=pb.RequestKey(request_id=request_id, **key),
        prompt_tokens=ids.tobytes(),
        sampling=pb.Sampling(max_tokens=max_tokens, temperature=1.0, seed=7, stop_token_ids=[1]),
        namespace=pb.Namespace(tenant="acme"),
    )


@dataclass
class Prefilled:
    """A sequence after its prompt: what a prefill engine hands over."""

    record: pb.HandoffRecord
    pieces: list[Outgoing]
    num_tokens: int
    runner: ModelRunner
    tokens: Tokens
    table: list[int]

    async def continued(self, num: int) -> list[int]:
        """The tokens that must follow the first one, from a device that was never left."""
        said: list[int] = []
        num_cached, remap = self.num_tokens, -1
        while len(said) < num:
            row = DecodeRow(1, remap, num_cached, tuple(self.table), 1)
            step = self.runner.launch(DecodeBatch((row,), 1))
            self.runner.sample(step, {})
            output = (await self.runner.result(step)).outputs[1]
            said += [token.token_id for token in output.tokens]
            num_cached, remap = num_cached + 1, 0
        return said


async def prefilled(request: pb.RequestSpec, model: ModelConfig) -> Prefilled:
    """Computes a prompt on a simulated device of its own."""
    runner = model.make_runner(200, for_prefill=True)
    tokens = tokens_from_spec(request, model.geometry)
    num = len(tokens)
    table = list(range(1, 190))
    sampling = sampling_from_proto(request.sampling)
    runner.open(Start(1, request.key.request_id, tokens, sampling, num, num, 1))
    row = PrefillRow(1, 0, num, 0, 0, True, tuple(table))
    first = (await runner.prefill(PrefillBatch((row,)))).first[1]
    pieces = outgoing_pieces(runner, 1, num, table)
    num_full = num // model.geometry.block_tokens
    key = pb.RequestKey()
    key.CopyFrom(request.key)
    key.epoch += 1
    record = pb.HandoffRecord(
        key=key,
        spec=request,
        output_tokens=first.token_id.to_bytes(4, "little"),
        num_cached=num,
        usage=pb.Usage(prompt_tokens=num, output_tokens=1),
        durable_blocks=bytes(num_full),
        state_position=num,
        layout_signature=runner.layout.signature,
        kv_checksum=checksum(pieces),
        coverage_tokens=num,
    )
    return Prefilled(record, pieces, num, runner, tokens, table)
