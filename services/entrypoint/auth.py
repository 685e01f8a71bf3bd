"""Who calls: a key becomes an identity. Pure: no files, no clock.

Stored is only HMAC-SHA256(pepper, key). A look-up hashes what was sent and compares digests, so
its time says nothing about how much of a guess was right; every stored digest is compared, also
after a hit.
Source: reliability-and-security.md, S-01.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from services.common.errors import Failure, Reason

MAX_KEY_CHARS: Final = 512
SCOPE_INFERENCE: Final = "inference"
SCOPE_EXPLAIN: Final = "explain"
ALL_SCOPES: Final = frozenset({SCOPE_INFERENCE, SCOPE_EXPLAIN})
ANONYMOUS_ID: Final = "anonymous"


@dataclass(frozen=True)
class KeyLimits:
    """Shares of one key over all entrypoints; None or 0 leaves the entrypoint's default."""

    max_concurrent: int = 0
    requests_per_minute: int = 0  # 0: no limit
    tokens_per_minute: int = 0  # prompt + output budget; 0: no limit
    max_output_tokens: int = 0  # 0: the model's


@dataclass(frozen=True)
class Identity:
    """A caller that proved who it is."""

    key_id: str
    tenant: str
    scopes: frozenset[str] = ALL_SCOPES
    limits: KeyLimits = field(default_factory=KeyLimits)

    def demand(self, scope: str) -> None:
        """Raises Failure(FORBIDDEN) unless the key has the scope."""
        if scope not in self.scopes:
            raise Failure(Reason.FORBIDDEN, f"this key lacks the scope {scope}", {"scope": scope})


@dataclass(frozen=True)
class StoredKey:
    """One entry of the key file."""

    identity: Identity
    digest: bytes
    expires_unix_s: float = 0.0  # 0: never
    revoked: bool = False


def digest_key(pepper: bytes, key: str) -> bytes:
    """Returns what is stored of a key."""
    return hmac.new(pepper, key.encode(), sha256).digest()


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Returns the key of `Authorization: Bearer` or `x-api-key`, None when there is none.

    Raises: Failure(UNAUTHENTICATED) for a header that is no key, or for two different keys.
    """
    found: set[str] = set()
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").strip().partition(" ")
            if scheme and scheme.lower() != "bearer":
                raise _unauthenticated("the authorization scheme must be Bearer")
            found.add(key.strip())
        elif name == b"x-api-key":
            found.add(value.decode("latin-1").strip())
    found.discard("")
    if len(found) > 1:
        raise _unauthenticated("two different keys were sent")
    return found.pop() if found else None


def authenticate(
    key: str | None, stored: Iterable[StoredKey], pepper: bytes, now_unix_s: float
) -> Identity:
    """Returns the identity behind a key, or raises Failure(UNAUTHENTICATED).

    Args:
        now_unix_s: wall time, for the expiry.
    """
    if not key:
        raise _unauthenticated("no API key was sent; use Authorization: Bearer or x-api-key")
    digest = digest_key(pepper, key[:MAX_KEY_CHARS])
    match: StoredKey | None = None
    for entry in stored:
        if hmac.compare_digest(entry.digest, digest):
            match = entry
    if match is None or len(key) > MAX_KEY_CHARS:
        raise _unauthenticated("the API key is not valid")
    if match.revoked:
        raise _unauthenticated("the API key was revoked")
    if match.expires_unix_s and now_unix_s >= match.expires_unix_s:
        raise _unauthenticated("the API key has expired")
    return match.identity


def parse_keys(text: str) -> tuple[StoredKey, ...]:
    """Returns the entries of a key file. Raises ValueError naming the bad entry."""
    document = json.loads(text)
    entries = document.get("keys") if isinstance(document, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError('the key file must hold {"keys": [...]}')
    stored = tuple(_parse_entry(i, entry) for i, entry in enumerate(entries))
    ids = [entry.identity.key_id for entry in stored]
    if len(set(ids)) != len(ids):
        raise ValueError("two keys share one id")
    return stored


def format_keys(stored: Iterable[StoredKey]) -> str:
    """Returns the text of a key file."""
    return json.dumps({"keys": [_entry_document(entry) for entry in stored]}, indent=2) + "\n"


def _parse_entry(index: int, entry: Any) -> StoredKey:
    if not isinstance(entry, Mapping):
        raise ValueError(f"keys[{index}] is not an object")
    unknown = set(entry) - _ENTRY_FIELDS
    if unknown:
        raise ValueError(f"keys[{index}]: unknown field {sorted(unknown)[0]}")
    try:
        limits = entry.get("limits", {})
        unknown = set(limits) - set(KeyLimits.__dataclass_fields__)
        if unknown:
            raise ValueError(f"unknown limit {sorted(unknown)[0]}")
        scopes = frozenset(str(scope) for scope in entry.get("scopes", sorted(ALL_SCOPES)))
        if not scopes <= ALL_SCOPES:
            raise ValueError(f"unknown scope {sorted(scopes - ALL_SCOPES)[0]}")
        digest = bytes.fromhex(entry["digest"])
        if len(digest) != sha256().digest_size:
            raise ValueError("digest must be 64 hex digits")
        identity = Identity(
            key_id=str(entry["id"]),
            tenant=str(entry["tenant"]),
            scopes=scopes,
            limits=KeyLimits(**{str(k): int(v) for k, v in limits.items()}),
        )
        if not identity.key_id or not identity.tenant:
            raise ValueError("id and tenant must not be empty")
        return StoredKey(
            identity,
            digest,
            expires_unix_s=float(entry.get("expires_unix_s", 0.0)),
            revoked=bool(entry.get("revoked", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"keys[{index}]: {error}") from None


_ENTRY_FIELDS: Final = frozenset(
    {"id", "tenant", "digest", "scopes", "limits", "expires_unix_s", "revoked", "note"}
)


def _entry_document(entry: StoredKey) -> dict[str, Any]:
    limits = {
        name: value
        for name in KeyLimits.__dataclass_fields__
        if (value := getattr(entry.identity.limits, name))
    }
    return {
        "id": entry.identity.key_id,
        "tenant": entry.identity.tenant,
        "digest": entry.digest.hex(),
        "scopes": sorted(entry.identity.scopes),
        "limits": limits,
        "expires_unix_s": entry.expires_unix_s,
        "revoked": entry.revoked,
    }


def _unauthenticated(message: str) -> Failure:
    return Failure(Reason.UNAUTHENTICATED, message)
