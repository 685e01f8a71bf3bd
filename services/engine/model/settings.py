"""Settings of the network as an engine: which weights, which numbers, which device.

Free of torch: a service reads sizes from here before anything heavy is loaded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from services.common.config import require
from services.engine.layout import Geometry
from services.engine.model.config import ModelConfig
from services.engine.model.presets import PRESETS
from services.engine.model.vocabulary import Vocabulary, vocabulary_of

NUMERICS = ("float32", "quantised-kv", "native")
# Of a shard that is larger, only so much at either end tells it from others.
_WHOLE_BYTES = 64 << 20
_END_BYTES = 1 << 20


@dataclass(frozen=True)
class TorchConfig:
    """How the network runs. Without a checkpoint it has random weights of a preset."""

    checkpoint: str = ""  # folder with config.json and safetensors files
    preset: str = "tiny"
    seed: int = 0  # of random weights
    device: str = "cpu"
    numerics: str = "float32"  # float32, quantised-kv (FP4 and FP8 caches) or native (bf16 too)
    batch_invariant: bool = True  # a row's bits do not depend on its batch
    truncation: str = "compact"  # decoder half in prefill: compact, mask or off
    verify: str = "coupled"  # coupled or rejection
    num_threads: int = 1  # of one rank
    expert_ranks: int = 1  # ranks that share the experts, in this process
    extra_experts: int = 0  # replicas per layer
    group_size: int = 1  # processes that share the experts; each is a rank with requests of its own
    group_rank: int = 0
    group_store: str = ""  # host:port at which rank 0 meets the others
    graph_rows: int = 0  # largest decode step that a GPU captures, 0: all

    def __post_init__(self) -> None:
        require(self.preset in PRESETS, f"preset is one of {', '.join(sorted(PRESETS))}")
        require(self.numerics in NUMERICS, f"numerics is one of {', '.join(NUMERICS)}")
        require(self.truncation in ("compact", "mask", "off"), "truncation: compact, mask or off")
        require(self.verify in ("coupled", "rejection"), "verify is coupled or rejection")
        require(self.num_threads >= 1, "num_threads must be at least 1")
        require(self.expert_ranks >= 1, "expert_ranks must be at least 1")
        require(self.extra_experts >= 0, "extra_experts must not be negative")
        require(0 <= self.group_rank < self.group_size, "group_rank must be below group_size")
        if self.group_size > 1:
            require(":" in self.group_store, "a group meets at group_store, host:port")
            require(self.expert_ranks == 1, "expert ranks are in this process, or in a group")
            require(self.device == "cpu", "groups of processes are of CPUs; cards share a process")
        require(self.graph_rows >= 0, "graph_rows must not be negative")

    @property
    def model(self) -> ModelConfig:
        """Returns the network's own configuration. Raises: ConfigError, OSError."""
        return _load(self.checkpoint) if self.checkpoint else PRESETS[self.preset]

    @property
    def geometry(self) -> Geometry:
        model = self.model
        return Geometry(
            model.system.block_tokens,
            model.text.sliding_window,
            model.text.dspark_block_size,
            model.system.keep_tokens,
        )

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Returns what the checkpoint's tokenizer says, None without one. Raises: ConfigError."""
        return vocabulary_of(Path(self.checkpoint)) if self.checkpoint else None

    @property
    def weights_id(self) -> str:
        """Returns what tells these weights and numbers from others."""
        if not self.checkpoint:
            return f"random-{self.preset}-{self.seed}/{self.numerics}"
        return f"{_digest(self.checkpoint)}/{self.numerics}"


@lru_cache(maxsize=8)
def _load(checkpoint: str) -> ModelConfig:
    return ModelConfig.load(Path(checkpoint))


@lru_cache(maxsize=8)
def _digest(checkpoint: str) -> str:
    """Digest over configuration, tokenizer and shards; of large shards only sizes and both ends.

    Two trainings of one network give files of equal sizes, and KV of the one is garbage to the
    other.
    """
    folder, digest = Path(checkpoint), hashlib.sha256()
    for path in sorted(folder.glob("*.json")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
                continue
            digest.update(file.read(_END_BYTES))
            file.seek(-_END_BYTES, 2)
            digest.update(file.read())
    return digest.hexdigest()[:16]
