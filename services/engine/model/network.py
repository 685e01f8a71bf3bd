"""A model ready to run: weights, experts over ranks, n-gram tables; made once per process.

Source: model.md, sections 18, 19 and 23.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.model.backbone import Backbone
from services.engine.model.cache import BlockPool, StatePool
from services.engine.model.checkpoint import TensorSource
from services.engine.model.config import ModelConfig
from services.engine.model.device import Device, open_device
from services.engine.model.dspark import DraftHead
from services.engine.model.engram_hash import EngramHash, Int64
from services.engine.model.engram_store import EngramStore, engram_in_memory
from services.engine.model.exchange import DistributedGroup, Exchange
from services.engine.model.numerics import Numerics
from services.engine.model.parallel import ExpertGroup, InProcessGroup
from services.engine.model.weights import Model, load_model


@dataclass(frozen=True)
class Network:
    """What all ranks of a process share."""

    config: ModelConfig
    model: Model
    numerics: Numerics
    experts: ExpertGroup
    engram: EngramStore
    hasher: EngramHash
    device: Device

    def backbone(self, pool: BlockPool, states: StatePool, truncation: str) -> Backbone:
        return Backbone(
            self.model,
            self.numerics,
            self.experts,
            self.engram,
            self.hasher,
            pool,
            states,
            truncation=truncation,
            device=self.device,
        )

    def draft_head(self, backbone: Backbone, states: StatePool) -> DraftHead | None:
        drafter = self.model.drafter
        return DraftHead(backbone, states, drafter) if drafter is not None else None


def load_network(
    config: ModelConfig,
    source: TensorSource,
    numerics: Numerics | None = None,
    *,
    num_expert_ranks: int = 1,
    extra_experts: int = 0,
    engram: EngramStore | None = None,
    token_map: Int64 | None = None,
    device: str | Device = "cpu",
    exchange: Exchange | None = None,
) -> Network:
    """Loads a network. Without `engram` the n-gram tables are held in memory.

    exchange: with the processes that hold the other experts; None: all are held here.

    Raises: ValueError when the configuration cannot run like that.
    """
    numerics = numerics or Numerics()
    text = config.text
    if numerics.native and config.quantization is None:
        raise ValueError("native numerics need a configuration with a quantised form")
    if token_map is None and text.engram_compressed_vocab_size != text.vocab_size:
        raise ValueError(
            f"{text.engram_compressed_vocab_size} compressed ids of {text.vocab_size}: "
            "the n-gram memory needs its token map"
        )
    held = open_device(device) if isinstance(device, str) else device
    model = load_model(config, source, held, numerics)
    if engram is None:
        engram = engram_in_memory(source, text.engram_layer_ids, held)
    experts: ExpertGroup = (
        InProcessGroup(model, numerics, num_expert_ranks, extra_experts)
        if exchange is None
        else DistributedGroup(model, numerics, exchange, extra_experts)
    )
    return Network(
        config,
        model,
        numerics,
        experts,
        engram,
        EngramHash(text, token_map),
        held,
    )
