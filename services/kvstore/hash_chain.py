"""Keys of blocks: layout fingerprint, salt domain, root and SHA-256 chain.

Every identity field is length-prefixed under its own tag, so the same text in two fields never
gives one key, and a missing field makes a request uncacheable instead of guessed.
Source: kvcache-and-balancing.md, section 2; case T-KEY.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from services.kvstore.checksums import HAS_NATIVE, Buffer, native, xxh3_128

KEY_BYTES: Final = 32
INDEX_KEY_BYTES: Final = 16
TOKEN_BYTES: Final = 4
EXTRA_BYTES: Final = 36
CLUSTER_KEY_BYTES: Final = 32
# Media items in blocks: each of 8 million tokens' blocks, or one of a million many times over.
_MAX_MEDIA_ITEMS: Final = 65_536
_CHAIN_TAG: Final = b"DIKV-CHAIN-1\0"
_SALT_TAG: Final = b"kv-salt-v1"
# No model id may hold NUL, so a model with an adapter never reads like a model without one.
_ADAPTER_TAG: Final = b"\0adapter"
_SCOPES: Final = ("global", "tenant", "user", "session")

Scope = Literal["global", "tenant", "user", "session"]


class Uncacheable(ValueError):
    """An identity with a missing or malformed field: the request must not touch the cache."""


@dataclass(frozen=True)
class Identity:
    """Whose blocks, of which model, in which layout."""

    model_id: str
    layout: bytes  # fingerprint, 32 bytes
    tenant: str
    scope: Scope = "tenant"
    user_salt: str = ""
    adapter: str = ""  # digest of a weight delta; empty for none


@dataclass(frozen=True)
class MediaSpan:
    """One media item: the prompt positions it fills, and its digest (see `media_digest`)."""

    start: int
    num_tokens: int
    digest: bytes


def _lp(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(data)) + data


def canonical_json(document: Mapping[str, object]) -> bytes:
    """Returns the one spelling of a layout document. Raises Uncacheable for a float inside."""

    def refuse_floats(value: object) -> None:
        if isinstance(value, float):
            raise Uncacheable("a layout document holds integers only")
        if isinstance(value, Mapping):
            for item in value.values():
                refuse_floats(item)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            for item in value:
                refuse_floats(item)

    refuse_floats(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def layout_fingerprint(document: Mapping[str, object]) -> bytes:
    """Returns the 32-byte fingerprint of everything that makes KV bytes interchangeable."""
    return hashlib.sha256(canonical_json(document)).digest()


def layout_digest(layout: bytes) -> bytes:
    """Returns the fingerprint for a 32-byte digest or a layout document in JSON.

    Raises: Uncacheable when it is neither.
    """
    if len(layout) == KEY_BYTES:
        return layout
    try:
        document = json.loads(layout)
        if not isinstance(document, dict) or not document:
            raise Uncacheable("a layout document is an object with fields")
        return layout_fingerprint(document)
    except Uncacheable:
        raise
    except (ValueError, RecursionError):
        # Not JSON, nested without end, or half a surrogate pair, which no encoding can write.
        raise Uncacheable("the layout is neither a digest nor a document") from None


def salt_domain(cluster_key: bytes, scope: str, tenant: str, user_salt: str) -> bytes:
    """Returns the 32-byte salt domain; nobody without the cluster key can compute it.

    Raises: Uncacheable for an unknown scope, or a scope below global without a tenant.
    """
    if len(cluster_key) != CLUSTER_KEY_BYTES:
        raise Uncacheable("the cluster key has 32 bytes")
    if scope not in _SCOPES:
        raise Uncacheable("unknown scope")
    if scope == "global":
        tenant = ""
    elif not tenant:
        raise Uncacheable("a scope below global needs a tenant")
    if scope in ("user", "session") and not user_salt:
        raise Uncacheable("this scope needs a salt of its own")
    message = _SALT_TAG + _lp(scope) + _lp(tenant) + _lp(user_salt)
    return hmac.new(cluster_key, message, hashlib.sha256).digest()


def chain_root(model_id: str, layout: bytes, domain: bytes, adapter: str = "") -> bytes:
    """Returns h0, the parent of every first block. Raises Uncacheable for a missing field."""
    if not model_id or "\0" in model_id:
        raise Uncacheable("the model id is missing or holds NUL")
    if len(layout) != KEY_BYTES or len(domain) != KEY_BYTES:
        raise Uncacheable("layout and domain have 32 bytes")
    model = model_id.encode()
    if adapter:
        model = _ADAPTER_TAG + _lp(model_id) + _lp(adapter)
    return hashlib.sha256(_CHAIN_TAG + _lp(model) + layout + domain).digest()


def root_of(cluster_key: bytes, identity: Identity) -> bytes:
    """Returns h0 of an identity. Raises Uncacheable (fail closed)."""
    domain = salt_domain(cluster_key, identity.scope, identity.tenant, identity.user_salt)
    return chain_root(identity.model_id, identity.layout, domain, identity.adapter)


def tenant_tag(tenant: str) -> bytes:
    """Returns the 16 bytes that mark a tenant's blocks on disk, for deletion. Not a secret."""
    return hashlib.sha256(b"pelagos-tenant\0" + _lp(tenant)).digest()[:16]


