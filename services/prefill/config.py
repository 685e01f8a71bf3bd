"""Configuration of a prefill engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import require
from services.common.service import RuntimeConfig
from services.engine.config import ModelConfig
from services.engine.streams import StreamLimits


@dataclass(frozen=True)
class PrefillConfig:
    """One prefill instance; the defaults run on a laptop."""

    listen: str = "127.0.0.1:0"
    num_ranks: int = 1
    num_blocks: int = 2304  # per rank, the padding block included; 1024 hold a longest prompt
    num_state_slots: int = 129  # per rank, the padding slot included
    step_budget_ms: float = 100.0  # time one step may take; sets the chunk size
    max_batched_tokens: int = 8192
    max_seqs: int = 64  # sequences of one step
    max_sum_k: int = 1 << 20  # sum of the full lengths in a step
    min_chunk: int = 128
    max_waiting: int = 512  # requests held before new ones are refused
    quota_ms: float = 0.0  # work it may hold; 0: two steps of every rank
    shards: tuple[str, ...] = ("",)  # shards of the prefill balancer it pulls from
    accept_buckets: int = 0  # bit b: takes bucket b; 0: all
    persist: str = "both"  # none, decode or both: blocks of requests that end here
    grammar_timeout_s: float = 10.0
    image_timeout_s: float = 20.0
    load_base_s: float = 2.0
    load_per_1k_s: float = 0.1
    load_cap_s: float = 30.0
    handoff_timeout_s: float = 60.0
    handoff_attempts: int = 3
    pick_wait_ms: int = 5000  # how long the decode balancer may let a request wait for room
    swa_pool_bytes: int = 256 * 1024 * 1024
    persist_queue_bytes: int = 64 * 1024 * 1024
    store_ring_blocks: int = 32  # shared with the STORE of this machine, each way; 0: none
    stall_limit_s: float = 60.0
    model: ModelConfig = field(default_factory=ModelConfig)
    streams: StreamLimits = field(default_factory=StreamLimits)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.num_ranks >= 1, "num_ranks must be at least 1")
        require(self.num_blocks >= 2, "num_blocks must be at least 2")
        require(self.num_state_slots >= 2, "num_state_slots must be at least 2")
        require(self.step_budget_ms > 0, "step_budget_ms must be above 0")
        require(self.max_batched_tokens >= 1, "max_batched_tokens must be at least 1")
        require(self.max_waiting >= 1, "max_waiting must be at least 1")
        require(0 <= self.store_ring_blocks <= 4096, "store_ring_blocks: 0 to 4096")
        require(self.persist in ("none", "decode", "both"), "persist: none, decode or both")
        require(self.handoff_attempts >= 1, "handoff_attempts must be at least 1")

    @property
    def quota_ns(self) -> int:
        """Returns the work the engine may hold, ns."""
        quota_ms = self.quota_ms or 2 * self.num_ranks * self.step_budget_ms
        return round(1e6 * quota_ms)
