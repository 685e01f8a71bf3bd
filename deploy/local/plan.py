"""Which processes the local stack is made of, and how each is started. Pure.

Tiers start one after the other and end in reverse: what others need comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from services.common.cli import SERVICES
from services.common.config import require

STORE, MATCH, BALANCERS, ENGINES, FRONT = range(5)
MODELS: Final = Path(__file__).resolve().parents[1] / "models"
LARGE_MODEL: Final = "DeepSeek-V4.1-Flash"  # the name that snippets ask for
# Room at a decode engine is asked for while the last chunk runs, which takes long on a busy CPU.
_SLOW_LEASE_MS: Final = 60_000
_NUM_GROUPS = 64  # placement groups; a cluster on one machine needs no more


@dataclass(frozen=True)
class StackConfig:
    """How many of what; the defaults are the local stack of the quick start."""

    folder: Path = Path(".local/stack")
    engine: Literal["sim", "torch"] = "sim"
    checkpoint: Path = MODELS / "pelagos-mini"  # with engine "torch": weights and tokenizer
    expert_ranks: int = 1  # with engine "torch": ranks that share the experts of an engine
    cluster: str = "local"
    num_prefill: int | None = None  # none: two, and one with torch, whose start takes a core
    num_decode: int | None = None
    num_encoders: int = 1
    num_entrypoints: int = 2
    num_prefill_lbs: int = 1  # more are standbys
    num_decode_lbs: int = 1
    backend: Literal["local", "nodes", "posix", "s3", "redis"] = "local"
    num_storage_nodes: int = 3  # with backend "nodes"
    # With posix a folder that exists, with s3 s3://bucket/prefix, with redis redis://host:port/db.
    backend_at: str = ""
    s3_endpoint: str = ""  # with backend "s3"; empty: Amazon's
    encryption: Literal["off", "aes-256-gcm"] = "off"  # of stored blocks
    http_port: int = 0  # of the first entrypoint; 0: any free one
    without: tuple[str, ...] = ()  # services to leave out
    etcd: str = ""  # an etcd that runs already; empty: one of our own
    log_level: str = "info"
    drain_notice_s: float = 0.2  # peers on one machine see a change at once
    drain_grace_s: float = 10.0
    # Flags by service, for all of its processes: {"decode": ["--num_blocks", "64"]}.
    flags: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for service in ("prefill", "decode", "encoder", "entrypoint"):
            require(0 <= self.count(service) <= 64, "counts must be in [0, 64]")
        require(1 <= self.expert_ranks <= 64, "expert_ranks must be in [1, 64]")
        require(self.num_entrypoints >= 1, "num_entrypoints must be at least 1")
        require(3 <= self.num_storage_nodes <= 32, "num_storage_nodes must be in [3, 32]")
        is_elsewhere = self.backend in ("posix", "s3", "redis")
        where = "needs backend_at" if is_elsewhere else "takes no backend_at"
        require(bool(self.backend_at) == is_elsewhere, f"backend {self.backend} {where}")
        unknown = sorted({*self.without, *self.flags} - set(SERVICES))
        require(not unknown, f"not a service: {', '.join(unknown)}")

    def count(self, service: str) -> int:
        """Returns how many processes of an engine's or the entrypoint's kind there are."""
        few = 1 if self.engine == "torch" else 2
        return {
            "prefill": few if self.num_prefill is None else self.num_prefill,
            "decode": few if self.num_decode is None else self.num_decode,
            "encoder": self.num_encoders,
            "entrypoint": self.num_entrypoints,
        }[service]

    @property
    def model(self) -> str:
        """Returns the name under which the model is asked for."""
        return self.checkpoint.name if self.engine == "torch" else LARGE_MODEL


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
    add("store", STORE, 1, *_store_flags(config))
    add("recipe", STORE, 1, *_codec_flags(config))
    add("so-compiler", STORE)
    add("prefill-lb", BALANCERS, config.num_prefill_lbs)
    add("decode-lb", BALANCERS, config.num_decode_lbs)
    add("vision-lb", BALANCERS)
    add("eplb", BALANCERS)
    add("autoscaler", BALANCERS)
    add("check", MATCH, 1, f"--cluster_key_file={_cluster_key(config)}")
    add("encoder", ENGINES, config.num_encoders, *_model_flags(config))
    ranks = _rank_flags(config)
    lease = () if config.engine == "sim" else (f"--lease_ms={_SLOW_LEASE_MS}",)
    add("decode", ENGINES, config.count("decode"), *_model_flags(config), *ranks, *lease)
    add("prefill", ENGINES, config.count("prefill"), *_model_flags(config), *ranks)
    add("entrypoint", FRONT, config.num_entrypoints, keys)
    return tuple(
        _with_http_port(spec, config, specs) for spec in sorted(specs, key=lambda s: s.tier)
    )


def _store_flags(config: StackConfig) -> tuple[str, ...]:
    """Returns where blocks are kept, and how."""
    flags = [f"--backend={config.backend}", f"--dir={config.folder / 'kv' / 'store'}"]
    if config.backend_at:
        flags.append(f"--at={config.backend_at}")
    if config.s3_endpoint:
        flags.append(f"--shared.s3_endpoint={config.s3_endpoint}")
    if config.encryption != "off":
        flags.append(f"--encryption={config.encryption}")
        flags.append(f"--cluster_key_file={_cluster_key(config)}")
    return tuple(flags)


def _cluster_key(config: StackConfig) -> Path:
    return config.folder / "keys" / "cluster-key"


def _codec_flags(config: StackConfig) -> tuple[str, ...]:
    """Returns what makes the codec speak the checkpoint's vocabulary, under every name offered.

    The other names of its table keep theirs, and requests for them are refused: ids of another
    vocabulary mean other words to this network.
    """
    if config.engine == "sim":
        return ()
    name = config.model
    served = {name, LARGE_MODEL}
    models = ",".join(f"{model}=v4.1@{name}" for model in sorted(served))
    return (f"--tokenizers={name}={config.checkpoint / 'tokenizer.json'}", f"--models={models}")


def _model_flags(config: StackConfig) -> tuple[str, ...]:
    """Returns what makes an engine run the model."""
    if config.engine == "sim":
        return ("--model.engine=sim",)
    return (
        "--model.engine=torch",
        f"--model.model_id={config.model}",
        f"--model.torch.checkpoint={config.checkpoint}",
    )


def _rank_flags(config: StackConfig) -> tuple[str, ...]:
    if config.engine == "sim":
        return ()
    return (f"--model.torch.expert_ranks={config.expert_ranks}",)


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
