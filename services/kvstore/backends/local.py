"""The embedded backend: segment files in one directory, for a laptop or one disk of a node.

The work is native and releases the interpreter lock; it runs in threads of its own, so that a
slow disk never holds the event loop. Group commit: everything buffered is flushed every
`sync_every_s`, at once after `sync_bytes`.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from services.common.clock import SYSTEM_CLOCK, Clock
from services.kvstore.backends.base import (
    BackendStat,
    Capabilities,
    PutStatus,
    ReadStatus,
    ScrubReport,
    ShardRef,
    StorageAway,
    wait_all,
)
from services.kvstore.checksums import HAS_NATIVE, Buffer, native
from services.kvstore.folders import MadeFor, check_made_for, note_made_for
from services.kvstore.placement import (
    OBJECT_HEADER_BYTES,
    SHARD_HEADER_BYTES,
    WHOLE,
    Profile,
    slot_bytes,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
# The device is asked again this long after it was full (P-34: writes again within 30 s).
_RETRY_FULL_S: Final = 2.0
_SCRUB_SLOTS: Final = 64
_LIST_SLOTS: Final = 1024


@dataclass(frozen=True)
class LocalBackendConfig:
    """Where and how large."""

    dir: Path
    capacity_bytes: int = 2 << 30
    segment_bytes: int = 64 << 20
    payload_bytes: int = 114_688  # largest block; sets the slot size
    profile: Profile = WHOLE
    cluster: str = ""  # of a storage node, whose shards are of use in no other
    num_threads: int = 4
    sync_every_s: float = 0.05
    sync_bytes: int = 64 << 20


class LocalBackend:
    """Segment files in one directory. Create with `await LocalBackend.open(config)`."""

    capabilities = Capabilities(
        protects=False, atomic_replace=True, range_read=True, batch=True, durable_ack=True
    )

    def __init__(self, config: LocalBackendConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        self._config = config
        self._clock = clock
        self._threads = ThreadPoolExecutor(config.num_threads, thread_name_prefix="kv-disk")
        self._store: Any = None
        self._full_until_s = 0.0
        self._synced = 0  # records below this number are durable
        self._wanted = asyncio.Event()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self.num_io_errors = 0

    @classmethod
    async def open(cls, config: LocalBackendConfig, clock: Clock = SYSTEM_CLOCK) -> LocalBackend:
        """Returns the backend, recovered from what its directory holds.

        Raises: OSError when the directory cannot be used or another process has it; ConfigError
            when it was made for other slots, shards or another cluster.
        """
        backend = cls(config, clock)
        made_for = MadeFor(backend.slot_bytes, str(config.profile), config.cluster)
        check_made_for(config.dir, made_for)
        size = slot_bytes(config.payload_bytes, config.profile)
        segment = max(min(config.segment_bytes, config.capacity_bytes), size)
        count = max(config.capacity_bytes // (segment // size * size), 1)
        backend._store = await backend._run(
            lambda: _segment_store()(str(config.dir), size, segment, count)
        )
        note_made_for(config.dir, made_for)
        found, torn, rebuilt = backend._store.recovery()
        if torn or rebuilt:
            log.warning(
                "segments recovered",
                extra={"num_shards": found, "num_torn": torn, "was_rebuilt": rebuilt},
            )
        backend._flusher = asyncio.create_task(backend._flush_loop(), name="kv group commit")
        return backend

    @property
    def slot_bytes(self) -> int:
        """Returns the size of one slot."""
        return slot_bytes(self._config.payload_bytes, self._config.profile)

    async def put_shard(self, pieces: Sequence[Buffer], durable: bool = False) -> PutStatus:
        """Stores one shard; see BlockBackend."""
        if self._clock.now_s() < self._full_until_s:
            return PutStatus.FULL
        try:
            number = await self._run(lambda: self._store.put(list(pieces)))
        except OSError as error:
            self._note(error)
            return PutStatus.FULL
        self._wanted.set()
        if not durable:
            return PutStatus.BUFFERED
        if number >= self._synced:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((number, waiter))
            await waiter
        return PutStatus.DURABLE

    def _note(self, error: OSError) -> None:
        """A full device is asked again a little later; a broken one is a miss each time."""
        if error.errno == errno.ENOSPC:
            stat = self._store.stat()
            if stat[1] < stat[0]:  # the device is full, not we
                self._full_until_s = self._clock.now_s() + _RETRY_FULL_S
            return
        self.num_io_errors += 1
        log.error("storage device failed", extra={"errno": error.errno})

    async def get_shard(self, ref: ShardRef) -> tuple[bytes | None, ReadStatus]:
        """Returns a shard; see BlockBackend."""
        data, status = await self._run(
            lambda: self._store.get_shard(ref.key16, ref.shard, ref.put_id)
        )
        return data, ReadStatus(status)

    async def get_object(
        self, ref: ShardRef, key: bytes, layout: bytes, out: Buffer
    ) -> tuple[bytes | None, ReadStatus]:
        """Reads a block stored whole; see BlockBackend."""
        header, status = await self._run(
            lambda: self._store.get_object(key, ref.shard, ref.put_id, layout, out)
        )
        return header, ReadStatus(status)

    def object_bytes(self, ref: ShardRef) -> int | None:
        """Returns the length of a shard's data, without reading it."""
        length: int | None = self._store.len_of(ref.key16, ref.shard, ref.put_id)
        return length

    async def object_header(self, ref: ShardRef) -> bytes | None:
        """Returns the header of a block stored whole; see BlockBackend."""
        shard, _ = await self.get_shard(ref)
        if shard is None:
            return None
        return shard[SHARD_HEADER_BYTES : SHARD_HEADER_BYTES + OBJECT_HEADER_BYTES]

    async def delete_shards(self, refs: Sequence[ShardRef], erase: bool = False) -> int:
        """Frees shards; see BlockBackend."""
        ids = [(ref.key16, ref.shard, ref.put_id) for ref in refs]
        try:
            return int(await self._run(lambda: self._store.delete(ids, erase)))
        except OSError as error:
            self._note(error)
            if erase:
                raise StorageAway("shards could not be overwritten") from error
            return 0

    async def list_headers(self) -> AsyncGenerator[bytes, None]:
        """Yields headers; see BlockBackend."""
        at: int | None = 0
        while at is not None:
            headers, at = await self._run(functools.partial(self._store.headers, at, _LIST_SLOTS))
            if headers:
                yield headers

    async def rescan(self) -> int:
        """Takes up shards that the index lost; see storage/node.py."""
        return int(await self._run(self._store.rescan))

    async def stat(self) -> BackendStat:
        """Returns the counts."""
        num_slots, num_used, size, disk_bytes, _ = self._store.stat()
        return BackendStat(num_slots, num_used, size, disk_bytes)

    async def scrub(self, bytes_per_s: float) -> ScrubReport:
        """Reads everything once; see BlockBackend."""
        bad: list[tuple[ShardRef, ReadStatus]] = []
        at: int | None = 0
        num_checked = 0
        while at is not None:
            found, checked, at = await self._run(
                functools.partial(self._store.scrub, at, _SCRUB_SLOTS)
            )
            bad += [(ShardRef(key, shard, put), ReadStatus(why)) for key, shard, put, why in found]
            num_checked += checked
            if checked and bytes_per_s > 0:
                await self._clock.sleep(checked * self.slot_bytes / bytes_per_s)
        return ScrubReport(num_checked, tuple(bad))

    async def sync(self) -> None:
        """Returns once everything acknowledged before is durable."""
        covered = await self._run(self._store.sync)
        self._synced = max(self._synced, covered)
        ready = [waiter for number, waiter in self._waiters if number < self._synced]
        self._waiters = [item for item in self._waiters if item[0] >= self._synced]
        for waiter in ready:
            if not waiter.done():
                waiter.set_result(None)

    async def close(self) -> None:
        """Makes everything durable and lets go of the directory."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        try:
            await self.sync()
        except OSError as error:
            self._note(error)
        for _, waiter in self._waiters:
            waiter.cancel()
        self._threads.shutdown(wait=True)
        # Not left to the last reference: another process may be waiting for the directory.
        self._store.unlock()

    async def _flush_loop(self) -> None:
        while True:
            await self._wanted.wait()
            if self._store.stat()[4] < self._config.sync_bytes:
                await self._clock.sleep(self._config.sync_every_s)
            self._wanted.clear()
            try:
                await self.sync()
            except OSError as error:
                # Nothing is called durable; the next round tries again.
                self._note(error)
                self._wanted.set()
                await self._clock.sleep(1.0)

    async def _run(self, work: Callable[[], T]) -> T:
        """Runs the work in a disk thread to its end, also when the caller is cancelled: what it
        writes into must not be given away while it runs."""
        job = self._threads.submit(work)
        waiter = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not job.cancel():  # it has begun
                await wait_all([waiter])
            raise


def _segment_store() -> Callable[..., Any]:
    if HAS_NATIVE:
        store: Callable[..., Any] = native.SegmentStore
        return store
    from services.kvstore.backends.segments_plain import PlainSegmentStore

    return PlainSegmentStore
