"""Which processes the local stack is made of, and how each is started. Pure.

Tiers start one after the other and end in reverse: what others need comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.common.cli import SERVICES
from services.common.config import require

STORE, MATCH, BALANCERS, ENGINES, FRONT = range(5)
_NUM_GROUPS = 64  # placement groups; a cluster on one machine needs no more


@dataclass(frozen=True)
class StackConfig:
    """How many of what; the defaults are the local stack of the quick start."""

    folder: Path = Path(".local/stack")
    engine: Literal["sim", "torch"] = "sim"
    cluster: str = "local"
    num_prefill: int = 2
    num_decode: int = 2
    num_encoders: int = 1
    num_entrypoints: int = 2
    num_prefill_lbs: int = 1  # more are standbys
    num_decode_lbs: int = 1
    backend: Literal["local", "nodes"] = "local"
    num_storage_nodes: int = 3  # with backend "nodes"
    http_port: int = 0  # of the first entrypoint; 0: any free one
    without: tuple[str, ...] = ()  # services to leave out
    etcd: str = ""  # an etcd that runs already; empty: one of our own
    log_level: str = "info"
    drain_notice_s: float = 0.2  # peers on one machine see a change at once
    drain_grace_s: float = 10.0
    # Flags by service, for all of its processes: {"decode": ["--num_blocks", "64"]}.
    flags: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for count in (self.num_prefill, self.num_decode, self.num_encoders, self.num_entrypoints):
            require(0 <= count <= 64, "counts must be in [0, 64]")
        require(self.num_entrypoints >= 1, "num_entrypoints must be at least 1")
        require(3 <= self.num_storage_nodes <= 32, "num_storage_nodes must be in [3, 32]")
        unknown = sorted({*self.without, *self.flags} - set(SERVICES))
        require(not unknown, f"not a service: {', '.join(unknown)}")


@dataclass(frozen=True)
class ProcessSpec:
    """One process: its name in the stack, what it serves, its flags and its tier."""

    name: str
    service: str
    tier: int
    flags: tuple[str, ...] = ()


def plan(config: StackConfig) -> tuple[ProcessSpec, ...]:
    """Returns the processes in the order in which they start."""
    folder = config.folder
    keys = f"--key_folder={folder / 'keys'}"
    specs: list[ProcessSpec] = []

    def add(service: str, tier: int, count: int = 1, *flags: str) -> None:
        if service in config.without:
            return
        for i in range(count):
            name = service if count == 1 else f"{service}-{i + 1}"
            own = tuple(flag.replace("{name}", name) for flag in flags)
            extra = tuple(config.flags.get(service, ()))
            specs.append(ProcessSpec(name, service, tier, (*own, *extra)))

    nodes = config.num_storage_nodes if config.backend == "nodes" else 0
    add(
        "storage-node",
        STORE,
        nodes,
        f"--dir={folder / 'kv' / '{name}'}",
        f"--profile={profile(config.num_storage_nodes)}",
        f"--num_groups={_NUM_GROUPS}",
    )
    add("store", STORE, 1, f"--backend={config.backend}", f"--dir={folder / 'kv' / 'store'}")
    add("recipe", STORE)
    add("so-compiler", STORE)
    add("prefill-lb", BALANCERS, config.num_prefill_lbs)
    add("decode-lb", BALANCERS, config.num_decode_lbs)
    add("vision-lb", BALANCERS)
    add("eplb", BALANCERS)
    add("autoscaler", BALANCERS)
    add("check", MATCH, 1, f"--cluster_key_file={folder / 'keys' / 'cluster-key'}")
    add("encoder", ENGINES, config.num_encoders, f"--model.engine={config.engine}")
    add("decode", ENGINES, config.num_decode, f"--model.engine={config.engine}")
    add("prefill", ENGINES, config.num_prefill, f"--model.engine={config.engine}")
    add("entrypoint", FRONT, config.num_entrypoints, keys)
    return tuple(
        _with_http_port(spec, config, specs) for spec in sorted(specs, key=lambda s: s.tier)
    )


def profile(num_nodes: int) -> str:
    """Returns the erasure code for so many nodes: any two may fail from twelve on, else one."""
    return "10+2" if num_nodes >= 12 else f"{num_nodes - 1}+1"


def _with_http_port(
    spec: ProcessSpec, config: StackConfig, specs: list[ProcessSpec]
) -> ProcessSpec:
    """Returns the spec with its HTTP address; only the first entrypoint gets the wished port."""
    if spec.service != "entrypoint":
        return spec
    is_first = spec is next(item for item in specs if item.service == "entrypoint")
    port = config.http_port if is_first else 0
    return ProcessSpec(
        spec.name, spec.service, spec.tier, (f"--http_listen=127.0.0.1:{port}", *spec.flags)
    )


def common_flags(config: StackConfig, spec: ProcessSpec, etcd: str) -> tuple[str, ...]:
    """Returns the flags every process gets: where it registers, logs and traces."""
    return (
        "--listen=127.0.0.1:0",
        f"--runtime.cluster={config.cluster}",
        f"--runtime.etcd={etcd}",
        "--runtime.machine=local",
        f"--runtime.ready_file={ready_file(config, spec.name)}",
        f"--runtime.log_level={config.log_level}",
        f"--runtime.tracing.folder={config.folder / 'traces'}",
        f"--runtime.drain.notice_s={config.drain_notice_s}",
        f"--runtime.drain.grace_s={config.drain_grace_s}",
        "--runtime.die_with_parent",
    )


def ready_file(config: StackConfig, name: str) -> Path:
    """Returns where a process says that it serves."""
    return config.folder / "ready" / f"{name}.json"


def log_file(config: StackConfig, name: str) -> Path:
    """Returns where a process logs."""
    return config.folder / "logs" / f"{name}.log"
