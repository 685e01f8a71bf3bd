"""Embeddings by content: LRU by bytes with a time to live, one computation per key at a time.

Pure bookkeeping; the time is an argument. Source: engine.md, section 6.3.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class _Entry:
    data: bytes
    expires_s: float


class EmbeddingCache:
    """At most `max_bytes` of embeddings, each for at most `ttl_s` after it was made."""

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, now_s: float) -> bytes | None:
        """The embedding, or None when it is not there or too old."""
        entry = self._entries.get(key)
        if entry is not None and now_s < entry.expires_s:
            self._entries.move_to_end(key)
            self.num_hits += 1
            return entry.data
        if entry is not None:
            self._remove(key)
        self.num_misses += 1
        return None

    def put(self, key: bytes, data: bytes, now_s: float) -> None:
        """Keeps an embedding; the longest unused make room. One larger than all is not kept."""
        if len(data) > self._max_bytes:
            return
        self._remove(key)
        while self.num_bytes + len(data) > self._max_bytes:
            self._remove(next(iter(self._entries)))
        self._entries[key] = _Entry(data, now_s + self._ttl_s)
        self.num_bytes += len(data)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= len(entry.data)
