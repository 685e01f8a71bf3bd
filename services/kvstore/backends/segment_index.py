"""Where the shards of a shared storage lie: segments of many shards, written once. Pure.

A segment is shards one after the other, each at a page boundary, just as in the files of the
embedded backend. It ends with its headers once more and a trailer, so that one read of its tail
indexes it; a segment that is still growing, or whose writer died, is indexed from the headers in
front of its shards. Nothing else is needed to rebuild the index: the segments are the index.
Source: kvcache-and-balancing.md, section 11.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.kvstore.backends.base import ShardRef
from services.kvstore.backends.verify import ref_of
from services.kvstore.checksums import crc32c
from services.kvstore.formats import ShardHeader
from services.kvstore.placement import PAGE_BYTES, SHARD_HEADER_BYTES

_TRAILER: Final = struct.Struct("<8sII")
_MAGIC: Final = b"DKSEGEND"
TRAILER_BYTES: Final = _TRAILER.size
_TOMBSTONE: Final = struct.Struct("<4sIQ")
_TOMBSTONE_MAGIC: Final = b"DKDL"
_ERASURE: Final = struct.Struct("<4s16sQB3x")
_ERASURE_MAGIC: Final = b"DKER"
TOMBSTONE_BYTES: Final = _TOMBSTONE.size + 4


def segment_name(writer: str, number: int) -> str:
    """Returns the name of a writer's segment."""
    return f"{writer}/seg-{number:08d}"


def deletes_name(writer: str, number: int) -> str:
    """Returns the name of a writer's list of deleted shards."""
    return f"{writer}/del-{number:08d}"


def owner_of(name: str) -> str:
    """Returns the writer of a segment or list."""
    return name.partition("/")[0]


def number_of(name: str) -> int:
    """Returns the number in a name; -1 for a name that is none of ours."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


def is_segment(name: str) -> bool:
    """Returns whether a name is that of a segment."""
    return name.partition("/")[2].startswith("seg-") and number_of(name) >= 0


def is_deletes(name: str) -> bool:
    """Returns whether a name is that of a list of deleted shards."""
    return name.partition("/")[2].startswith("del-") and number_of(name) >= 0


def erasures_name(writer: str, number: int) -> str:
    """Returns the name of a list of shards that a writer is erasing."""
    return f"{writer}/era-{number:08d}"


def is_erasures(name: str) -> bool:
    """Returns whether a name is that of a list of shards that are being erased."""
    return name.partition("/")[2].startswith("era-") and number_of(name) >= 0


def is_ours(name: str) -> bool:
    """Returns whether a name is one that stores give."""
    return is_segment(name) or is_deletes(name) or is_erasures(name)


def padded(num_bytes: int) -> int:
    """Returns the room that so many bytes take in a segment."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def footer(headers: Sequence[bytes]) -> bytes:
    """Returns what ends a segment of these shards."""
    body = b"".join(headers)
    return body + _TRAILER.pack(_MAGIC, len(headers), crc32c(body))


def footer_headers(tail: bytes) -> tuple[list[bytes] | None, int]:
    """Reads the end of a segment.

    Returns (its headers, 0), or (None, bytes of tail needed to read them; 0: there is no footer).
    """
    if len(tail) < TRAILER_BYTES:
        return None, 0
    magic, count, crc = _TRAILER.unpack(tail[-TRAILER_BYTES:])
    if magic != _MAGIC:
        return None, 0
    need = count * SHARD_HEADER_BYTES + TRAILER_BYTES
    if len(tail) < need:
        return None, need
    body = tail[-need:-TRAILER_BYTES]
    if crc32c(body) != crc:
        return None, 0
    return [body[at : at + SHARD_HEADER_BYTES] for at in range(0, len(body), SHARD_HEADER_BYTES)], 0


def tombstone(segment: str, offset: int) -> bytes:
    """Returns the record that the shard at one place of the writer's own segments was deleted."""
    body = _TOMBSTONE.pack(_TOMBSTONE_MAGIC, number_of(segment), offset)
    return body + crc32c(body).to_bytes(4, "little")


def tombstones(writer: str, data: bytes) -> Iterator[tuple[str, int]]:
    """Yields the (segment, offset) that records name, up to the first that is cut or damaged."""
    for at in range(0, len(data) - TOMBSTONE_BYTES + 1, TOMBSTONE_BYTES):
        body = data[at : at + _TOMBSTONE.size]
        crc = int.from_bytes(data[at + _TOMBSTONE.size : at + TOMBSTONE_BYTES], "little")
        magic, number, offset = _TOMBSTONE.unpack(body)
        if magic != _TOMBSTONE_MAGIC or crc32c(body) != crc:
            return
        yield segment_name(writer, number), offset


def erasure(ref: ShardRef) -> bytes:
    """Returns the record that a shard is being erased, wherever it lies."""
    body = _ERASURE.pack(_ERASURE_MAGIC, ref.key16, ref.put_id, ref.shard)
    return body + crc32c(body).to_bytes(4, "little")


def erasures(data: bytes) -> Iterator[ShardRef]:
    """Yields the shards that records name, without those that are damaged."""
    step = _ERASURE.size + 4
    for at in range(0, len(data) - step + 1, step):
        body = data[at : at + _ERASURE.size]
        crc = int.from_bytes(data[at + _ERASURE.size : at + step], "little")
        magic, key16, put_id, shard = _ERASURE.unpack(body)
        if magic == _ERASURE_MAGIC and crc32c(body) == crc:
            yield ShardRef(key16, shard, put_id)


