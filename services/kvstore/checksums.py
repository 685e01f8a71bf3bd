"""CRC-32C and xxh3-128: checks against damage, never keys (kvcache-and-balancing.md, section 19).

The native functions when the crate is built, else the libraries of the `kvstore` extra; both give
the same values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

native: Any = None
try:
    native = importlib.import_module("services.kvstore._native")
except ImportError:  # a source tree without the built crate: the plain twins take over
    pass

Buffer = bytes | bytearray | memoryview

HAS_NATIVE: Final = native is not None


def crc32c_plain(data: Buffer, seed: int = 0) -> int:
    """Returns the CRC-32C of what `seed` was computed over, followed by `data`."""
    import google_crc32c

    return int(google_crc32c.extend(seed, bytes(data)))


def xxh3_128_plain(data: Buffer, seed: int = 0) -> bytes:
    """Returns xxh3-128 in canonical form, 16 bytes."""
    import xxhash

    return bytes(xxhash.xxh3_128_digest(data, seed))


def _pick(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(native, name) if HAS_NATIVE else plain


crc32c: Callable[..., int] = _pick("crc32c", crc32c_plain)
xxh3_128: Callable[..., bytes] = _pick("xxh3_128", xxh3_128_plain)
