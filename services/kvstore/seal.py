"""Encryption of blocks at rest: AES-256-GCM under a key of each tenant, off unless configured.

The key is `HMAC-SHA256(cluster_key, "enc" + domain)`, where the domain is the public id that marks
a tenant's blocks on disk: STORE is never told salt domains, with which one could compute keys of
blocks. What binds a payload to its place is authenticated with it: full key, layout, tenant and
length. Nonces are random: up to 2^32 blocks of a tenant under one cluster key are safe. Lengths do
not change, so slots, shards and repair are as without. Checksums are over what is stored, so that
scrub, repair and the tools need no key, and tell nothing of what is inside.
Source: kvcache-and-balancing.md, section 19; docs/adr/0023.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import secrets
import struct
from collections import OrderedDict
from typing import Any, Final

from services.kvstore.checksums import Buffer
from services.kvstore.formats import SEAL_BYTES
from services.kvstore.hash_chain import CLUSTER_KEY_BYTES

_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = SEAL_BYTES - _NONCE_BYTES
_MAX_CIPHERS: Final = 4096
_CONTEXT: Final = b"pelagos-kv-seal-1\0"


def domain_key(cluster_key: bytes, domain: bytes) -> bytes:
    """Returns the 32-byte key of one domain."""
    return hmac.new(cluster_key, b"enc" + domain, hashlib.sha256).digest()


class Sealer:
    """Seals and opens payloads. Raises ImportError without the package `cryptography`."""

    def __init__(self, cluster_key: bytes) -> None:
        if len(cluster_key) != CLUSTER_KEY_BYTES:
            raise ValueError("the cluster key has 32 bytes")
        aead = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
        self._invalid: type[Exception] = importlib.import_module(
            "cryptography.exceptions"
        ).InvalidTag
        self._cipher_of: Any = aead.AESGCM
        self._cluster_key = cluster_key
        self._ciphers: OrderedDict[bytes, Any] = OrderedDict()

    def __repr__(self) -> str:
        return "Sealer(...)"  # the key must not get into a log by way of an exception

    def _cipher(self, domain: bytes) -> Any:
        cipher = self._ciphers.get(domain)
        if cipher is None:
            cipher = self._cipher_of(domain_key(self._cluster_key, domain))
            self._ciphers[domain] = cipher
            while len(self._ciphers) > _MAX_CIPHERS:
                self._ciphers.popitem(last=False)
        return cipher

    def seal(
        self, payload: Buffer, domain: bytes, key: bytes, layout: bytes
    ) -> tuple[memoryview, bytes]:
        """Returns (the payload encrypted, as long as it was; nonce and tag, 28 bytes)."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        about = _about(len(payload), domain, key, layout)
        out: bytes = self._cipher(domain).encrypt(nonce, payload, about)
        return memoryview(out)[:-_TAG_BYTES], nonce + out[-_TAG_BYTES:]

    def open(self, payload: Buffer, seal: bytes, domain: bytes, key: bytes, layout: bytes) -> bool:
        """Decrypts in place; False, and the bytes are of no use, under any other key or place."""
        about = _about(len(payload), domain, key, layout)
        nonce, tag = seal[:_NONCE_BYTES], seal[_NONCE_BYTES:]
        try:
            clear = self._cipher(domain).decrypt(nonce, bytes(payload) + tag, about)
        except self._invalid:
            return False
        memoryview(payload)[:] = clear
        return True


def _about(num_bytes: int, domain: bytes, key: bytes, layout: bytes) -> bytes:
    """Returns what is authenticated beside the payload."""
    fields = (domain, key, layout)
    head = _CONTEXT + struct.pack("<Q", num_bytes)
    return head + b"".join(struct.pack("<I", len(field)) + field for field in fields)
