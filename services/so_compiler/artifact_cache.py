"""Compiled artifacts and remembered refusals: LRU, bounded in all and per tenant. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from services.common.errors import Failure
from services.so_compiler.config import CacheLimits
from services.so_compiler.worker_pool import Artifact


@dataclass(frozen=True)
class Entry:
    """One artifact and who pays for it."""

    artifact: Artifact
    tenant: str
    tokenizer_id: str


class ArtifactCache:
    """Artifacts by key. A tenant that floods it evicts its own first (S-14)."""

    def __init__(self, limits: CacheLimits) -> None:
        self._limits = limits
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._tenant_bytes: Counter[str] = Counter()
        self._tenant_entries: Counter[str] = Counter()
        self._refusals: OrderedDict[str, tuple[Failure, float]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        """Returns an entry, which becomes the youngest."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Keeps an artifact; older ones go, the tenant's own first."""
        self._remove(key)
        size = len(entry.artifact.data)
        share = int(self._limits.max_bytes * self._limits.max_tenant_share)
        entries_share = int(self._limits.max_entries * self._limits.max_tenant_share)
        while self._tenant_bytes[entry.tenant] + size > share or (
            self._tenant_entries[entry.tenant] >= max(1, entries_share)
        ):
            if not self._evict(entry.tenant):
                break
        while self.num_bytes + size > self._limits.max_bytes or (
            len(self._entries) >= self._limits.max_entries
        ):
            if not self._evict(None):
                break
        self._entries[key] = entry
        self.num_bytes += size
        self._tenant_bytes[entry.tenant] += size
        self._tenant_entries[entry.tenant] += 1

    def refusal(self, key: str, now_s: float) -> Failure | None:
        """Returns why this was refused a short while ago."""
        found = self._refusals.get(key)
        if found is None:
            return None
        if now_s >= found[1]:
            del self._refusals[key]
            return None
        return found[0]

    def refuse(self, key: str, failure: Failure, now_s: float) -> None:
        """Remembers a refusal."""
        self._refusals[key] = (failure, now_s + self._limits.negative_ttl_s)
        self._refusals.move_to_end(key)
        while len(self._refusals) > self._limits.max_negative_entries:
            self._refusals.popitem(last=False)

    def _evict(self, tenant: str | None) -> bool:
        for key, entry in self._entries.items():
            if tenant is None or entry.tenant == tenant:
                self._remove(key)
                return True
        return False

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        size = len(entry.artifact.data)
        self.num_bytes -= size
        for counter, amount in ((self._tenant_bytes, size), (self._tenant_entries, 1)):
            counter[entry.tenant] -= amount
            if counter[entry.tenant] <= 0:
                del counter[entry.tenant]
