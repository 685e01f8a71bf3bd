"""Configuration of the store's processes; one frozen dataclass per role."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.common.config import require, secret
from services.common.service import RuntimeConfig
from services.kvstore.gc.policy import Waterlines
from services.kvstore.placement import Profile


@dataclass(frozen=True)
class CheckConfig:
    """Role CHECK: one process per entrypoint machine."""

    listen: str = "127.0.0.1:0"
    # The store whose commit log is followed; empty: found by membership.
    store: str = ""
    # 32 secret bytes. A file that does not exist yet is made, once, readable by its owner only.
    # Empty: a random key, so that what is stored is found again only until the next start.
    cluster_key_file: str = secret("")
    # Time the window-state look-up may take; past it the hit goes on as if there were none.
    swa_timeout_ms: float = 400.0
    # Without a word from the store for so long, a short hit is reported as "lagging".
    lagging_after_ms: float = 5_000.0
    max_sessions: int = 100_000
    max_session_bytes: int = 256 << 20
    max_queued_touches: int = 10_000
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.swa_timeout_ms > 0, "swa_timeout_ms must be above 0")
        require(self.max_sessions > 0, "max_sessions must be above 0")


@dataclass(frozen=True)
class StoreConfig:
    """Role STORE: one process per engine machine."""

    listen: str = "127.0.0.1:0"
    # "local": segment files in `dir`. "nodes": erasure-coded over storage nodes.
    backend: Literal["local", "nodes"] = "local"
    dir: Path = Path("run/kv")
    capacity_bytes: int = 2 << 30
    segment_bytes: int = 64 << 20
    payload_bytes: int = 114_688  # largest block
    put_ack: Literal["buffered", "durable"] = "buffered"
    max_queued_put_bytes: int = 512 << 20
    max_parallel_puts: int = 16
    max_inflight_fetch_bytes: int = 256 << 20
    # Over nodes: wait before the shard kept back is asked for too (at least; the 95th percentile
    # of late reads counts when it is longer), the end of a read, the wait for slow writers.
    hedge_ms: float = 2.0
    read_timeout_ms: float = 1_000.0
    put_timeout_ms: float = 200.0
    lines: Waterlines = field(default_factory=Waterlines)
    gc_every_s: float = 5.0
    gc_orphans_every_s: float = 3_600.0
    gc_max_deletes_per_s: float = 5_000.0
    # Bytes a second that scrubbing may read; 0 turns it off. A pass begins every 7 days.
    scrub_bytes_per_s: float = 8 << 20
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.payload_bytes > 0, "payload_bytes must be above 0")
        require(self.capacity_bytes > 0, "capacity_bytes must be above 0")
        require(self.max_parallel_puts > 0, "max_parallel_puts must be above 0")


@dataclass(frozen=True)
class SwaConfig:
    """A shard of the window-state directory, run alone."""

    listen: str = "127.0.0.1:0"
    max_entries: int = 1_000_000
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.max_entries > 0, "max_entries must be above 0")


@dataclass(frozen=True)
class StorageNodeConfig:
    """One storage node: shards on one disk, and the records of the groups it leads."""

    listen: str = "127.0.0.1:0"
    dir: Path = Path("run/kv-node")
    node_id: str = ""  # empty: made once and kept on the disk
    domain: str = ""  # failure domain (rack, host); empty: a domain of its own
    capacity_bytes: int = 2 << 30
    segment_bytes: int = 64 << 20
    payload_bytes: int = 114_688  # largest block
    profile: str = "10+2"
    num_groups: int = 1024  # fixed for the life of the cluster
    out_after_s: float = 900.0  # a node away for so long is replaced
    keeper_every_s: float = 1.0
    repair_bytes_per_s: float = 64 << 20
    scrub_bytes_per_s: float = 8 << 20
    lines: Waterlines = field(default_factory=Waterlines)
    # Seconds between passes of a worker inside this process; 0 when `pelagos serve gc` runs beside.
    gc_every_s: float = 5.0
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        Profile.parse(self.profile)
        require(0 < self.num_groups <= 65_535, "num_groups must be in 1..65535")
        require(self.payload_bytes > 0, "payload_bytes must be above 0")


@dataclass(frozen=True)
class GcConfig:
    """The worker beside one storage node."""

    listen: str = "127.0.0.1:0"
    node: str = ""  # address of its node; empty: the node of this machine, by membership
    lines: Waterlines = field(default_factory=Waterlines)
    every_s: float = 5.0
    orphans_every_s: float = 3_600.0
    max_deletes_per_s: float = 5_000.0
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.every_s > 0, "every_s must be above 0")
