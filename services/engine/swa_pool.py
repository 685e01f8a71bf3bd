"""This machine's pool of window states: LRU by bytes, read by other machines over SwaPoolService.

A state never goes to the store; it stays with who made it and is fetched when it is hit elsewhere.
Source: kvcache-and-balancing.md, section 10.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import xxhash
from pelagos.engine.v1 import records_pb2 as pb
from pelagos.kvstore.v1 import swa_pb2

from services.common.errors import Failure, Reason

KEY16_BYTES = 16
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    key16: bytes
    position: int
    slot: int
    data: bytes
    approximate: bool


class SwaPool:
    """States by the first half of the block key at their position."""

    def __init__(
        self, max_bytes: int, layout_digest: bytes, on_evict: Callable[[bytes], None] | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._layout_digest = layout_digest
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._num_bytes = 0
        self._next_slot = 1
        self.on_evict = on_evict

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def layout_digest(self) -> bytes:
        return self._layout_digest

    def put(self, key: bytes, position: int, data: bytes, approximate: bool) -> Entry | None:
        """Keeps a state, the newest of its key; None when it is larger than the pool.

        An approximate state never replaces an exact one.
        """
        key16 = key[:KEY16_BYTES]
        if len(data) > self._max_bytes:
            return None
        known = self._entries.get(key16)
        if known is not None and approximate and not known.approximate:
            self._entries.move_to_end(key16)
            return known
        self._remove(key16)
        while self._num_bytes + len(data) > self._max_bytes:
            evicted = next(iter(self._entries))
            self._remove(evicted)
            if self.on_evict is not None:
                self.on_evict(evicted)
        entry = Entry(key16, position, self._next_slot, data, approximate)
        self._next_slot += 1
        self._entries[key16] = entry
        self._num_bytes += len(data)
        return entry

    def get(self, key: bytes) -> Entry | None:
        """The state of a key, which makes it the youngest."""
        key16 = key[:KEY16_BYTES]
        entry = self._entries.get(key16)
        if entry is not None:
            self._entries.move_to_end(key16)
        return entry

    def _remove(self, key16: bytes) -> None:
        entry = self._entries.pop(key16, None)
        if entry is not None:
            self._num_bytes -= len(entry.data)


def location_of(entry: Entry, host: str, address: str, host_epoch: int) -> pb.SwaLocation:
    """What the directory is told about a state."""
    return pb.SwaLocation(
        position=entry.position,
        host_instance_id=host,
        address=address,
        slot=entry.slot,
        length_bytes=len(entry.data),
        digest=xxhash.xxh3_128(entry.data).digest(),
        approximate=entry.approximate,
        host_epoch=host_epoch,
    )


class SwaPoolServicer:
    """SwaPoolService of an engine's machine."""

    def __init__(self, pool: SwaPool, host_epoch: int) -> None:
        self._pool = pool
        self._host_epoch = host_epoch

    async def GetState(self, request: swa_pb2.GetStateRequest, context: Any) -> AsyncIterator[Any]:
        entry = self._pool.get(request.key.key16)
        stale = request.host_epoch and request.host_epoch != self._host_epoch
        other = request.key.layout_digest not in (b"", self._pool.layout_digest)
        if entry is None or stale or other or (request.slot and request.slot != entry.slot):
            raise Failure(Reason.NOT_FOUND, "the state is not here any more")
        for at in range(0, len(entry.data), PIECE_BYTES):
            yield swa_pb2.GetStateResponse(
                data=entry.data[at : at + PIECE_BYTES], total_bytes=len(entry.data)
            )
