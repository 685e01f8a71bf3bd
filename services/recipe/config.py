"""Configuration of the codec's service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.common.config import require
from services.common.rpc_server import RpcServerConfig
from services.common.service import RuntimeConfig

ROLE = "recipe"


def _runtime() -> RuntimeConfig:
    # A request's body comes in one message, and the largest that an entrypoint takes is 96 MiB.
    return RuntimeConfig(rpc=RpcServerConfig(max_message_bytes=128 << 20))


@dataclass(frozen=True)
class RecipeConfig:
    """The codec as a service; the same values make it embedded."""

    listen: str = "127.0.0.1:7101"
    # Where the tokenizer files are built at start if they are not there; empty: build/tokenizer.
    tokenizer_folder: str = ""
    # More tokenizers: name to tokenizer.json. `v4` and `v4.1` are always there.
    tokenizers: dict[str, str] = field(default_factory=dict)
    # More models: name to `VERSION` or `VERSION@TOKENIZER`, as in `v4.1@tiny`.
    models: dict[str, str] = field(default_factory=dict)
    # Spellings of special tokens that differ from the defaults, by name.
    spellings: dict[str, str] = field(default_factory=dict)
    context_limit: int = 1_048_576  # tokens; used when a request brings none
    default_thinking_mode: bool = True
    reasoning_content_behavior: Literal["fill_empty", "reject"] = "fill_empty"
    responses_web_search: Literal["drop", "reject"] = "drop"
    messages_web_search: Literal["drop", "reject"] = "reject"
    # `drop` is the published codec's way with keywords that the strict grammar does not know: the
    # output may then break what the client asked for, and nothing says so.
    strict_schema_keywords: Literal["drop", "enforce"] = "enforce"
    thinking_max_tokens_upper_bound: int = 393_216
    non_thinking_max_tokens_upper_bound: int = 393_216
    image_max_tokens: int = 1024  # of one image, as the model's vision encoder takes them
    image_min_pixels: int = 544 * 544  # a smaller image is enlarged
    num_threads: int = 0  # of one encode call; 0: one per core
    cache_bytes: int = 64 << 20  # text and ids kept of earlier prompts, per tokenizer
    # A larger body is encoded beside the event loop; a smaller one takes less time than the move.
    inline_max_bytes: int = 32 << 10
    max_waiting_encodes: int = 256
    max_streams_per_call: int = 65_536
    runtime: RuntimeConfig = field(default_factory=_runtime)

    def __post_init__(self) -> None:
        require(0 < self.context_limit < 1 << 32, "context_limit must be above 0")
        require(8 <= self.image_max_tokens < 1 << 16, "image_max_tokens must be in [8, 65535]")
        require(0 <= self.image_min_pixels < 1 << 32, "image_min_pixels must not be below 0")
        require(self.num_threads >= 0, "num_threads must not be below 0")
        require(self.cache_bytes >= 0, "cache_bytes must not be below 0")
        require(self.max_waiting_encodes > 0, "max_waiting_encodes must be above 0")
        require(self.max_streams_per_call > 0, "max_streams_per_call must be above 0")
        for name, model in self.models.items():
            version, _, tokenizer = model.partition("@")
            require(version in ("v4", "v4.1"), f"models.{name}: unknown version {version!r}")
            known = {"", "v4", "v4.1", *self.tokenizers}
            require(tokenizer in known, f"models.{name}: unknown tokenizer {tokenizer!r}")
