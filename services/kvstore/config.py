"""Configuration of the store's processes; one frozen dataclass per role."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from services.common.config import require, secret
from services.common.rpc_server import RpcServerConfig
from services.common.service import RuntimeConfig
from services.kvstore.gc.policy import Waterlines
from services.kvstore.placement import Profile

# It is part of keys in the cluster store.
NODE_ID: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_MAX_PAYLOAD_BYTES: Final = 64 << 20


def _above_0(config: object, *names: str) -> None:
    for name in names:
        require(getattr(config, name) > 0, f"{name} must be above 0")


def _not_below_0(config: object, *names: str) -> None:
    for name in names:
        require(getattr(config, name) >= 0, f"{name} must not be below 0")


def _check_payload(payload_bytes: int) -> None:
    is_right = 0 < payload_bytes <= _MAX_PAYLOAD_BYTES
    require(is_right, f"payload_bytes must be in 1..{_MAX_PAYLOAD_BYTES}")


@dataclass(frozen=True)
class CheckConfig:
    """Role CHECK: one process per entrypoint machine."""

    listen: str = "127.0.0.1:0"
    # The store whose commit log is followed; empty: found by membership.
    store: str = ""
    # 32 secret bytes. A file that does not exist yet is made, once, readable by its owner only.
    # Empty: a random key, so that what is stored is found again only until the next start.
    cluster_key_file: str = secret("")
    # "replica": a copy of the index, fed by the store's log, good for some 10^8 blocks a machine.
    # "sharded": the storage nodes' primaries are asked instead (a store with backend "nodes").
    index: Literal["replica", "sharded"] = "replica"
    lookup_timeout_ms: float = 50.0  # sharded: a primary later than this is taken for absent
    lookup_budget_ms: float = 2.0  # sharded: past it the accepted prefix is not looked up whole
    # Time the window-state look-up may take; past it the hit goes on as if there were none.
    swa_timeout_ms: float = 400.0
    # Without a word from the store for so long, a short hit is reported as "lagging".
    lagging_after_ms: float = 5_000.0
    max_sessions: int = 100_000
    max_session_bytes: int = 256 << 20
    max_queued_touches: int = 10_000
    # A match holds its prompt's tokens; more at once than these are refused, and hit nothing.
    runtime: RuntimeConfig = field(
        default_factory=lambda: RuntimeConfig(rpc=RpcServerConfig(max_calls=2_048))
    )

    def __post_init__(self) -> None:
        _above_0(self, "swa_timeout_ms", "lookup_timeout_ms", "max_sessions", "max_queued_touches")
        _not_below_0(self, "lookup_budget_ms", "lagging_after_ms", "max_session_bytes")


@dataclass(frozen=True)
class SharedConfig:
    """How a STORE uses a storage that others use too (backends posix, s3, redis)."""

    # Under this name its blocks lie there, and only it evicts them. Empty: made once, in `dir`.
    writer: str = ""
    poll_every_s: float = 1.0  # until blocks of others are seen
    timeout_s: float = 5.0  # of one answer of the storage
    batch_blocks: int = 64  # at most so many in one write
    linger_ms: float = 50.0  # wait for more of them, where a write is an object (s3)
    reap_after_days: float = 14.0  # what others left that wrote nothing since is removed; 0: never
    s3_endpoint: str = ""  # empty: Amazon's
    s3_region: str = "us-east-1"
    redis_password_file: str = secret("")

    def __post_init__(self) -> None:
        _above_0(self, "poll_every_s", "timeout_s")
        _not_below_0(self, "linger_ms", "reap_after_days")
        require(1 <= self.batch_blocks <= 512, "batch_blocks must be in [1, 512]")


SHARED_BACKENDS: Final = ("posix", "s3", "redis")


@dataclass(frozen=True)
class StoreConfig:
    """Role STORE: one process per engine machine."""

    listen: str = "127.0.0.1:0"
    # "local": segment files in `dir`. "nodes": erasure-coded over storage nodes. The others are
    # storages that several STOREs share; `at` says where.
    backend: Literal["local", "nodes", "posix", "s3", "redis"] = "local"
    # posix: a folder on a mount; s3: s3://bucket/prefix; redis: redis://host:port/db.
    at: str = ""
    shared: SharedConfig = field(default_factory=SharedConfig)
    dir: Path = Path("run/kv")
    capacity_bytes: int = 2 << 30
    segment_bytes: int = 64 << 20
    payload_bytes: int = 114_688  # largest block
    put_ack: Literal["buffered", "durable"] = "buffered"
    # "aes-256-gcm": blocks are encrypted under keys of their tenants, derived from the secret in
    # `cluster_key_file`. Blocks that the key does not open are misses.
    encryption: Literal["off", "aes-256-gcm"] = "off"
    cluster_key_file: str = secret("")  # as of CHECK; made when it does not exist
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
        _above_0(self, "capacity_bytes", "segment_bytes", "max_queued_put_bytes")
        _above_0(self, "max_parallel_puts", "max_inflight_fetch_bytes", "read_timeout_ms")
        _above_0(self, "put_timeout_ms", "gc_every_s", "gc_orphans_every_s", "gc_max_deletes_per_s")
        _not_below_0(self, "hedge_ms", "scrub_bytes_per_s")
        _check_payload(self.payload_bytes)
        if self.backend in SHARED_BACKENDS:
            require(bool(self.at), f"backend {self.backend} needs `at`: where the storage is")
        else:
            require(not self.at, f"backend {self.backend} takes no `at`")
        require(
            self.encryption == "off" or bool(self.cluster_key_file),
            "encryption needs cluster_key_file",
        )
        require(
            self.backend != "redis" or "@" not in self.at,
            "at: a password belongs in shared.redis_password_file, for `at` is shown and logged",
        )
        require(
            self.backend != "redis" or self.put_ack == "buffered",
            "put_ack durable: a redis server does not say what is durable",
        )


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
        _above_0(self, "capacity_bytes", "segment_bytes", "keeper_every_s", "repair_bytes_per_s")
        _not_below_0(self, "out_after_s", "scrub_bytes_per_s", "gc_every_s")
        _check_payload(self.payload_bytes)
        require(
            not self.node_id or re.fullmatch(NODE_ID, self.node_id) is not None,
            "node_id: letters, digits and . _ -, 64 at most",
        )


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
        _above_0(self, "every_s", "orphans_every_s", "max_deletes_per_s")
