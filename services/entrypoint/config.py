"""Configuration of the entrypoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.common.config import require, weakens
from services.common.rpc_server import RpcServerConfig, is_loopback
from services.common.service import RuntimeConfig
from services.entrypoint.limits import MIB, Limits


def _runtime() -> RuntimeConfig:
    # A body goes to the codec in one message, and the largest is 96 MiB.
    return RuntimeConfig(rpc=RpcServerConfig(max_message_bytes=128 * MIB))


@dataclass(frozen=True)
class EntrypointConfig:
    """One entrypoint process; the defaults run on a laptop and let nobody in from outside."""

    listen: str = "127.0.0.1:7001"  # token-level gRPC API and the SWA directory shard
    http_listen: str = "127.0.0.1:8000"
    http_off_loopback_is_insecure: bool = weakens(
        False, "HTTP is served without TLS to other machines"
    )
    runtime: RuntimeConfig = field(default_factory=_runtime)
    limits: Limits = field(default_factory=Limits)

    # Keys (S-01). The folder gets pepper, keys.json and, on the first start, api-key.
    key_folder: str = ".local/keys"
    anonymous_on_loopback: bool = weakens(
        False, "requests without a key are served (development only, loopback only)"
    )

    # Neighbours; empty means: as the cluster's membership says.
    recipe_mode: Literal["service", "embedded"] = "service"
    tokenizer_folder: str = ""  # of the embedded codec; empty: its own default
    recipe_tokenizers: dict[str, str] = field(default_factory=dict)  # name -> tokenizer.json
    recipe_models: dict[str, str] = field(default_factory=dict)  # name -> VERSION@TOKENIZER
    recipe_address: str = ""
    check_address: str = ""
    prefill_lb_address: str = ""
    so_compiler_address: str = ""
    engine_addresses: tuple[str, ...] = ()  # prefill engines to describe, beside the members
    model_aliases: dict[str, str] = field(default_factory=dict)  # name in requests -> engine's

    # Requests.
    default_timeout_s: float = 3600.0
    max_timeout_s: float = 24 * 3600.0
    codec_wait_s: float = 3.0  # how long a request waits while no codec answers
    leader_wait_s: float = 15.0  # how long a request waits while no balancer leads
    max_attempts: int = 3
    retry_budget_ratio: float = 0.1
    retry_budget_floor: float = 10.0
    explained_requests: int = 10_000
    eager_output: bool = False  # release text as soon as it is certain, not as the codec does
    separate_usage_chunk: bool = False  # for strict clients: usage in a chunk without choices

    # Images.
    preprocessor_revision: str = "pelagos-vision-1"
    max_inline_media_bytes: int = 12 * MIB  # of one request; they travel with it to the engine
    fetch_image_urls: bool = weakens(False, "the server fetches image addresses given by callers")
    fetch_http_urls: bool = weakens(False, "image addresses may be fetched without TLS")
    fetch_domains: tuple[str, ...] = ()  # empty: any public host
    denied_networks: tuple[str, ...] = ()  # the deployment's own public ranges

    # The directory shard.
    swa_directory: bool = True

    index_page: bool = True

    def __post_init__(self) -> None:
        require(0 < self.default_timeout_s <= self.max_timeout_s, "default_timeout_s out of range")
        require(1 <= self.max_attempts <= 10, "max_attempts must be in [1, 10]")
        require(0 <= self.retry_budget_ratio <= 1, "retry_budget_ratio must be in [0, 1]")
        require(self.explained_requests > 0, "explained_requests must be above 0")
        loopback = is_loopback(self.http_listen)
        require(
            loopback or self.http_off_loopback_is_insecure,
            f"http_listen: {self.http_listen} is not on loopback; put a TLS proxy in front, or "
            "accept the risk with http_off_loopback_is_insecure",
        )
        require(
            loopback or not self.anonymous_on_loopback,
            "anonymous_on_loopback is for loopback only",
        )
