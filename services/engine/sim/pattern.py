"""Pattern bytes: what a simulated layer leaves behind for a token, so that every byte is checked.

The entry of the token at offset i of a block is the i-th word of a key stream of (layer, key of
the parent block), mixed with the token's id. So a foreign block, a stale block, a block at another
place of the chain and a wrong token all differ, and a partial block is the beginning of the full
one. Source: engine.md, section 9 ("keyed pattern of (block hash, layer)").
"""

from __future__ import annotations

import hashlib
from array import array
from functools import lru_cache

from services.engine.sim.config import ENTRY_BYTES, NUM_SOURCE_LAYERS

ENCODER, DECODER = NUM_SOURCE_LAYERS, NUM_SOURCE_LAYERS + 1  # ring tags, after the layers
TAGS = range(NUM_SOURCE_LAYERS + 2)
_REPEAT = ENTRY_BYTES // 4


@lru_cache(maxsize=8192)
def key_stream(tag: int, parent_key: bytes, block_tokens: int) -> bytes:
    """Key stream of one layer for the block that follows `parent_key`."""
    seed = b"pelagos-sim-kv\0" + bytes([tag]) + parent_key
    return hashlib.shake_128(seed).digest(block_tokens * ENTRY_BYTES)


def entries(tag: int, parent_key: bytes, block_tokens: int, token_bytes: bytes) -> bytes:
    """Entries of a block's first tokens, given as u32 LE bytes."""
    ids = array("I")
    ids.frombytes(token_bytes)
    # By slices, not in a loop: every step of every sequence checks some 1,000 tokens.
    mixed = array("I", bytes(len(ids) * ENTRY_BYTES))
    for part in range(_REPEAT):
        mixed[part::_REPEAT] = ids
    stream = key_stream(tag, parent_key, block_tokens)[: len(ids) * ENTRY_BYTES]
    return _xor(stream, mixed.tobytes())


def entry(tag: int, parent_key: bytes, block_tokens: int, offset: int, token_id: int) -> bytes:
    """Entry of the token at one offset of a block."""
    at = offset * ENTRY_BYTES
    stream = key_stream(tag, parent_key, block_tokens)[at : at + ENTRY_BYTES]
    return _xor(stream, token_id.to_bytes(4, "little") * _REPEAT)


def _xor(a: bytes, b: bytes) -> bytes:
    value = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    return value.to_bytes(len(a), "little")


def embedding(digest: bytes, num_tokens: int, hidden: int) -> bytes:
    """Simulated embedding of an image, [num_tokens, hidden] of two bytes each."""
    return hashlib.shake_128(b"pelagos-sim-image\0" + digest).digest(num_tokens * hidden * 2)
