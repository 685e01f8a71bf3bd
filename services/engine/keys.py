"""Hash chain of block keys, as the store computes it, for blocks that an engine completes itself.

The prompt's keys come with the request; a decode engine extends the chain by its output.
Source: kvcache-and-balancing.md, section 2 (T-KEY).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 32
NO_ROOT = bytes(KEY_BYTES)  # a request without cache identity: its blocks are never stored


@dataclass(frozen=True)
class MediaSpan:
    """An image's positions and the digest of its bytes as received."""

    start: int
    num_tokens: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def encoded_extra(block: int, block_tokens: int, media: Sequence[MediaSpan]) -> bytes:
    """Media list of a block: per overlapping item `u16 start, u16 len, digest`, by start."""
    low, high = block * block_tokens, (block + 1) * block_tokens
    parts = []
    for item in sorted(media, key=lambda m: m.start):
        start, end = max(item.start, low), min(item.end, high)
        if start < end:
            parts.append((start - low).to_bytes(2, "little"))
            parts.append((end - start).to_bytes(2, "little"))
            parts.append(item.digest)
    return b"".join(parts)


def next_key(parent: bytes, token_bytes: bytes, extra: bytes = b"") -> bytes:
    """Key of a complete block: its parent's key, its ids (u32 LE) and its media list."""
    count = (len(extra) // 36).to_bytes(2, "little")
    return hashlib.sha256(parent + token_bytes + count + extra).digest()


def chain(
    root: bytes, token_bytes: bytes, block_tokens: int, media: Sequence[MediaSpan] = ()
) -> list[bytes]:
    """Keys of all complete blocks of a sequence."""
    size = block_tokens * 4
    keys, parent = [], root
    for block in range(len(token_bytes) // size):
        extra = encoded_extra(block, block_tokens, media) if media else b""
        parent = next_key(parent, token_bytes[block * size : (block + 1) * size], extra)
        keys.append(parent)
    return keys
