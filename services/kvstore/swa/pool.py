"""Window states in the memory of the machine that made them, bounded by bytes.

An entry that is being copied out is pinned: it is not evicted, and a newer state of the same key
waits beside it. Source: kvcache-and-balancing.md, section 10.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.kvstore.checksums import xxh3_128
from services.kvstore.swa.directory import Location, SwaKey


@dataclass
class _Held:
    slot: int
    data: bytes
    position: int
    approximate: bool
    digest: bytes
    num_readers: int = 0


class SwaPool:
    """The pool of one machine."""

    def __init__(self, host: str, address: str, max_bytes: int) -> None:
        self.host = host
        self.address = address
        # A new life invalidates what the last one announced; of one instance id, the later counts.
        self.epoch = time.time_ns() // 1_000
        self._max_bytes = max_bytes
        self._held: OrderedDict[SwaKey, _Held] = OrderedDict()
        self._slots = itertools.count(1)
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(
        self, key: SwaKey, position: int, data: bytes, approximate: bool
    ) -> tuple[Location | None, list[SwaKey]]:
        """Keeps a state; returns where it is, and the keys evicted for it (to be withdrawn).

        None when it is larger than what can be freed, or an exact one is there already.
        """
        old = self._held.get(key)
        if old is not None:
            if (approximate and not old.approximate) or old.num_readers:
                return None, []
            self._remove(key)
        evicted = self._make_room(len(data))
        if evicted is None:
            return None, []
        held = _Held(next(self._slots), data, position, approximate, xxh3_128(data))
        self._held[key] = held
        self.num_bytes += len(data)
        return self._location(held), evicted

    def _location(self, held: _Held) -> Location:
        return Location(
            position=held.position,
            host=self.host,
            address=self.address,
            slot=held.slot,
            num_bytes=len(held.data),
            digest=held.digest,
            approximate=held.approximate,
            host_epoch=self.epoch,
        )

    def _make_room(self, num_bytes: int) -> list[SwaKey] | None:
        going: list[SwaKey] = []
        free = self._max_bytes - self.num_bytes
        for key, held in self._held.items():
            if free >= num_bytes:
                break
            if not held.num_readers:
                going.append(key)
                free += len(held.data)
        if free < num_bytes:
            return None
        for key in going:
            self._remove(key)
        return going

    def _remove(self, key: SwaKey) -> None:
        self.num_bytes -= len(self._held.pop(key).data)

    @contextmanager
    def reading(self, key: SwaKey, slot: int, epoch: int) -> Iterator[bytes | None]:
        """Gives the state while it is pinned, or None when it is no longer the one announced."""
        held = self._held.get(key)
        if held is None or held.slot != slot or epoch != self.epoch:
            yield None
            return
        self._held.move_to_end(key)
        held.num_readers += 1
        try:
            yield held.data
        finally:
            held.num_readers -= 1

    def get(self, key: SwaKey) -> tuple[Location, bytes] | None:
        """Returns a state of this machine without going over the network."""
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        return self._location(held), held.data

    def locations(self) -> list[tuple[SwaKey, Location]]:
        """Returns everything held, to be announced again when the directory has moved."""
        return [(key, self._location(held)) for key, held in self._held.items()]
