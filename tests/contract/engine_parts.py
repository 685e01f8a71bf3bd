"""What the contract tests of the engines share: prompts, and sequences prefilled on the spot."""

from __future__ import annotations

import random
from array import array
from typing import Any

from pelagos.engine.v1 import records_pb2 as pb

from services.engine.config import ModelConfig
from services.engine.layout import Geometry
from services.engine.sim.config import SimConfig
from services.engine.sim.prompt import Prefilled
from services.engine.sim.prompt import prefilled as compute

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


async def prefilled(request: pb.RequestSpec, model: ModelConfig) -> Prefilled:
    """Computes a prompt and makes its record as prefill does: under the next owner's epoch."""
    found = await compute(request, model)
    found.record.key.epoch += 1
    return found
