"""Configuration of a decode engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import require
from services.common.service import RuntimeConfig
from services.engine.config import ModelConfig
from services.engine.streams import StreamLimits


@dataclass(frozen=True)
class DecodeConfig:
    """One decode instance; the defaults run on a laptop."""

    listen: str = "127.0.0.1:0"
    num_ranks: int = 1
    num_blocks: int = 1152  # per rank, the padding block included; 1024 hold a longest sequence
    max_seqs: int = 64  # per rank
    admit_below: float = 0.9  # share of blocks in use at which admission stops (engine.md, 2.1)
    async_steps: bool = True
    dspark: str = "variable"  # none, fixed or variable
    preempt: str = "migrate"  # migrate, requeue or stop
    persist: str = "decode"  # none, decode or both
    rebalance_steps: int = 10_000  # steps of a window of expert loads; 0: experts never move
    lease_ms: int = 10_000
    max_lease_ms: int = 60_000
    drain_grace_s: float = 60.0
    drain_hard_s: float = 30.0
    swa_pool_bytes: int = 256 * 1024 * 1024
    persist_queue_bytes: int = 64 * 1024 * 1024
    store_ring_blocks: int = 32  # shared with the STORE of this machine, each way; 0: none
    transfer_credit_bytes: int = 8 * 1024 * 1024
    max_chunk_bytes: int = 1024 * 1024
    report_interval_s: float = 0.1
    stall_limit_s: float = 60.0
    model: ModelConfig = field(default_factory=ModelConfig)
    streams: StreamLimits = field(default_factory=StreamLimits)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.num_ranks >= 1, "num_ranks must be at least 1")
        require(self.num_blocks >= 2, "num_blocks must be at least 2")
        require(self.max_seqs >= 1, "max_seqs must be at least 1")
        require(self.rebalance_steps >= 0, "rebalance_steps must not be negative")
        require(0 < self.admit_below <= 1, "admit_below must be in (0, 1]")
        require(self.dspark in ("none", "fixed", "variable"), "dspark: none, fixed or variable")
        require(self.preempt in ("migrate", "requeue", "stop"), "preempt: migrate, requeue, stop")
        require(0 <= self.store_ring_blocks <= 4096, "store_ring_blocks: 0 to 4096")
        require(self.persist in ("none", "decode", "both"), "persist: none, decode or both")
