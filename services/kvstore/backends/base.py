"""The seam between the store and any kind of storage: shards in, shards out.

A backend never fails for a missing or damaged shard: it says so. Full is an answer too. Every
backend passes `tests/backend_suite.py`. Source: kvcache-and-balancing.md, section 11.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from services.kvstore.checksums import Buffer


class ReadStatus(enum.IntEnum):
    """How a read ended; all but OK are misses."""

    OK = 0
    ABSENT = 1
    IO = 2  # the medium failed or was cut short
    REUSED = 3  # the place holds something else, or its header is damaged
    DATA = 4  # the data do not have their checksum
    OBJECT_HEADER = 5
    WRONG_KEY = 6
    WRONG_LAYOUT = 7
    PAYLOAD = 8
    SEALED = 9  # encrypted, and not under the key at hand
    AWAY = 10  # the storage did not answer; what it holds may be as good as ever

    @property
    def is_damage(self) -> bool:
        """Returns whether it means rot, and not merely that the shard is elsewhere or gone."""
        return self not in _NO_DAMAGE


_NO_DAMAGE: Final = frozenset(
    (
        ReadStatus.OK,
        ReadStatus.ABSENT,
        ReadStatus.WRONG_KEY,
        ReadStatus.WRONG_LAYOUT,
        ReadStatus.SEALED,
        ReadStatus.AWAY,
    )
)


class PutStatus(enum.Enum):
    """How a write ended."""

    BUFFERED = "buffered"  # survives the process, not the machine
    DURABLE = "durable"
    FULL = "full"  # no room, here or on the device
    AWAY = "away"  # the storage did not answer; whether the shard is there is not known

    @property
    def is_stored(self) -> bool:
        """Returns whether the shard is there."""
        return self in (PutStatus.BUFFERED, PutStatus.DURABLE)


class StorageAway(Exception):
    """The storage did not answer in time, or refuses us; asking again later may help."""


class StorageFull(Exception):
    """The storage has no room for more."""


@dataclass(frozen=True, order=True)
class ShardRef:
    """Names one shard of one put; two puts of a key never share a name."""

    key16: bytes
    shard: int
    put_id: int


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do by itself."""

    protects: bool  # keeps data through the loss of a device; then blocks are stored whole
    atomic_replace: bool
    range_read: bool
    batch: bool
    durable_ack: bool


@dataclass(frozen=True)
class BackendStat:
    """Counts of a backend."""

    num_slots: int
    num_used: int
    slot_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class ScrubReport:
    """What a pass found; the bad shards are freed already."""

    num_checked: int
    bad: tuple[tuple[ShardRef, ReadStatus], ...]


class BlockBackend(Protocol):
    """Storage of shards. All methods may be called concurrently."""

    capabilities: Capabilities

    async def put_shard(self, pieces: Sequence[Buffer], durable: bool = False) -> PutStatus:
        """Stores one shard: its 128-byte header, then its data, in pieces.

        Idempotent per ref. Raises ValueError for a header that does not describe the data.
        """
        ...

    async def get_shard(self, ref: ShardRef) -> tuple[bytes | None, ReadStatus]:
        """Returns header and data, checked, or why not."""
        ...

    async def get_object(
        self, ref: ShardRef, key: bytes, layout: bytes, out: Buffer
    ) -> tuple[bytes | None, ReadStatus]:
        """Reads a block stored whole: payload into `out`, its checked header returned.

        When the status is not OK the bytes in `out` must not be used.
        """
        ...

    def object_bytes(self, ref: ShardRef) -> int | None:
        """Returns the length of a shard's data, without reading it; None when it is absent."""
        ...

    async def object_header(self, ref: ShardRef) -> bytes | None:
        """Returns the 256-byte header of a block stored whole, not yet checked; None when it
        cannot be had."""
        ...

    async def delete_shards(self, refs: Sequence[ShardRef], erase: bool = False) -> int:
        """Frees shards and returns how many were there. Idempotent.

        With `erase` their bytes are gone from the storage too when this returns (S-11).
        Raises: StorageAway when they may still be there; only with `erase`.
        """
        ...

    def list_headers(self) -> AsyncGenerator[bytes, None]:
        """Yields the 128-byte headers of all shards, concatenated, some at a time; where others
        write too, some may come twice."""
        ...

    async def stat(self) -> BackendStat:
        """Returns the counts."""
        ...

    async def scrub(self, bytes_per_s: float) -> ScrubReport:
        """Reads everything once, no faster than that; frees and names what is damaged."""
        ...

    async def sync(self) -> None:
        """Returns once everything acknowledged before is durable."""
        ...

    async def close(self) -> None:
        """Makes everything durable and lets go."""
        ...


@dataclass(frozen=True)
class Changes:
    """What others did to a shared storage since the last look."""

    added: bytes = b""  # 128-byte headers, concatenated
    removed: tuple[ShardRef, ...] = ()

    @property
    def is_nothing(self) -> bool:
        """Returns whether all is as before."""
        return not self.added and not self.removed


class SharedBackend(BlockBackend, Protocol):
    """Storage that several STOREs use at once. Each evicts only what it wrote itself, so that no
    block's age is judged by a process that does not see its hits."""

    def owns(self, ref: ShardRef) -> bool:
        """Returns whether this process wrote the shard, or took it over."""
        ...

    async def poll(self) -> Changes:
        """Looks for what others wrote and removed. Raises StorageAway."""
        ...


async def wait_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Waits until all have ended, however often the caller is cancelled meanwhile: what they write
    into must not be given away while they run. Raises CancelledError afterwards if it was."""
    was_cancelled = False
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            was_cancelled = True
    if was_cancelled:
        raise asyncio.CancelledError
