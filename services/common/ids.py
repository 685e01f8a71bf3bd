"""Random identifiers: of requests, instances and lives of instances."""

from __future__ import annotations

import re
import secrets
from typing import Final

# What may come from outside as a request id: printable, short, safe in logs, keys and metadata.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def new_request_id() -> str:
    """Returns a fresh request id: `req-` and 24 hex digits."""
    return f"req-{secrets.token_hex(12)}"


def new_instance_id(service: str) -> str:
    """Returns a fresh instance id. Random per start: a restarted process is a new member."""
    return f"{service}-{secrets.token_hex(5)}"


def new_boot_id() -> str:
    """Returns a fresh boot id, 16 hex digits: one life of an instance."""
    return secrets.token_hex(8)


def is_request_id(text: str) -> bool:
    """Returns whether a caller's request id may be taken over as it is."""
    return _REQUEST_ID.fullmatch(text) is not None
