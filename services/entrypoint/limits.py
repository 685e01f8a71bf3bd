"""The limits of the HTTP front: one frozen dataclass of numbers, each with a hard maximum.

Numbers that the codec enforces itself (temperature, stop count, image sizes, ...) are not repeated
here: the codec's own texts reach the client unchanged.
Source: reliability-and-security.md, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from services.common.config import require

MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """What one entrypoint accepts. Every value may be lowered, and raised up to ten times."""

    # HTTP itself.
    max_request_line_bytes: int = 8 * 1024
    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    header_timeout_s: float = 10.0
    body_grace_s: float = 10.0  # after it a body must come at min_body_bytes_per_s
    min_body_bytes_per_s: int = 16 * 1024
    max_connections: int = 10_000
    max_connections_per_address: int = 256
    keep_alive_timeout_s: float = 75.0
    max_pipelined: int = 16  # requests behind the one that is being answered, per connection

    # Bodies.
    max_body_bytes: int = 32 * MIB
    max_body_with_images_bytes: int = 96 * MIB  # Chat and Responses, when images are in it
    max_json_depth: int = 64
    max_json_number_chars: int = 64
    max_json_keys: int = 10_000
    max_json_values: int = 500_000  # of all kinds; bounds the memory of the parsed document

    # Contents, where the codec has no limit of its own.
    max_messages: int = 10_000
    max_content_parts: int = 2_000
    max_stop_chars: int = 256
    max_tools: int = 128
    max_tools_bytes: int = MIB
    max_metadata_pairs: int = 16
    max_metadata_key_chars: int = 64
    max_metadata_value_chars: int = 512
    max_cache_salt_chars: int = 256

    # Load.
    max_concurrent_per_key: int = 64
    max_queued_per_key: int = 128
    max_requests: int = 2_000
    max_request_tokens: int = 20_000_000

    # Streams.
    stream_buffer_bytes: int = 256 * 1024
    stream_progress_timeout_s: float = 60.0
    keep_alive_comment_s: float = 10.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, default = getattr(self, item.name), item.default
            require(value > 0, f"limits.{item.name} must be above 0")
            require(
                value <= 10 * default,  # type: ignore[operator]
                f"limits.{item.name} must be at most {10 * default}",  # type: ignore[operator]
            )
        require(
            self.max_body_with_images_bytes >= self.max_body_bytes,
            "limits.max_body_with_images_bytes must not be below max_body_bytes",
        )
