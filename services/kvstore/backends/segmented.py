"""A shared storage as a backend: shards in segments of their writer, found by everybody.

Each STORE writes segments of its own and reads those of all. What others wrote is found by `poll`;
nothing is locked, nothing is overwritten, and no name has two writers, so the worst that a slow
listing, a stale cache or a dead host can do is a miss. Room is won back by writing the live rest
of the emptiest segment anew and removing it. Two media: `posix.py` and `s3.py`.
Source: kvcache-and-balancing.md, section 11.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from services.common.clock import SYSTEM_CLOCK, Clock
from services.kvstore.backends import segment_index as si
from services.kvstore.backends.base import (
    BackendStat,
    Capabilities,
    Changes,
    PutStatus,
    ReadStatus,
    ScrubReport,
    ShardRef,
    StorageAway,
    StorageFull,
)
from services.kvstore.backends.medium import Medium
from services.kvstore.backends.segment_writer import LISTING, SegmentedConfig, SegmentWriter
from services.kvstore.backends.verify import check_shard, joined, ref_of, take_object
from services.kvstore.checksums import Buffer
from services.kvstore.formats import ShardHeader
from services.kvstore.gc.policy import ClockGuard
from services.kvstore.placement import (
    OBJECT_HEADER_BYTES,
    SHARD_HEADER_BYTES,
    WHOLE,
    slot_bytes,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
_TAIL_BYTES: Final = 128 << 10
_PARALLEL: Final = 16
_LOOKS: Final = 4  # one after the other while segments move
_ERASE_WAIT_S: Final = 0.01  # more at each look
_MAX_ERASE_WAIT_S: Final = 0.25
_TIDY_EVERY_S: Final = 10.0  # it may fail again and again
_RETRY_S: Final = 1.0  # a storage that is away or full is asked again this long after it


@dataclass(frozen=True)
class _Pending:
    header: ShardHeader
    data: bytes
    done: asyncio.Future[PutStatus]


class SegmentedBackend:
    """A SharedBackend over a medium. Create with `await SegmentedBackend.open(...)`."""

    capabilities = Capabilities(
        protects=True, atomic_replace=True, range_read=True, batch=True, durable_ack=True
    )

    def __init__(
        self, medium: Medium, config: SegmentedConfig, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._medium = medium
        self._config = config
        self._clock = clock
        self._index = si.SegmentIndex()
        self._pending: deque[_Pending] = deque()
        self._wanted = asyncio.Event()
        self._turn = asyncio.Lock()  # one batch, clean-up or erasure at a time
        self._poll_turn = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._segments = SegmentWriter(medium, config, self._index, self._ask, self._index_segment)
        self._away_until_s = self._full_until_s = self._tidy_at_s = 0.0
        self._is_closed = False
        self._news: list[Changes] = []
        self._guard = ClockGuard()
        self.num_away = 0

    @classmethod
    async def open(
        cls, medium: Medium, config: SegmentedConfig, clock: Clock = SYSTEM_CLOCK
    ) -> SegmentedBackend:
        """Returns the backend with everything there indexed. Raises StorageAway."""
        backend = cls(medium, config, clock)
        names = await backend._ask(medium.names(), LISTING)
        await backend._index_names(names)
        # Twice, for what moved while it was looked at.
        for _ in range(_LOOKS):
            if not (await backend._look())[1]:
                break
        backend._news.clear()
        own = [name for name in names if si.owner_of(name) == config.writer]
        await backend._segments.settle(own, clock.wall_s())
        backend._writer = asyncio.create_task(backend._write_loop(), name="kv segments")
        return backend

    # ---- asking the medium --------------------------------------------------------------------

    async def _ask(self, work: Awaitable[T], patience: int = 1) -> T:
        """Awaits within so many times the time allowed; a storage that is away is not asked for a
        while."""
        try:
            async with asyncio.timeout(patience * self._config.timeout_s):
                return await work
        except TimeoutError:
            self._note_away("no answer in time")
            raise StorageAway("no answer in time") from None
        except StorageAway as error:
            self._note_away(str(error))
            raise

    def _note_away(self, why: str) -> None:
        if self._clock.now_s() >= self._away_until_s:
            log.warning("shared storage is away", extra={"why": why})
        self.num_away += 1
        self._away_until_s = self._clock.now_s() + _RETRY_S

    @property
    def _is_away(self) -> bool:
        return self._clock.now_s() < self._away_until_s

    # ---- what is there ------------------------------------------------------------------------

    async def _index_names(self, names: Iterable[str]) -> bool:
        """Indexes lists of deleted shards, then segments.

        Returns whether a segment went before it was read: what was in it lies under another name
        by then.
        """
        gate = asyncio.Semaphore(_PARALLEL)
        has_gone = False

        async def one(name: str) -> None:
            nonlocal has_gone
            async with gate:
                try:
                    if si.is_segment(name):
                        await self._index_segment(name)
                        return
                    data, _ = await self._ask(self._medium.tail(name, 1 << 30))
                    for segment, offset in si.tombstones(si.owner_of(name), data):
                        if segment in all_names:
                            self._index.bury_at(segment, offset)
                except FileNotFoundError:
                    has_gone = has_gone or si.is_segment(name)
                except OSError as error:
                    log.error("segment cannot be read", extra={"errno": error.errno})

        all_names = set(names)
        await asyncio.gather(*(one(name) for name in sorted(filter(si.is_deletes, all_names))))
        await asyncio.gather(*(one(name) for name in sorted(filter(si.is_segment, all_names))))
        return has_gone

    async def _index_segment(self, name: str) -> None:
        """Indexes what is in a segment; the next poll tells what of it is new, also when what is
        looked at beside it fails: it will not be new once more."""
        headers, is_sealed = await self._headers_of(name)
        new = self._index.add_all(name, headers)
        self._index.segments.setdefault(name, si.Segment()).is_sealed = is_sealed
        if new:
            self._news.append(Changes(b"".join(new)))

    async def _headers_of(self, name: str) -> tuple[list[bytes], bool]:
        """Returns the headers of a segment from its start on, and whether it is sealed."""
        tail, size = await self._ask(self._medium.tail(name, _TAIL_BYTES))
        headers, need = si.footer_headers(tail)
        if need and need <= size:
            tail, _ = await self._ask(self._medium.tail(name, need))
            headers, _ = si.footer_headers(tail)
        if headers is not None:
            return headers, True
        headers, offset = [], 0
        while offset + SHARD_HEADER_BYTES <= size:
            raw = await self._ask(self._medium.read(name, offset, SHARD_HEADER_BYTES))
            header = ShardHeader.parse(raw)
            if header is None or offset + SHARD_HEADER_BYTES + header.shard_bytes > size:
                break
            headers.append(raw)
            offset += si.padded(SHARD_HEADER_BYTES + header.shard_bytes)
        return headers, False

    async def poll(self) -> Changes:
        """Looks for what others wrote and removed; see SharedBackend."""
        await self._refresh()
        await self._tidy()
        news, self._news = self._news, []
        lost, self._segments.lost = self._segments.lost, []
        removed = dict.fromkeys([*lost, *(ref for change in news for ref in change.removed)])
        # What moved was gone for a moment, what was found may be gone again: only the end tells.
        return Changes(
            b"".join(self._still_there(change.added) for change in news),
            tuple(ref for ref in removed if self._index.place(ref) is None),
        )

    async def _tidy(self) -> None:
        """Brings to an end what was broken off; who has the turn just now does so himself."""
        now_s = self._clock.now_s()
        if self._turn.locked() or now_s < self._tidy_at_s or not self._segments.is_untidy:
            return
        self._tidy_at_s = now_s + _TIDY_EVERY_S
        async with self._turn:
            with suppress(StorageAway, StorageFull, OSError):
                await self._segments.tidy()

    def _still_there(self, added: bytes) -> bytes:
        raws = (
            added[at : at + SHARD_HEADER_BYTES] for at in range(0, len(added), SHARD_HEADER_BYTES)
        )
        parsed = ((raw, ShardHeader.parse(raw)) for raw in raws)
        return b"".join(
            raw for raw, h in parsed if h is not None and self._index.place(ref_of(h)) is not None
        )

    async def _refresh(self) -> None:
        async with self._poll_turn:
            for _ in range(_LOOKS):
                names, is_moving = await self._look()
                if not is_moving:
                    break
            await self._segments.remove_late(names, self._clock.now_s())
            await self._reap(names)

    async def _look(self) -> tuple[set[str], bool]:
        """Indexes what a listing shows; returns it, and whether something moved meanwhile: a
        listing that takes its time may show it neither where it was nor where it is."""
        known = set(self._index.segments)
        names = await self._ask(self._medium.names(), LISTING)
        mine = self._config.writer
        growing = {
            name
            for name in known & names
            if si.owner_of(name) != mine and not self._index.segments[name].is_sealed
        }
        # What others deleted they may still be read: their lists are read at the start only.
        # Of ours there may be some that we took or made and were not told, or did not see at first.
        unknown = {
            name
            for name in names - known - self._index.segments.keys()
            if si.is_segment(name) and not self._segments.is_making(name)
        }
        has_gone = await self._index_names(unknown | growing)
        removed: list[ShardRef] = []
        # Only what was known before the listing began: later ones may be missing in it.
        for name in await self._gone(known - names):
            removed += self._index.drop(name)
            self._segments.abandon(name)
        self._news.append(Changes(removed=tuple(removed)))
        return names, has_gone or bool(removed)

    async def _gone(self, unlisted: Iterable[str]) -> list[str]:
        """Returns those that are really gone: listings of shared storages leave names out."""
        gate = asyncio.Semaphore(_PARALLEL)

        async def is_gone(name: str) -> bool:
            async with gate:
                try:
                    await self._ask(self._medium.tail(name, 1))
                except FileNotFoundError:
                    return True
                except OSError:
                    pass  # there, and damaged
                return False

        names = [name for name in sorted(unlisted) if name in self._index.segments]
        are_gone = await asyncio.gather(*(is_gone(name) for name in names))
        return [name for name, gone in zip(names, are_gone, strict=True) if gone]

    async def _reap(self, names: Iterable[str]) -> None:
        """Removes what writers that never came back left, when every block in it has expired. Who
        still writes looks after his own: blocks that are used do not expire."""
        if self._config.reap_after_s <= 0:
            return
        if not self._guard.believes(self._clock.wall_s(), self._clock.now_s()):
            return  # a clock that jumps by weeks would take everybody's blocks away
        before_s = self._clock.wall_s() - self._config.reap_after_s
        newest_s: dict[str, int] = {}
        for name, segment in self._index.segments.items():
            owner = si.owner_of(name)
            newest_s[owner] = max(newest_s.get(owner, 0), segment.newest_s)
        gone = {owner for owner, at_s in newest_s.items() if 0 < at_s < before_s}
        for name in sorted(names):
            if si.owner_of(name) in gone - {self._config.writer}:
                with suppress(FileNotFoundError):  # somebody else was faster
                    await self._reap_one(name, before_s)

    async def _reap_one(self, name: str, before_s: float) -> None:
        segment = self._index.segments.get(name)
        if segment is None and si.is_segment(name):
            return  # it could not be read
        if segment is not None and self._medium.appends and not segment.is_sealed:
            # Its writer may come back just now: what he wrote last must not go with it.
            taken = await self._segments.take(name)
            await self._index_segment(taken)
            self._index.drop(name)
            name = taken
            if self._index.segments[name].newest_s >= before_s:
                return
        await self._ask(self._medium.delete(name))
        self._news.append(Changes(removed=tuple(self._index.drop(name))))

    def owns(self, ref: ShardRef) -> bool:
        """Returns whether this process wrote the shard, or took it over."""
        place = self._index.place(ref)
        return place is not None and si.owner_of(place.segment) == self._config.writer

    # ---- reads --------------------------------------------------------------------------------

    async def _read(self, ref: ShardRef, skip: int = 0, limit: int = -1) -> bytes | ReadStatus:
        """Returns the stored bytes of a shard, not yet checked, or why not."""
        for _ in range(_LOOKS):
            place = self._index.place(ref)
            if place is None:
                return ReadStatus.ABSENT
            if self._is_away:
                return ReadStatus.AWAY
            count = place.num_bytes - skip if limit < 0 else limit
            try:
                return await self._ask(self._medium.read(place.segment, place.offset + skip, count))
            except FileNotFoundError:  # it has moved, and maybe we know where to
                if self._index.place(ref) == place:
                    try:
                        await self._refresh()
                    except (StorageAway, OSError):
                        return ReadStatus.AWAY
            except OSError:
                return ReadStatus.IO
            except StorageAway:
                return ReadStatus.AWAY
        return ReadStatus.AWAY  # it keeps moving, and is no worse for it

    async def get_shard(self, ref: ShardRef) -> tuple[bytes | None, ReadStatus]:
        """Returns a shard; see BlockBackend."""
        data = await self._read(ref)
        if isinstance(data, ReadStatus):
            return None, data
        status = check_shard(data, ref)
        return (data, status) if status is ReadStatus.OK else (None, status)

    async def get_object(
        self, ref: ShardRef, key: bytes, layout: bytes, out: Buffer
    ) -> tuple[bytes | None, ReadStatus]:
        """Reads a block stored whole; see BlockBackend."""
        data = await self._read(ref)
        if isinstance(data, ReadStatus):
            return None, data
        return take_object(data, ref, key, layout, out)

    async def object_header(self, ref: ShardRef) -> bytes | None:
        """Returns the header of a block stored whole; see BlockBackend."""
        data = await self._read(ref, SHARD_HEADER_BYTES, OBJECT_HEADER_BYTES)
        if isinstance(data, ReadStatus) or len(data) != OBJECT_HEADER_BYTES:
            return None
        return data

    def object_bytes(self, ref: ShardRef) -> int | None:
        """Returns the length of a shard's data, without reading it."""
        place = self._index.place(ref)
        return None if place is None else place.num_bytes - SHARD_HEADER_BYTES

    async def list_headers(self) -> AsyncGenerator[bytes, None]:
        """Yields headers, also of what was only left out here; none that moves meanwhile is passed
        over, and some may come twice. See BlockBackend. Raises StorageAway."""
        looked_at = set[str]()
        while names := self._index.segments.keys() - looked_at:
            for name in sorted(names):
                looked_at.add(name)
                if name not in self._index.segments:
                    continue
                try:
                    headers, _ = await self._headers_of(name)
                except FileNotFoundError:
                    await self._refresh()  # finds where it has moved to
                    continue
                except OSError:
                    continue
                if name in self._index.segments and si.owner_of(name) != self._config.writer:
                    self._index.add_all(name, headers)
                parsed = ((raw, ShardHeader.parse(raw)) for raw in headers)
                alive = [raw for raw, h in parsed if h and name in self._index.holders([ref_of(h)])]
                if alive:
                    yield b"".join(alive)

    # ---- writes -------------------------------------------------------------------------------

    async def put_shard(self, pieces: Sequence[Buffer], durable: bool = False) -> PutStatus:
        """Stores one shard, durable on return; see BlockBackend."""
        header, data = joined(pieces)
        if len(data) > slot_bytes(self._config.payload_bytes, WHOLE):
            raise ValueError("the shard is larger than a slot")
        if self._index.place(ref_of(header)) is not None:
            return PutStatus.DURABLE
        if self._clock.now_s() < self._full_until_s:
            return PutStatus.FULL
        if self._is_away or self._is_closed:
            return PutStatus.AWAY
        if len(self._pending) >= self._config.max_pending_shards:
            return PutStatus.FULL
        done: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(header, data, done))
        self._wanted.set()
        return await done

    async def _write_loop(self) -> None:
        while True:
            await self._wanted.wait()
            if not self._medium.appends and len(self._pending) < self._config.batch_shards:
                await self._clock.sleep(self._config.linger_s)
            self._wanted.clear()
            while self._pending:
                count = min(len(self._pending), self._config.batch_shards)
                await self._write_batch([self._pending.popleft() for _ in range(count)])
            try:
                async with self._turn:
                    await self._segments.merge_small()
            except (StorageAway, StorageFull, OSError):
                pass  # the next turn tries again

    async def _write_batch(self, batch: list[_Pending]) -> None:
        status = PutStatus.AWAY
        try:
            if self._is_away:
                return
            async with self._turn:
                room = sum(si.padded(len(item.data)) for item in batch)
                await self._segments.make_room(room)
                try:
                    await self._segments.append([(item.header, item.data) for item in batch])
                except StorageFull:
                    await self._segments.remove_empty()
                    raise
            status = PutStatus.DURABLE
        except StorageFull:
            status = PutStatus.FULL
            need = len(batch) * self._segments.slot_bytes
            if self._segments.num_bytes() + need <= self._config.capacity_bytes:
                self._full_until_s = self._clock.now_s() + _RETRY_S  # the device is full, not we
        except StorageAway:
            pass  # how much of the batch is there is not known
        except OSError as error:
            self._note_away(f"errno {error.errno}")
        finally:
            for item in batch:
                if not item.done.done():
                    item.done.set_result(status)

    # ---- deletes ------------------------------------------------------------------------------

    async def delete_shards(self, refs: Sequence[ShardRef], erase: bool = False) -> int:
        """Frees shards. One that somebody else wrote is only left out here: its writer decides;
        but erasing erases, whoever wrote it."""
        if erase:
            return await self._erase(refs)
        count, records = 0, []
        for ref in refs:
            count += self._index.place(ref) is not None
            own = self._index.bury(ref, self._config.writer)
            records += [si.tombstone(each.segment, each.offset) for each in own]
        if not records:
            return count
        try:
            async with self._turn:
                await self._segments.write_deletes(records)
                await self._segments.remove_empty()
        except (StorageAway, StorageFull, OSError):
            pass  # here they are gone; after a restart they may be back, with right bytes
        return count

    async def _erase(self, refs: Sequence[ShardRef]) -> int:
        count = sum(self._index.place(ref) is not None for ref in refs)
        async with self._turn:
            try:
                await self._segments.tidy()
                if not count:
                    return 0
                await self._segments.announce(refs)
                until_s = self._clock.now_s() + LISTING * self._config.timeout_s
                for number in itertools.count():
                    await self._refresh()
                    holders = sorted(self._index.holders(refs))
                    if not holders:
                        return count
                    for name in holders:
                        await self._segments.erase_in(name)
                    if self._clock.now_s() > until_s:
                        break
                    # Others may be writing segments anew meanwhile; two of them must not keep step.
                    wait_s = min(_ERASE_WAIT_S * number, _MAX_ERASE_WAIT_S)
                    await self._clock.sleep(wait_s * random.uniform(0.5, 1.5))
            except (StorageFull, OSError) as error:
                raise StorageAway(f"blocks could not be erased: {error}") from error
            finally:
                self._segments.end_erasing()
        raise StorageAway("blocks could not be erased: they keep moving")

    # ---- the rest -----------------------------------------------------------------------------

    async def stat(self) -> BackendStat:
        """Returns the counts of what this writer keeps."""
        # One segment's worth of room is kept free, for cleaning.
        reserve = min(self._config.segment_bytes, self._config.capacity_bytes // 4)
        size = self._segments.slot_bytes
        own = self._segments.own()
        return BackendStat(
            num_slots=max((self._config.capacity_bytes - reserve) // size, 1),
            num_used=sum(len(self._index.segments[name].live) for name in own),
            slot_bytes=size,
            disk_bytes=self._segments.num_bytes(),
        )

    async def scrub(self, bytes_per_s: float) -> ScrubReport:
        """Reads all of ours once; see BlockBackend."""
        bad: list[tuple[ShardRef, ReadStatus]] = []
        num_checked = 0
        for ref in [ref for ref in self._index.refs() if self.owns(ref)]:
            size = self.object_bytes(ref)
            _, status = await self.get_shard(ref)
            if status in (ReadStatus.AWAY, ReadStatus.ABSENT) or size is None:
                continue
            num_checked += 1
            if status is not ReadStatus.OK:
                bad.append((ref, status))
            if bytes_per_s > 0:
                await self._clock.sleep(size / bytes_per_s)
        await self.delete_shards([ref for ref, _ in bad])
        return ScrubReport(num_checked, tuple(bad))

    async def sync(self) -> None:
        """Everything acknowledged is durable already."""

    async def close(self) -> None:
        """Seals the growing segment and lets go."""
        self._is_closed = True  # nobody would write what is put from here on
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        for item in self._pending:
            if not item.done.done():
                item.done.set_result(PutStatus.AWAY)
        self._pending.clear()
        try:
            async with self._turn:
                await self._segments.seal()
        except (StorageAway, StorageFull, OSError):
            pass  # its headers index it
        await self._medium.close()
