"""Bounds on what one message may ask for; past them it is refused by name (style.md, section 9)."""

from __future__ import annotations

from typing import Final

from services.common.errors import Failure, Reason

# Eight prompts of a million tokens, for each key is looked up in one go of the event loop.
MAX_KEYS: Final = 65_536
PIN_TTL_S: Final = 30.0
_MAX_PIN_TTL_S: Final = 600.0
_MAX_NAME_BYTES: Final = 128


def check_number(num_keys: int) -> None:
    """Raises Failure(INVALID_REQUEST) for more keys than one message may hold."""
    if num_keys > MAX_KEYS:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"{num_keys} keys in one message, the limit is {MAX_KEYS}",
            {"num_keys": str(num_keys), "max_keys": str(MAX_KEYS)},
        )


def pin_life_s(pin_id: str, ttl_ms: int) -> float:
    """Returns how long a pin holds, 30 s for 0.

    Raises: Failure(INVALID_REQUEST) without a name, for one that is too long, and for a life so
        long that the pin would rather stop eviction than hold what is about to be fetched.
    """
    if not 0 < len(pin_id.encode()) <= _MAX_NAME_BYTES:
        raise Failure(Reason.INVALID_REQUEST, f"a pin's name has 1 to {_MAX_NAME_BYTES} bytes")
    max_ttl_ms = int(_MAX_PIN_TTL_S * 1000)
    if ttl_ms > max_ttl_ms:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"a pin of {ttl_ms} ms, the limit is {max_ttl_ms}",
            {"ttl_ms": str(ttl_ms), "max_ttl_ms": str(max_ttl_ms)},
        )
    return ttl_ms / 1000 if ttl_ms else PIN_TTL_S
