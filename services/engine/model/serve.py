"""From settings to what runs: the one place where services reach torch, when they ask for it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from services.engine.layout import KvLayout
from services.engine.model.cache import kv_layout
from services.engine.model.checkpoint import CheckpointReader, RandomSource, TensorSource
from services.engine.model.device import open_device
from services.engine.model.engram_hash import Int64
from services.engine.model.exchange import join_group
from services.engine.model.network import Network, load_network
from services.engine.model.numerics import Numerics
from services.engine.model.runner import TorchRunner
from services.engine.model.settings import TorchConfig
from services.engine.model.vision import VisionTower
from services.engine.model.vocabulary import TOKEN_MAP


def numerics_of(settings: TorchConfig) -> Numerics:
    return Numerics(
        native=settings.numerics == "native",
        quantised_kv=settings.numerics != "float32",
        invariant=settings.batch_invariant,
    )


def layout_of(settings: TorchConfig, model_id: str) -> KvLayout:
    """Returns the byte layout of the model's caches."""
    return kv_layout(
        settings.model, numerics_of(settings), model_id=model_id, weights_id=settings.weights_id
    )


def runner_of(
    settings: TorchConfig,
    layout: KvLayout,
    num_blocks: int,
    *,
    for_prefill: bool,
    max_seqs: int = 64,
) -> TorchRunner:
    """Returns one rank's device; ranks of a process share the weights."""
    shape = layout.geometry
    return TorchRunner(
        network_of(settings),
        layout,
        num_blocks,
        ring_slots=shape.prefill_ring if for_prefill else shape.ring,
        truncation=settings.truncation,
        verify_mode=settings.verify,
        num_threads=settings.num_threads,
        max_seqs=max_seqs,
        graph_rows=settings.graph_rows,
    )


@lru_cache(maxsize=2)
def network_of(settings: TorchConfig) -> Network:
    """Loads a network, once per process and settings. Raises: CheckpointError, ValueError."""
    config = settings.model
    return load_network(
        config,
        source_of(settings),
        numerics_of(settings),
        num_expert_ranks=settings.expert_ranks,
        extra_experts=settings.extra_experts,
        token_map=_token_map(settings),
        device=settings.device,
        exchange=(
            join_group(settings.group_store, settings.group_rank, settings.group_size)
            if settings.group_size > 1
            else None
        ),
    )


def tower_of(settings: TorchConfig) -> VisionTower:
    """Loads the vision tower and its aligner, nothing else."""
    source = source_of(settings)
    device = open_device(settings.device)
    return VisionTower(settings.model, source, native=settings.numerics == "native", device=device)


def source_of(settings: TorchConfig) -> TensorSource:
    config = settings.model
    if settings.checkpoint:
        return CheckpointReader(Path(settings.checkpoint), config)
    return RandomSource(config, settings.seed)


def _token_map(settings: TorchConfig) -> Int64 | None:
    """Returns the n-gram memory's token map, None where ids are used as they are.

    It is kept beside the checkpoint; where it is missing the tokenizer there gives it.
    """
    text = settings.model.text
    if text.engram_compressed_vocab_size == text.vocab_size:
        return None
    path = Path(settings.checkpoint or ".") / TOKEN_MAP
    vocabulary = settings.vocabulary
    if path.exists() and settings.checkpoint:
        token_map: Int64 = np.load(path, allow_pickle=False).astype(np.int64)
    elif vocabulary is not None:
        token_map = vocabulary.token_map(text.vocab_size)
    else:
        raise ValueError(f"the n-gram memory needs {TOKEN_MAP} beside the checkpoint")
    distinct = len(np.unique(token_map))
    if len(token_map) != text.vocab_size or distinct != text.engram_compressed_vocab_size:
        raise ValueError(
            f"{TOKEN_MAP} maps {len(token_map)} ids to {distinct}, expected {text.vocab_size} "
            f"to {text.engram_compressed_vocab_size}"
        )
    return token_map
