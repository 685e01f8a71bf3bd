"""One shard of the window-state directory: key to the machine that holds the state.

Nothing here is durable or replicated: an entry that is lost costs a replay of one block. Time comes
in as an argument. Source: kvcache-and-balancing.md, section 10.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

DEFAULT_TTL_S: Final = 180.0


@dataclass(frozen=True)
class SwaKey:
    """Names a state: the block key at its position, and the layout of the state."""

    key16: bytes
    layout: bytes


@dataclass(frozen=True)
class Location:
    """Where a state is."""

    position: int  # a multiple of the block size
    host: str  # instance id
    address: str
    slot: int
    num_bytes: int
    digest: bytes
    approximate: bool
    host_epoch: int


@dataclass(frozen=True)
class _Entry:
    location: Location
    ttl_s: float
    expires_s: float


class SwaDirectory:
    """Entries of one shard, bounded; the least recently used goes first."""

    def __init__(self, max_entries: int = 1_000_000) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[SwaKey, _Entry] = OrderedDict()
        self._epochs: dict[str, int] = {}
        self.num_hits = 0
        self.num_misses = 0
        self.num_stale = 0

    def __len__(self) -> int:
        return len(self._entries)

    def publish(self, key: SwaKey, location: Location, now_s: float, ttl_s: float = 0) -> bool:
        """Announces a state; returns whether it is in force.

        The newer replaces the older, unless that one is exact and the newer approximate.
        """
        known = self._epochs.get(location.host, 0)
        if location.host_epoch < known:
            return False  # from a life that has ended
        self._epochs[location.host] = location.host_epoch
        old = self._alive(key, now_s)
        if old is not None and location.approximate and not old.location.approximate:
            return False
        life_s = ttl_s or DEFAULT_TTL_S
        self._entries[key] = _Entry(location, life_s, now_s + life_s)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        if len(self._epochs) > 2 * self._max_entries:
            self._forget_epochs()
        return True

    def _forget_epochs(self) -> None:
        """Forgets the lives of hosts of which nothing is left: instance ids come anew each start,
        and a host whose clock was set back is heard again when its last life's states are gone."""
        hosts = {entry.location.host for entry in self._entries.values()}
        self._epochs = {host: epoch for host, epoch in self._epochs.items() if host in hosts}

    def withdraw(self, key: SwaKey, host: str) -> bool:
        """Takes an announcement back, if this host made it."""
        entry = self._entries.get(key)
        if entry is None or (host and entry.location.host != host):
            return False
        del self._entries[key]
        return True

    def lookup(self, keys: Sequence[SwaKey], now_s: float) -> list[Location | None]:
        """Returns a location or None per key; what is found lives on."""
        found: list[Location | None] = []
        for key in keys:
            entry = self._alive(key, now_s)
            if entry is None:
                self.num_misses += 1
                found.append(None)
                continue
            self.num_hits += 1
            self._entries[key] = replace(entry, expires_s=now_s + entry.ttl_s)
            self._entries.move_to_end(key)
            found.append(entry.location)
        return found

    def drop_host(self, host: str) -> int:
        """Forgets everything of a host that is gone; returns how many entries."""
        gone = [key for key, entry in self._entries.items() if entry.location.host == host]
        for key in gone:
            del self._entries[key]
        self._epochs.pop(host, None)
        return len(gone)

    def sweep(self, now_s: float) -> int:
        """Forgets what has expired; returns how many entries."""
        gone = [key for key, entry in self._entries.items() if entry.expires_s <= now_s]
        for key in gone:
            del self._entries[key]
        self._forget_epochs()
        return len(gone)

    def _alive(self, key: SwaKey, now_s: float) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        is_stale = entry.location.host_epoch < self._epochs.get(entry.location.host, 0)
        if is_stale or entry.expires_s <= now_s:
            self.num_stale += is_stale
            del self._entries[key]
            return None
        return entry


def owner_of(key16: bytes, members: Sequence[str]) -> str | None:
    """Returns which member owns a key: rendezvous hash, so that a member that leaves moves only
    its own keys. None without members."""

    def score(member: str) -> bytes:
        return hashlib.sha256(key16 + member.encode()).digest()

    return max(members, key=lambda member: (score(member), member), default=None)