def media_digest(revision: str, width: int, height: int, image: bytes) -> bytes:
    """Returns the digest of one image: known before routing, where no pixels are decoded."""
    head = _lp(revision) + struct.pack("<II", width, height)
    return hashlib.sha256(head + image).digest()


def block_extras(
    media: Sequence[MediaSpan], num_tokens: int, block_tokens: int
) -> list[tuple[int, bytes]]:
    """Returns the encoded media list of each complete block that a media item overlaps.

    Returns: (block number from 0, 36 bytes per item sorted by start), in block order.
    Raises: Uncacheable for spans outside the prompt, empty, without a digest, or together longer
        than any prompt's.
    """
    extras: dict[int, list[tuple[int, bytes]]] = {}
    num_items = 0
    for span in media:
        end = span.start + span.num_tokens
        if span.start < 0 or span.num_tokens < 1 or end > num_tokens:
            raise Uncacheable("a media span lies outside the prompt")
        if len(span.digest) != KEY_BYTES:
            raise Uncacheable("a media span has no digest")
        num_items += (end - 1) // block_tokens - span.start // block_tokens + 1
        if num_items > _MAX_MEDIA_ITEMS:
            # Each span may cover the whole prompt: their number alone bounds nothing.
            raise Uncacheable("too many media spans in too many blocks")
        for block in range(span.start // block_tokens, (end - 1) // block_tokens + 1):
            first = max(span.start - block * block_tokens, 0)
            last = min(end - block * block_tokens, block_tokens)
            item = struct.pack("<HH", first, last - first) + span.digest
            extras.setdefault(block, []).append((first, item))
    whole = num_tokens // block_tokens
    return [
        (block, b"".join(item for _, item in sorted(items)))
        for block, items in sorted(extras.items())
        if block < whole
    ]


def chain_plain(
    parent: bytes,
    token_ids: Buffer,
    block_tokens: int,
    extras: Sequence[tuple[int, bytes]] = (),
) -> bytes:
    """The chain in plain Python; same contract as `chain`."""
    _check_chain(parent, token_ids, block_tokens)
    step = block_tokens * TOKEN_BYTES
    by_block = dict(extras)
    sha256, none, keys = hashlib.sha256, b"\0\0", []
    data = bytes(token_ids)
    for number in range(len(data) // step):
        block = data[number * step : (number + 1) * step]
        extra = by_block.get(number)
        tail = none if extra is None else struct.pack("<H", len(extra) // EXTRA_BYTES) + extra
        parent = sha256(parent + block + tail).digest()
        keys.append(parent)
    return b"".join(keys)


def chain(
    parent: bytes,
    token_ids: Buffer,
    block_tokens: int,
    extras: Sequence[tuple[int, bytes]] = (),
) -> bytes:
    """Returns the keys of all complete blocks, 32 bytes each, concatenated.

    Args:
        parent: key of the block before the first one; the root for a whole prompt.
        token_ids: little-endian u32, raw.
        extras: as `block_extras` gives them, numbered from the first block here.
    Raises: Uncacheable for a parent that is no key or bytes that are no whole ids.
    """
    if not HAS_NATIVE:
        return chain_plain(parent, token_ids, block_tokens, extras)
    _check_chain(parent, token_ids, block_tokens)
    return cast(bytes, native.hash_chain(parent, token_ids, block_tokens, list(extras)))


def _check_chain(parent: bytes, token_ids: Buffer, block_tokens: int) -> None:
    if len(parent) != KEY_BYTES:
        raise Uncacheable("the parent is no key")
    if block_tokens < 1 or len(token_ids) % TOKEN_BYTES:
        raise Uncacheable("token bytes are whole u32 values, blocks hold at least one")


def index_keys(keys: bytes) -> list[bytes]:
    """Returns the 16-byte index keys of concatenated full keys."""
    return [keys[at : at + INDEX_KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


@dataclass(frozen=True)
class _Known:
    """What a session had hashed: the digest of its raw token bytes, and the keys."""

    num_token_bytes: int
    digest: bytes
    keys: bytes
    extras: tuple[tuple[int, bytes], ...]

    @property
    def num_bytes(self) -> int:
        """Returns the memory it is counted with: keys, and the media lists of its blocks."""
        return len(self.keys) + sum(len(extra) for _, extra in self.extras)


class SessionChains:
    """Keys of each session's last prompt, so that a follow-up hashes only its new blocks.

    The session id is a hint of the caller: what was hashed is recognised by a digest of the raw
    token bytes under a random seed, never by the id, of which no more is kept than a digest.
    Least recently used sessions are forgotten past `max_sessions` or `max_bytes`. Not safe for
    threads.
    """

    def __init__(self, max_sessions: int = 100_000, max_bytes: int = 256 << 20) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._seed = secrets.randbits(64)
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self.num_bytes = 0
        self.num_blocks_reused = 0

    def __len__(self) -> int:
        return len(self._known)

    def keys(
        self,
        session_id: str,
        root: bytes,
        token_ids: bytes,
        block_tokens: int,
        extras: Sequence[tuple[int, bytes]] = (),
    ) -> bytes:
        """Returns what `chain(root, ...)` returns, hashing as little as it can."""
        if not session_id:
            return chain(root, token_ids, block_tokens, extras)
        name = hashlib.sha256(root + session_id.encode()).digest()
        known = self._known.get(name)
        num_known = self._num_shared(known, token_ids, extras) if known else 0
        if known and num_known:
            head = known.keys[: num_known * KEY_BYTES]
            rest = memoryview(token_ids)[num_known * block_tokens * TOKEN_BYTES :]
            later = [(block - num_known, extra) for block, extra in extras if block >= num_known]
            keys = head + chain(head[-KEY_BYTES:], rest, block_tokens, later)
            self.num_blocks_reused += num_known
        else:
            keys = chain(root, token_ids, block_tokens, extras)
        self._remember(name, token_ids, block_tokens, keys, tuple(extras))
        return keys

    def _num_shared(
        self, known: _Known, token_ids: bytes, extras: Sequence[tuple[int, bytes]]
    ) -> int:
        """Returns how many leading blocks are the same; all of the known ones or none."""
        size = known.num_token_bytes
        num_blocks = len(known.keys) // KEY_BYTES
        if not num_blocks or len(token_ids) < size:
            return 0
        if tuple(item for item in extras if item[0] < num_blocks) != known.extras:
            return 0
        same = xxh3_128(memoryview(token_ids)[:size], self._seed) == known.digest
        return num_blocks if same else 0

    def _remember(
        self,
        name: bytes,
        token_ids: bytes,
        block_tokens: int,
        keys: bytes,
        extras: tuple[tuple[int, bytes], ...],
    ) -> None:
        size = len(keys) // KEY_BYTES * block_tokens * TOKEN_BYTES
        digest = xxh3_128(memoryview(token_ids)[:size], self._seed)
        former = self._known.pop(name, None)
        if former:
            self.num_bytes -= former.num_bytes
        known = self._known[name] = _Known(size, digest, keys, extras)
        self.num_bytes += known.num_bytes
        while len(self._known) > self._max_sessions or self.num_bytes > self._max_bytes:
            _, oldest = self._known.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