@dataclass(frozen=True)
class Place:
    """Where one shard lies."""

    segment: str
    offset: int
    num_bytes: int  # header and data


@dataclass
class Segment:
    """What is known of one segment."""

    num_bytes: int = 0  # indexed so far
    is_sealed: bool = False
    newest_s: int = 0  # when its youngest shard was made
    # All that its writer has not deleted as far as we know, also what is only left out here.
    live: dict[ShardRef, Place] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)  # offsets of deleted shards, their bytes there
    live_bytes: int = 0


class SegmentIndex:
    """Every shard that is alive, and how much of each segment still is.

    A shard may lie in several segments: two stores wrote one anew at a time, or a crash came
    between a copy and the end of the first. Each counts as alive where it lies: who removes his
    copy because another one has one too must be sure of that other, and nobody can.
    """

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}
        self._places: dict[ShardRef, Place] = {}  # where a shard is read
        self._twins: dict[ShardRef, list[Place]] = {}  # where else it lies
        self.buried: set[ShardRef] | None = None  # while somebody wants to know

    def __len__(self) -> int:
        return len(self._places)

    def place(self, ref: ShardRef) -> Place | None:
        """Returns where a live shard is read."""
        return self._places.get(ref)

    def places(self, ref: ShardRef) -> list[Place]:
        """Returns everywhere that a live shard lies."""
        place = self._places.get(ref)
        return [] if place is None else [place, *self._twins.get(ref, ())]

    def refs(self) -> Iterable[ShardRef]:
        """Returns all live shards."""
        return self._places.keys()

    def add(self, name: str, offset: int, header: ShardHeader) -> bool:
        """Takes up a shard of a segment, to be read from there; False when it is dead."""
        segment = self.segments.setdefault(name, Segment())
        num_bytes = SHARD_HEADER_BYTES + header.shard_bytes
        segment.num_bytes = max(segment.num_bytes, offset + padded(num_bytes))
        segment.newest_s = max(segment.newest_s, header.created_s)
        ref = ref_of(header)
        if offset in segment.dead:
            return False
        others = [place for place in self.places(ref) if place.segment != name]
        if ref not in segment.live:
            segment.live_bytes += padded(num_bytes)
        segment.live[ref] = place = Place(name, offset, num_bytes)
        self._set_places(ref, [place, *others])
        return True

    def add_all(self, name: str, headers: Iterable[bytes]) -> list[bytes]:
        """Takes up shards that follow one another from the segment's start; returns the headers
        of those that were not known."""
        offset, new = 0, []
        for raw in headers:
            header = ShardHeader.parse(raw)
            if header is None:
                break
            known = self.holders([ref_of(header)])
            if name not in known and self.add(name, offset, header):
                new += [] if known else [raw]
            offset += padded(SHARD_HEADER_BYTES + header.shard_bytes)
        return new

    def forget_in(self, name: str, ref: ShardRef) -> None:
        """Leaves a shard out of one segment, and only there."""
        segment = self.segments[name]
        place = segment.live.pop(ref, None)
        if place is not None:
            segment.live_bytes -= padded(place.num_bytes)
        self._set_places(ref, [p for p in self.places(ref) if p.segment != name])

    def bury(self, ref: ShardRef, writer: str) -> list[Place]:
        """Deletes a shard from a writer's segments for as long as they are there; returns where it
        was in them. In those of others it is only left out: found again, it is back."""
        own = [place for place in self.places(ref) if owner_of(place.segment) == writer]
        for place in own:
            self.segments[place.segment].dead.add(place.offset)
            self.forget_in(place.segment, ref)
        self._set_places(ref, [])
        if own and self.buried is not None:
            self.buried.add(ref)
        return own

    def bury_at(self, name: str, offset: int) -> None:
        """Deletes what lies at one place of a segment that is not indexed yet."""
        self.segments.setdefault(name, Segment()).dead.add(offset)

    def drop(self, name: str) -> list[ShardRef]:
        """Forgets a segment that is gone; returns the shards that were alive in it."""
        segment = self.segments.pop(name, None)
        if segment is None:
            return []
        gone = []
        for ref in sorted(segment.live):
            places = self.places(ref)
            others = [place for place in places if place.segment != name]
            self._set_places(ref, others)
            gone += [ref] if places and not others else []
        return gone

    def holders(self, refs: Iterable[ShardRef]) -> set[str]:
        """Returns the segments in which any of the shards lies, once or again."""
        return {place.segment for ref in refs for place in self.places(ref)}

    def dead_of(self, writer: str) -> list[tuple[str, int]]:
        """Returns where one writer's deleted shards lie whose bytes are still there."""
        return [
            (name, offset)
            for name, segment in sorted(self.segments.items())
            if owner_of(name) == writer
            for offset in sorted(segment.dead)
        ]

    def _set_places(self, ref: ShardRef, places: list[Place]) -> None:
        self._places.pop(ref, None)
        self._twins.pop(ref, None)
        if places:
            self._places[ref] = places[0]
        if len(places) > 1:
            self._twins[ref] = places[1:]
