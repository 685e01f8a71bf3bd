"""The segments of one writer: growing, sealing, deleting in them, and winning room back.

Nothing here is safe against itself: whoever calls holds the writer's turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from services.kvstore.backends import segment_index as si
from services.kvstore.backends.base import ReadStatus, ShardRef, StorageAway, StorageFull
from services.kvstore.backends.medium import Medium
from services.kvstore.backends.verify import check_shard, ref_of
from services.kvstore.checksums import Buffer
from services.kvstore.formats import ShardHeader
from services.kvstore.placement import SHARD_HEADER_BYTES, WHOLE, slot_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")
# Times the time allowed for one read: megabytes are written at once, and names come by the page.
WRITING: Final = 4
LISTING: Final = 12
_WRITE_ATTEMPTS: Final = 8  # a growing segment may be taken by somebody who erases
# A copy that began before somebody's erasure has ended long before; his own announcement goes then,
# that of somebody who is gone at some time.
_ANNOUNCED_S: Final = 600.0
_LEFT_S: Final = 86_400.0
# What cannot be read goes with its segment: one bad moment must not decide that, and a device that
# reads nothing any more must not hold the turn for each of its shards.
_READS_AGAIN: Final = 8
_READ_AGAIN_S: Final = 0.1
_MAX_DOUBTFUL: Final = 1000
_MAX_FIRST_NUMBER: Final = 1 << 31
_MERGE_AT: Final = 8  # so many small segments are written together into one


@dataclass(frozen=True)
class SegmentedConfig:
    """How one STORE uses a shared storage."""

    writer: str
    capacity_bytes: int = 2 << 30  # of what this writer keeps there
    segment_bytes: int = 64 << 20
    payload_bytes: int = 114_688  # largest block
    batch_shards: int = 64
    linger_s: float = 0.05  # wait for more shards of a batch, where a batch is an object
    max_pending_shards: int = 1024
    timeout_s: float = 5.0
    # What others left that wrote nothing since is removed so long after it; 0: never.
    reap_after_s: float = 14 * 86_400.0

    def __post_init__(self) -> None:
        if not self.writer or not self.writer.replace("-", "").replace("_", "").isalnum():
            raise ValueError("writer: letters, digits, - and _")


class Ask(Protocol):
    """Awaits an answer of the storage, no longer than allowed."""

    def __call__(self, work: Awaitable[T], patience: int = 1) -> Coroutine[Any, Any, T]:
        """Returns the answer, waited for so many times the time allowed. Raises StorageAway."""
        ...


Learn = Callable[[str], Awaitable[object]]


class SegmentWriter:
    """What one writer has open, and what it does with what it wrote before."""

    def __init__(
        self,
        medium: Medium,
        config: SegmentedConfig,
        index: si.SegmentIndex,
        ask: Ask,
        learn: Learn,
    ) -> None:
        self._medium = medium
        self._config = config
        self._index = index
        self._ask = ask
        self._learn = learn
        self._open: tuple[str, list[bytes]] | None = None  # the growing segment and its headers
        self._deletes: tuple[str, int] | None = None  # the growing list and its length
        self._next_number = 1
        self.lost: list[ShardRef] = []  # what was damaged when its segment was written anew
        self._erasures: dict[str, frozenset[ShardRef]] = {}  # of everybody, by name
        self._announced: dict[str, float] = {}  # everybody's announcements: first seen when
        self._erasing = ""  # our announcement while it lasts
        # Copies that were made; what was announced since has not been looked at.
        self._copied: set[ShardRef] = set()
        self._making: set[str] = set()
        self._reads_again = _READS_AGAIN  # left for the segments in hand
        # Names that we gave up creating; the storage may still do it (the oldest first).
        self._doubtful: dict[str, None] = {}
        self.slot_bytes = slot_bytes(config.payload_bytes, WHOLE)

    async def settle(self, own: Sequence[str], wall_s: float) -> None:
        """Looks after the names that earlier lives of this writer left: what was not sealed is
        read whole, for its end may be torn; an empty segment goes."""
        # Numbers go on also where the last ones are gone: others may know what these names held.
        # A clock of any year leaves room behind it in the 32 bits of a record.
        at_least = min(max(int(wall_s), 1), _MAX_FIRST_NUMBER)
        self._next_number = max(1 + max(map(si.number_of, own), default=0), at_least)
        for name in sorted(filter(si.is_segment, own)):
            segment = self._index.segments.get(name)
            if segment is None:
                continue
            if not segment.is_sealed:
                if not await self._forget_torn(name):
                    continue
                segment.is_sealed = True  # nobody writes it any more
            if not segment.live:
                await self.remove(name)
        await self._rewrite_deletes([name for name in own if si.is_deletes(name)])
        for name in self.own():  # the former life may have ended right after a copy
            self._copied |= self._index.segments[name].live.keys()

    async def _forget_torn(self, name: str) -> bool:
        """Forgets what cannot be read of a segment; False when it was taken away meanwhile.

        Raises: StorageAway; what a storage that is away does not show is there all the same.
        """
        segment = self._index.segments[name]
        self._reads_again = _READS_AGAIN
        for ref in sorted(segment.live):
            try:
                data = await self._read_in(name, ref)
            except FileNotFoundError:
                self._index.drop(name)
                return False
            if data is None:
                self._index.forget_in(name, ref)
        return True

    async def _read_in(self, name: str, ref: ShardRef) -> bytes | None:
        """Returns a shard as it lies in one segment; None when it cannot be read there.

        Of another place where it lies too nobody knows how long it will be there.
        Raises: FileNotFoundError when the segment is not there any more, StorageAway.
        """
        segment = self._index.segments.get(name)
        place = None if segment is None else segment.live.get(ref)
        if place is None:
            return None
        while True:
            try:
                data = await self._ask(self._medium.read(name, place.offset, place.num_bytes))
                return data if check_shard(data, ref) is ReadStatus.OK else None
            except FileNotFoundError:
                raise
            except OSError:
                if not self._reads_again:
                    return None  # as good as damaged
            self._reads_again -= 1
            await asyncio.sleep(_READ_AGAIN_S)

    def abandon(self, name: str = "") -> None:
        """Writes no more into the growing segment (of this name): what is in it is not known."""
        if self._open is not None and name in ("", self._open[0]):
            self._open = None

    async def append(
        self,
        shards: Sequence[tuple[ShardHeader, bytes]],
        is_wanted: Callable[[ShardRef], bool] = lambda ref: True,
    ) -> None:
        """Writes shards into segments of ours and indexes them, but for those that are not wanted
        any more once they are written."""
        unwanted: list[bytes] = []
        for at in range(0, len(shards), self._config.batch_shards):
            part = shards[at : at + self._config.batch_shards]
            pieces: list[Buffer] = []
            for _, data in part:
                pieces += [data, bytes(si.padded(len(data)) - len(data))]
            name, offset = await self._write(pieces, [d[:SHARD_HEADER_BYTES] for _, d in part])
            for header, data in part:
                if is_wanted(ref_of(header)):
                    self._index.add(name, offset, header)
                else:
                    self._index.bury_at(name, offset)
                    unwanted.append(si.tombstone(name, offset))
                offset += si.padded(len(data))
            segment = self._index.segments[name]
            segment.num_bytes = max(segment.num_bytes, offset)
            segment.is_sealed = self._open is None or self._open[0] != name
        if unwanted:
            await self.write_deletes(unwanted)

    async def _write(self, pieces: list[Buffer], headers: list[bytes]) -> tuple[str, int]:
        """Writes one batch; returns the segment and where in it the batch begins."""
        size = sum(map(len, pieces))
        if not self._medium.appends:
            return await self._create([*pieces, si.footer(headers)]), 0
        for _ in range(_WRITE_ATTEMPTS):
            if self._open is None:
                name = await self._create(())
                self._index.segments[name] = si.Segment()
                self._open = (name, [])
            name, written = self._open
            offset = self._index.segments[name].num_bytes
            # What is larger than any segment has one of its own.
            if offset and offset + size > self._config.segment_bytes:
                await self.seal()
                continue
            # Who fails here goes on elsewhere: what was written in part, or may be written yet, is
            # not to be written over.
            self._open = None
            try:
                await self._ask(self._medium.append(name, offset, pieces), WRITING)
            except FileNotFoundError:  # somebody erased a tenant's blocks in it
                continue
            if name in self._index.segments:
                self._open = (name, written + headers)
            return name, offset
        raise StorageAway("segments vanish while they are written")

    async def _create(self, pieces: Sequence[Buffer]) -> str:
        """Creates the next segment; a number that exists belongs to somebody with our name."""
        while True:
            name = si.segment_name(self._config.writer, self._next_number)
            self._next_number += 1
            try:
                await self._make(name, pieces)
                return name
            except FileExistsError:
                log.error("another process writes under this writer's name")

    async def _make(self, name: str, pieces: Sequence[Buffer]) -> None:
        """Creates a name of ours; one that we gave up is remembered."""
        self._making.add(name)
        try:
            await self._ask(self._medium.create(name, pieces), WRITING)
        except (StorageAway, asyncio.CancelledError):
            self._doubtful[name] = None
            if len(self._doubtful) > _MAX_DOUBTFUL:
                del self._doubtful[next(iter(self._doubtful))]
            raise
        finally:
            self._making.discard(name)

    def is_making(self, name: str) -> bool:
        """Returns whether a name is one that we are making, or gave up making."""
        return name in self._making or name in self._doubtful

    async def remove_late(self, names: Set[str], now_s: float) -> None:
        """Removes what we gave up creating and the storage did after all: whoever put what is in it
        was told that it is not stored, and it may have been erased since. And announcements of
        what is over."""
        for name in names & self._doubtful.keys():
            await self._ask(self._medium.delete(name))
        lists = set(filter(si.is_erasures, names))
        for name in self._announced.keys() - lists:
            del self._announced[name]
            self._erasures.pop(name, None)
        for name in sorted(lists):
            since_s = self._announced.setdefault(name, now_s)
            is_mine = si.owner_of(name) == self._config.writer
            if name == self._erasing:
                self._announced[name] = now_s
            elif now_s - since_s > (_ANNOUNCED_S if is_mine else _LEFT_S):
                await self._ask(self._medium.delete(name))

    async def seal(self) -> None:
        """Ends the growing segment with its footer."""
        if self._open is None:
            return
        name, headers = self._open
        self._open = None
        segment = self._index.segments[name]
        end = [si.footer(headers)]
        try:
            await self._ask(self._medium.append(name, segment.num_bytes, end), WRITING)
        except FileNotFoundError:
            return  # somebody took it
        segment.is_sealed = True

    # ---- room ---------------------------------------------------------------------------------

    def own(self) -> list[str]:
        """Returns the segments of this writer."""
        mine = self._config.writer
        return [name for name in self._index.segments if si.owner_of(name) == mine]

    def num_bytes(self) -> int:
        """Returns the room that they take."""
        return sum(self._index.segments[name].num_bytes for name in self.own())

    async def make_room(self, num_bytes: int) -> None:
        """Cleans the emptiest of our segments until there is room. Raises StorageFull."""
        while self.num_bytes() + num_bytes > self._config.capacity_bytes:
            open_name = self._open[0] if self._open else ""
            segments = self._index.segments
            dirty = [
                name
                for name in self.own()
                if name != open_name and segments[name].live_bytes < segments[name].num_bytes
            ]
            if not dirty:
                raise StorageFull("no segment has room to win back")
            await self.rewrite([min(dirty, key=lambda name: segments[name].live_bytes)])

    async def merge_small(self) -> None:
        """Writes our small segments together: a storage drowns in many small names."""
        limit = min(self._config.segment_bytes, self._config.batch_shards * self.slot_bytes) // 2
        small = [
            name
            for name in self.own()
            if self._index.segments[name].is_sealed
            and self._index.segments[name].live_bytes <= limit
        ]
        if len(small) < _MERGE_AT:
            return
        await self.rewrite(small)

    async def rewrite(self, names: Sequence[str]) -> None:
        """Writes what is alive in segments anew, but for what anybody is erasing, then removes
        them.

        Whoever erases announces it first and then looks through all segments until nothing is
        left. So a copy made here either was there when he looked, or he had announced it when we
        look after the copy: one of us removes it.
        """
        erased = await self._heed()
        self._reads_again = _READS_AGAIN
        shards: list[tuple[ShardHeader, bytes]] = []
        self._index.buried = deleted = set[ShardRef]()
        try:
            whole = [name for name in names if await self._copy_out(name, erased, shards)]
            for name in names:
                self.abandon(name)
            self._copied |= {ref_of(header) for header, _ in shards}
            # What was deleted while it was copied is not to come back.
            await self.append(shards, lambda ref: ref not in deleted)
        finally:
            self._index.buried = None
        for name in names:
            if name in whole:
                await self.remove(name)
            else:  # somebody else has it, under a name that the next look finds
                self.lost += self._index.drop(name)
        await self._heed_copies()

    async def _heed_copies(self) -> None:
        """Takes out of what was copied what was announced as erased meanwhile."""
        copied, self._copied = self._copied, set()
        try:
            for name in sorted(self._index.holders(copied & await self._heed())):
                await self.erase_in(name)
        except BaseException:
            self._copied |= copied  # it is not done: again with the next tidying
            raise

    def _torn(self) -> list[str]:
        """Returns our segments that nobody writes and that have no end."""
        open_name = self._open[0] if self._open else ""
        return [
            name
            for name in self.own()
            if name != open_name and not self._index.segments[name].is_sealed
        ]

    @property
    def is_untidy(self) -> bool:
        """Returns whether something that was broken off is to be brought to an end."""
        return bool(self._copied or self._torn())

    async def tidy(self) -> None:
        """Brings to an end what was broken off.

        What lies in a torn segment behind what we know, or may be written there yet, was told to
        nobody as stored: it is known to no erasure, and goes with the segment.
        """
        if self._torn():
            await self.remove_empty()
        if torn := self._torn():
            await self.rewrite(torn)
        if self._copied:
            await self._heed_copies()

    async def _copy_out(
        self, name: str, erased: Set[ShardRef], shards: list[tuple[ShardHeader, bytes]]
    ) -> bool:
        """Adds what is alive in a segment to `shards`; False when it was taken away meanwhile.

        What is not copied here goes with the segment.
        """
        segment = self._index.segments.get(name)
        if segment is None:
            return False
        for ref in sorted(segment.live.keys() - erased):
            try:
                data = await self._read_in(name, ref)
            except FileNotFoundError:
                return False
            if self._index.segments.get(name) is not segment:
                return False  # dropped: the segment has another name now
            # What was deleted meanwhile is read in vain, and left out when the copies are written.
            header = None if data is None else ShardHeader.parse(data[:SHARD_HEADER_BYTES])
            if data is not None and header is not None:
                shards.append((header, data))
        return self._index.segments.get(name) is segment

    async def _heed(self) -> frozenset[ShardRef]:
        """Returns what anybody is erasing now."""
        names = await self._ask(self._medium.names(), LISTING)
        lists = set(filter(si.is_erasures, names))
        self._erasures = {name: self._erasures[name] for name in self._erasures.keys() & lists}
        for name in sorted(lists - self._erasures.keys()):
            with suppress(FileNotFoundError):
                data, _ = await self._ask(self._medium.tail(name, 1 << 30))
                self._erasures[name] = frozenset(si.erasures(data))
        return frozenset().union(*self._erasures.values())

    async def announce(self, refs: Sequence[ShardRef]) -> None:
        """Tells everybody that shards are being erased."""
        self._erasing = name = si.erasures_name(self._config.writer, self._next_number)
        self._next_number += 1
        await self._make(name, [si.erasure(ref) for ref in refs])

    def end_erasing(self) -> None:
        """Lets the announcement go after a while."""
        self._erasing = ""

    async def erase_in(self, name: str) -> None:
        """Writes a segment anew, whoever wrote it, without what is announced as erased."""
        segment = self._index.segments.get(name)
        if segment is None:
            return
        if si.owner_of(name) != self._config.writer:
            # There may be more in it than we know of or still want: none of it may go with it.
            is_growing = not segment.is_sealed and self._medium.appends
            try:
                new = await self.take(name) if is_growing else name
                await self._learn(new)
            except FileNotFoundError:
                return  # removed, or another one who erases has taken it: looked for again
            self._index.segments[new].is_sealed = True
            if new != name:
                self._index.drop(name)
            name = new
        await self.rewrite([name])

    async def take(self, name: str) -> str:
        """Makes a segment that its writer is still writing ours; returns its new name."""
        new = si.segment_name(self._config.writer, self._next_number)
        self._next_number += 1
        self._making.add(new)
        try:
            await self._ask(self._medium.take(name, new))
        finally:
            self._making.discard(new)  # if it is done all the same, the next look finds it
        return new

    async def remove(self, name: str) -> None:
        """Removes a segment, whoever wrote it, with what is alive in it."""
        await self._ask(self._medium.delete(name))
        self.abandon(name)
        self.lost += self._index.drop(name)

    async def remove_empty(self) -> None:
        """Removes those of ours in which nothing is alive."""
        for name in self.own():
            segment = self._index.segments.get(name)  # others take some meanwhile
            if segment is None or segment.live or name == (self._open or ("",))[0]:
                continue
            await self.remove(name)

    # ---- deletes ------------------------------------------------------------------------------

    async def write_deletes(self, records: Sequence[bytes]) -> None:
        """Notes what was deleted in our growing list; after a failure in another one."""
        data = b"".join(records)
        growing, self._deletes = self._deletes, None
        if self._medium.appends and growing is not None:
            name, length = growing
            await self._ask(self._medium.append(name, length, [data]), WRITING)
            self._deletes = (name, length + len(data))
            return
        name = si.deletes_name(self._config.writer, self._next_number)
        self._next_number += 1
        await self._make(name, [data])
        self._deletes = (name, len(data))

    async def _rewrite_deletes(self, former: Sequence[str]) -> None:
        """Replaces our lists of deleted shards by one of those that still matter: also of none, for
        it keeps the highest number."""
        needed = self._index.dead_of(self._config.writer)
        await self.write_deletes([si.tombstone(name, offset) for name, offset in needed])
        for name in former:
            await self._ask(self._medium.delete(name))
