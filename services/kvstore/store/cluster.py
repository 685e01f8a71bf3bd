"""Blocks erasure-coded over storage nodes: written to all members of their group, read from any k.

Reads ask k + 1 members and take the first k good shards of the put that the commit record names;
shards of two puts are never mixed. Writes wait for every member that is up, at most
`put_timeout_s`, then commit with what is there: k + 1 shards or more, or exactly k as degraded.
Source: kvcache-and-balancing.md, sections 4, 6 and 7.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pelagos.kvstore.v1 import storage_pb2 as pb

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure
from services.common.rpc_client import call
from services.kvstore.backends.base import PutStatus, ReadStatus, ShardRef, StorageAway
from services.kvstore.backends.verify import check_object
from services.kvstore.checksums import crc32c
from services.kvstore.erasure import join
from services.kvstore.formats import (
    FLAG_APPROXIMATE,
    ObjectHeader,
    Record,
    ShardHeader,
    State,
)
from services.kvstore.index_table import EPOCH_S, fields_of
from services.kvstore.placement import OBJECT_HEADER_BYTES, SHARD_HEADER_BYTES
from services.kvstore.seal import Sealer
from services.kvstore.storage.hedge import first_wave
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links, ref_to_proto
from services.kvstore.storage.meta import LogPart
from services.kvstore.storage.pgmap import PgMap
from services.kvstore.store.blocks import (
    BlockRead,
    NewBlock,
    Outcome,
    Room,
    StoreStat,
    cut_shards,
    sealed,
    unseal,
)
from services.kvstore.store.cluster_index import ClusterIndex

log = logging.getLogger(__name__)

_COMMIT_ATTEMPTS: Final = 3
_PUTS_AT_ONCE: Final = 256
_EVICTIONS_AT_ONCE: Final = 4_096


@dataclass(frozen=True)
class ClusterConfig:
    """How reads and writes over nodes behave."""

    payload_bytes: int = 114_688
    hedge_s: float = 0.002  # floor of the wait before the kept-back shard is asked for too
    read_timeout_s: float = 0.05
    put_timeout_s: float = 0.2
    commit_timeout_s: float = 2.0
    durable: bool = False


@dataclass
class ClusterCounts:
    """What happened since the start."""

    reads: int = 0
    hedged: int = 0
    shared_reads: int = 0
    bad_shards: int = 0
    failed_reads: int = 0


@dataclass
class _Read:
    """The shards of one block as they come."""

    good: dict[int, bytes] = field(default_factory=dict)
    bad: list[int] = field(default_factory=list)  # missing or damaged
    num_damaged: int = 0
    unreachable: int = 0


class ClusterBlocks:
    """A BlockStore over storage nodes."""

    def __init__(
        self,
        view: MapView,
        links: Links,
        index: ClusterIndex,
        config: ClusterConfig,
        clock: Clock = SYSTEM_CLOCK,
        sealer: Sealer | None = None,
    ) -> None:
        self._sealer = sealer
        self._view = view
        self._links = links
        self._index = index
        self._config = config
        self._clock = clock
        # Of puts that wait for their commit: which shards were taken, under which map.
        self._written: dict[int, tuple[int, PgMap]] = {}
        self._reading: dict[bytes, asyncio.Task[tuple[bytes | None, ReadStatus]]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._recent_s: list[float] = []
        self.counts = ClusterCounts()
        self.num_corrupt = 0

    # ---- reads --------------------------------------------------------------------------------

    def block_bytes(self, key: bytes) -> int | None:
        """Returns about how long a stored block is."""
        return None if self._index.find(key[:16]) is None else self._config.payload_bytes

    async def get(self, key: bytes, layout: bytes, room: Room) -> BlockRead:
        """Reads and checks a block. Reads of one block at one time share one."""
        read = self._reading.get(key)
        if read is None:
            read = asyncio.create_task(self._read_object(key, layout))
            self._reading[key] = read
            read.add_done_callback(lambda _: self._reading.pop(key, None))
        else:
            self.counts.shared_reads += 1
        data, status = await asyncio.shield(read)
        if data is None:
            return BlockRead(status)
        header = ObjectHeader.parse(data[:OBJECT_HEADER_BYTES])
        assert header is not None
        # A shared read was checked for the first asker's layout.
        if header.layout != layout:
            return BlockRead(ReadStatus.WRONG_LAYOUT)
        payload = memoryview(data)[OBJECT_HEADER_BYTES:]
        out = room(len(payload))
        if out is None:
            return BlockRead(ReadStatus.WRONG_LAYOUT)
        memoryview(out)[:] = payload
        if unseal(self._sealer, data[:OBJECT_HEADER_BYTES], out) is not ReadStatus.OK:
            # What nobody here can open is evicted, or it would keep its key for days.
            self._spawn(self._evict([key[:16]], "sealed"))
            return BlockRead(ReadStatus.SEALED)
        return BlockRead(ReadStatus.OK, len(payload), bool(header.flags & FLAG_APPROXIMATE))

    async def _read_object(self, key: bytes, layout: bytes) -> tuple[bytes | None, ReadStatus]:
        pgmap, fields = self._view.pgmap, self._index.find(key[:16])
        if pgmap is None or fields is None:
            return None, ReadStatus.ABSENT
        self.counts.reads += 1
        put_id, bitmap = fields[0], fields[4]
        bad: list[int] = []
        status = ReadStatus.AWAY
        # A stripe that fails its check is tried once more without the shards used first; so is one
        # whose nodes broke the connection, for that is told at once and mended as fast.
        avoid: frozenset[int] = frozenset()
        again_until_s = self._clock.now_s() + self._config.read_timeout_s / 2
        for _ in range(2):
            read = await self._read_shards(pgmap, key[:16], put_id, bitmap, avoid)
            bad += read.bad
            if len(read.good) < pgmap.profile.k:
                # Nodes that are away or late say nothing of the block: that is no damage. Nor is
                # one that was evicted, or replaced, since we heard of it.
                gone = ReadStatus.DATA if read.num_damaged else ReadStatus.ABSENT
                status = ReadStatus.AWAY if read.unreachable else gone
                if status is ReadStatus.AWAY and self._clock.now_s() < again_until_s:
                    continue
                break
            data, status = await asyncio.to_thread(_assemble, read.good, pgmap, key, layout)
            if status in (ReadStatus.OK, ReadStatus.WRONG_KEY, ReadStatus.WRONG_LAYOUT):
                self._report(key[:16], put_id, bad, pgmap)
                return data, status
            avoid = frozenset(sorted(read.good)[:1])
        self.counts.failed_reads += 1
        log.warning(
            "block not read",
            extra={
                "num_known": bitmap.bit_count(),
                "num_up": len(self._view.up()),
                "num_good": len(read.good),
                "num_bad": len(bad),
                "num_unreachable": read.unreachable,
                "why": status.name,
            },
        )
        self.num_corrupt += status is ReadStatus.DATA
        self._report(key[:16], put_id, bad, pgmap)
        return None, status

    async def _read_shards(
        self, pgmap: PgMap, key16: bytes, put_id: int, bitmap: int, avoid: frozenset[int]
    ) -> _Read:
        """Returns k good shards of the put, or what there was."""
        links = {}
        for shard in range(pgmap.profile.num_shards):
            link = self._links.get(pgmap.node_of(key16, shard))
            if bitmap >> shard & 1 and link is not None and shard not in avoid:
                links[shard] = link
        read = _Read()
        if len(links) < pgmap.profile.k:
            read.unreachable = pgmap.profile.num_shards - len(links)
            return read
        latency_s = {shard: link.latency_s for shard, link in links.items()}
        seed = int.from_bytes(secrets.token_bytes(4), "little")
        wave, kept = first_wave(list(links), latency_s, pgmap.profile, seed)
        started_s = self._clock.now_s()
        waiting = {links[j].get(ShardRef(key16, j, put_id)): j for j in wave}
        hedge_at_s = started_s + self._hedge_s()
        end_s = started_s + self._config.read_timeout_s
        while len(read.good) < pgmap.profile.k and (waiting or kept):
            now_s = self._clock.now_s()
            # A shard that came bad is replaced at once; a late one after the hedge.
            if kept and (len(read.good) + len(waiting) < pgmap.profile.k or now_s >= hedge_at_s):
                self.counts.hedged += 1
                waiting |= {links[j].get(ShardRef(key16, j, put_id)): j for j in kept}
                kept = []
            if now_s >= end_s:
                break
            until_s = min(end_s, hedge_at_s) if kept else end_s
            done, _ = await asyncio.wait(
                waiting, timeout=max(until_s - now_s, 0), return_when=asyncio.FIRST_COMPLETED
            )
            for answer in done:
                shard = waiting.pop(answer)
                data, status = answer.result()
                if data is not None and _is_of(data, key16, shard, put_id):
                    read.good[shard] = data
                elif status is ReadStatus.IO:
                    read.unreachable += 1
                else:
                    read.bad.append(shard)
                    read.num_damaged += status is not ReadStatus.ABSENT
        self._recent_s = [*self._recent_s[-199:], self._clock.now_s() - started_s]
        read.unreachable += len(waiting)
        self.counts.bad_shards += len(read.bad)
        return read

    def _hedge_s(self) -> float:
        """Returns the 95th percentile of the last reads, at least the floor."""
        recent = sorted(self._recent_s)
        late = recent[int(len(recent) * 0.95)] if recent else 0.0
        return min(max(late, self._config.hedge_s), self._config.read_timeout_s / 2)

    def _report(self, key16: bytes, put_id: int, bad: Sequence[int], pgmap: PgMap) -> None:
        """Tells the primary of missing or damaged shards, after the read."""
        for shard in set(bad):
            request = pb.ReportShardRequest(
                shard=ref_to_proto(ShardRef(key16, shard, put_id)), reason="absent or corrupt"
            )
            self._spawn(self._tell_primary(pgmap, key16, "ReportShard", request))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tell_primary(self, pgmap: PgMap, key16: bytes, method: str, request: Any) -> Any:
        """Returns the primary's answer, or None when there is none."""
        primary = pgmap.primary_of(pgmap.group_of(key16), self._view.up())
        link = self._links.get(primary) if primary is not None else None
        if link is None:
            return None
        try:
            timeout_s = self._config.commit_timeout_s
            return await call(getattr(link.meta, method), request, timeout_s=timeout_s)
        except Failure:
            return None

    @property
    def index(self) -> ClusterIndex:
        """Returns what all nodes have told."""
        return self._index

    async def read_stored(self, key16: bytes) -> bytes | None:
        """Returns the object in force under an index key as it is stored, header and payload,
        checked against what its own header says; for tools. None when it cannot be had."""
        pgmap, fields = self._view.pgmap, self._index.find(key16)
        if pgmap is None or fields is None:
            return None
        read = await self._read_shards(pgmap, key16, fields[0], fields[4], frozenset())
        if len(read.good) < pgmap.profile.k:
            return None
        data = await asyncio.to_thread(_joined, read.good, pgmap)
        header = ObjectHeader.parse((data or b"")[:OBJECT_HEADER_BYTES])
        if data is None or header is None or header.key[:16] != key16:
            return None
        payload = memoryview(data)[OBJECT_HEADER_BYTES:]
        head = data[:OBJECT_HEADER_BYTES]
        is_right = check_object(head, payload, header.key, header.layout) is ReadStatus.OK
        return data if is_right else None

    # ---- writes -------------------------------------------------------------------------------

    def is_stored(self, block: NewBlock) -> bool:
        """Returns whether a put would change nothing."""
        fields = self._index.find(block.key[:16])
        if fields is None:
            return False
        return bool(block.flags & FLAG_APPROXIMATE) or not fields[7] & FLAG_APPROXIMATE

    async def write(self, block: NewBlock) -> int | None:
        """Writes the shards; None with fewer than k of them."""
        pgmap = self._view.pgmap
        if pgmap is None:
            return None
        put_id = secrets.randbits(64)
        stored = sealed(self._sealer, block)
        shards = await asyncio.to_thread(
            cut_shards, stored, put_id, self._clock.wall_s(), pgmap.profile
        )
        key16 = block.key[:16]
        waiting: dict[asyncio.Future[PutStatus | None], int] = {}
        for number, shard in enumerate(shards):
            link = self._links.get(pgmap.node_of(key16, number))
            if link is not None:
                waiting[link.put(shard, pgmap.epoch, self._config.durable)] = number
        bitmap = 0
        if len(waiting) >= pgmap.profile.k:
            done, _ = await asyncio.wait(waiting, timeout=self._config.put_timeout_s)
            if len(done) < pgmap.profile.k:
                # Slow as a whole is no reason to lose the block; a lone straggler is.
                done, _ = await asyncio.wait(waiting, timeout=self._config.commit_timeout_s)
            for answer in done:
                if answer.result() in (PutStatus.BUFFERED, PutStatus.DURABLE):
                    bitmap |= 1 << waiting[answer]
        if bitmap.bit_count() < pgmap.profile.k:
            await self.take_back(block, put_id)
            return None
        self._written[put_id] = bitmap, pgmap
        return put_id

    async def commit(self, block: NewBlock, put_id: int) -> Outcome:
        """Asks the group's primary to make the block visible."""
        now_s = int(self._clock.wall_s())
        bitmap, written_under = self._written.pop(put_id)
        key16 = block.key[:16]
        for attempt in range(_COMMIT_ATTEMPTS):
            pgmap = self._view.pgmap
            assert pgmap is not None
            record = Record(
                put_id=put_id,
                block_index=block.block_index,
                created_s=now_s,
                access_epoch=now_s // EPOCH_S,
                # A member that was replaced since has taken its shard along.
                shards=bitmap & ~_moved(key16, written_under, pgmap),
                state=State.COMMITTED,
                ttl_class=block.ttl_class,
                flags=block.flags,
            )
            group = pgmap.group_of(key16)
            # The parent is of another group, and PUT has seen it committed: none is named here.
            request = pb.CommitRequest(
                pg=group,
                epoch=pgmap.epoch,
                object=pb.ObjectRecord(key16=key16, record=record.pack(group), key=block.key),
            )
            answer = await self._tell_primary(pgmap, key16, "Commit", request)
            if answer is None:
                if attempt + 1 < _COMMIT_ATTEMPTS:
                    await self._clock.sleep(0.1 * 2**attempt)
                continue
            if answer.status in (pb.COMMIT_STATUS_COMMITTED, pb.COMMIT_STATUS_DEGRADED):
                self._index.note(key16, fields_of(record))
                return Outcome.COMMITTED
            await self._free(key16, put_id)
            exists = answer.status == pb.COMMIT_STATUS_EXISTS
            return Outcome.EXISTS if exists else Outcome.DROPPED
        # Whether it was committed is not known. The shards stay: a commit that did happen names
        # them, and if none did the orphan pass frees them.
        return Outcome.DROPPED

    async def take_back(self, block: NewBlock, put_id: int) -> None:
        """Frees the shards of a write that will not be committed; unless a primary that took its
        group over just now has made a block of them, for others may have been told of it."""
        self._written.pop(put_id, None)
        pgmap, key16 = self._view.pgmap, block.key[:16]
        if pgmap is None:
            return
        # In this order: from the first on, no audit makes a block of it.
        ref = ref_to_proto(ShardRef(key16, 0, put_id))
        withdrawn = pb.ReportShardRequest(shard=ref, finding=pb.SHARD_FINDING_WITHDRAWN)
        await self._tell_primary(pgmap, key16, "ReportShard", withdrawn)
        look_up = pb.LookupRequest(keys16=key16)
        answer = await self._tell_primary(pgmap, key16, "Lookup", look_up)
        found = [Record.parse(each.record) for each in answer.objects] if answer is not None else []
        if not any(record is not None and record.put_id == put_id for record in found):
            await self._free(key16, put_id)

    async def _free(self, key16: bytes, put_id: int) -> None:
        """Frees the shards of a put on all members."""
        pgmap = self._view.pgmap
        if pgmap is None:
            return
        by_node: dict[str, list[ShardRef]] = defaultdict(list)
        for shard in range(pgmap.profile.num_shards):
            by_node[pgmap.node_of(key16, shard)].append(ShardRef(key16, shard, put_id))
        links = [(self._links.get(node), refs) for node, refs in by_node.items()]
        await asyncio.gather(
            *(link.delete(refs, pgmap.epoch) for link, refs in links if link is not None)
        )

    # ---- the rest -----------------------------------------------------------------------------

    def exists(self, keys: bytes) -> bytes:
        """Returns a byte per key, 1 when stored."""
        return bytes(
            self._index.find(keys[at : at + 16]) is not None for at in range(0, len(keys), 32)
        )

    def index_of(self, key: bytes) -> int | None:
        """Returns the number of a stored block in its chain."""
        fields = self._index.find(key[:16])
        return None if fields is None else fields[1]

    def _by_primary(self, keys16: Sequence[bytes]) -> dict[str, list[bytes]]:
        pgmap = self._view.pgmap
        by_node: dict[str, list[bytes]] = defaultdict(list)
        if pgmap is not None:
            up = self._view.up()
            for key16 in keys16:
                primary = pgmap.primary_of(pgmap.group_of(key16), up)
                if primary is not None:
                    by_node[primary].append(key16)
        return by_node

    async def _ask_primaries(self, keys16: Sequence[bytes], method: str, make: Any) -> list[Any]:
        """Returns an answer of each primary, None of one that gave none."""

        async def ask(node: str, keys: list[bytes]) -> Any:
            link = self._links.get(node)
            if link is None:
                return None
            try:
                return await call(getattr(link.meta, method), make(b"".join(keys)), timeout_s=5.0)
            except Failure:
                return None

        by_node = self._by_primary(keys16)
        return await asyncio.gather(*(ask(node, keys) for node, keys in by_node.items()))

    async def touch(self, keys: bytes, ttl_class: int) -> int:
        """Renews access of blocks, one message a primary."""
        keys16 = [keys[at : at + 16] for at in range(0, len(keys), 32)]
        answers = await self._ask_primaries(
            keys16,
            "TouchObjects",
            lambda some: pb.TouchObjectsRequest(keys16=some, ttl_class=ttl_class),
        )
        return sum(answer.touched for answer in answers if answer is not None)

    async def pin(self, pin_id: str, keys16: bytes, ttl_s: float) -> int:
        """Holds blocks against eviction, one message a primary."""
        names = [keys16[at : at + 16] for at in range(0, len(keys16), 16)]
        ttl_ms = int(ttl_s * 1000)
        answers = await self._ask_primaries(
            names,
            "PinObjects",
            lambda some: pb.PinObjectsRequest(pin_id=pin_id, keys16=some, ttl_ms=ttl_ms),
        )
        return sum(answer.pinned for answer in answers if answer is not None)

    async def renew_pin(self, pin_id: str) -> None:
        """Pins lapse here: reads of a hit begin long before that."""

    def follow(
        self, log_id: str, from_seq: int, heartbeat_s: float
    ) -> AsyncGenerator[LogPart, None]:
        """Yields the log of all nodes, merged, for ever."""
        return self._index.merged.follow(log_id, from_seq, heartbeat_s)

    def wake_followers(self) -> None:
        """Makes every follower of the log come round at once."""
        self._index.merged.wake_followers()

    async def delete_tenant(self, tag: bytes) -> int:
        """Erases a tenant's blocks from all nodes that are up, puts that were never committed too;
        returns how many blocks went.

        Raises: StorageAway when some may be left: a node that is up did not answer, or what is away
            could make a block whole of which nobody can tell whose it is.
        """
        pgmap = self._view.pgmap
        if pgmap is None:
            raise StorageAway("there is no placement map yet")
        shards, misplaced, is_sure = await self._all_shards(pgmap)
        puts = sorted(shards)
        going: list[tuple[bytes, int]] = []
        nameless: list[tuple[bytes, int]] = []
        for at in range(0, len(puts), _PUTS_AT_ONCE):
            part = puts[at : at + _PUTS_AT_ONCE]
            tags = await asyncio.gather(*(self._tag_of(pgmap, put, shards[put]) for put in part))
            going += [put for put, (found, _) in zip(part, tags, strict=True) if found == tag]
            nameless += [put for put, (found, _) in zip(part, tags, strict=True) if found is None]
            is_sure = is_sure and all(is_known for _, is_known in tags)
        keys16 = {key16 for key16, _ in going}
        # Too few shards to tell whose they are, but of a key that is the tenant's.
        going += [put for put in nameless if put[0] in keys16]
        count, all_answered = await self._evict(sorted(keys16), "tenant")
        # What no record names any more, or never did: a put that lost, or was broken off.
        by_node: dict[str, list[ShardRef]] = defaultdict(list)
        for key16, put_id in going:
            for shard in range(pgmap.profile.num_shards):
                by_node[pgmap.node_of(key16, shard)].append(ShardRef(key16, shard, put_id))
        all_going = set(going)
        for node, refs in misplaced.items():
            by_node[node] += [ref for ref in refs if (ref.key16, ref.put_id) in all_going]
        links = ((self._links.get(node), refs) for node, refs in by_node.items())
        erased = await asyncio.gather(
            *(link.erase(refs, pgmap.epoch) for link, refs in links if link)
        )
        if not (is_sure and all_answered and all(erased)):
            raise StorageAway("not every storage node could be asked")
        return count

    async def _all_shards(
        self, pgmap: PgMap
    ) -> tuple[dict[tuple[bytes, int], int], dict[str, list[ShardRef]], bool]:
        """Returns the shards of every put as bitmaps, those that the map has elsewhere by node,
        and whether that is all that could be a block."""
        shards: dict[tuple[bytes, int], int] = defaultdict(int)
        misplaced: dict[str, list[ShardRef]] = defaultdict(list)
        up = self._view.up()
        num_away = max(sum(node not in up for node in group) for group in pgmap.groups)
        is_all = num_away < pgmap.profile.k
        for node in sorted(up):
            link = self._links.get(node)
            headers = await link.headers() if link is not None else None
            is_all = is_all and headers is not None
            for header in map(ShardHeader.parse, headers or ()):
                if header is None:
                    continue
                shards[header.key16, header.put_id] |= 1 << header.shard
                if pgmap.node_of(header.key16, header.shard) != node:
                    ref = ShardRef(header.key16, header.shard, header.put_id)
                    misplaced[node].append(ref)
        return shards, misplaced, is_all

    async def _tag_of(
        self, pgmap: PgMap, put: tuple[bytes, int], bitmap: int
    ) -> tuple[bytes | None, bool]:
        """Returns whose block a put is, None when nobody could read it, and whether that is all
        that will ever be known. Its first shard begins with the object's header; without that one
        the block is put together."""
        key16, put_id = put
        first = self._links.get(pgmap.node_of(key16, 0))
        data: bytes | None = None
        is_known = True
        if bitmap & 1 and first is not None:
            shard, _ = await first.get(ShardRef(key16, 0, put_id))
            data = None if shard is None else shard[SHARD_HEADER_BYTES:]
        if data is None:
            read = await self._read_shards(pgmap, key16, put_id, bitmap, frozenset())
            if len(read.good) >= pgmap.profile.k:
                data = await asyncio.to_thread(_joined, read.good, pgmap)
            up = self._view.up()
            num_away = sum(node not in up for node in pgmap.members_of(key16))
            # Evicted since it was listed is known enough; late or damaged is not.
            could_be_read = bitmap.bit_count() + num_away >= pgmap.profile.k
            is_known = not could_be_read or not (read.unreachable or read.num_damaged)
            self._report(key16, put_id, read.bad if read.num_damaged else [], pgmap)
        header = ObjectHeader.parse((data or b"")[:OBJECT_HEADER_BYTES])
        return (None, is_known) if header is None else (header.tenant_tag, True)

    async def _evict(self, keys16: list[bytes], reason: str) -> tuple[int, bool]:
        """Asks the primaries to let blocks go; returns how many went, and whether all answered."""
        count, all_answered = 0, True
        for at in range(0, len(keys16), _EVICTIONS_AT_ONCE):
            answers = await self._ask_primaries(
                keys16[at : at + _EVICTIONS_AT_ONCE],
                "EvictObjects",
                lambda some: pb.EvictObjectsRequest(keys16=some, reason=reason),
            )
            count += sum(answer.evicted for answer in answers if answer is not None)
            all_answered = all_answered and None not in answers
        return count, all_answered

    async def stat(self) -> StoreStat:
        """Returns the counts over all nodes that answer."""
        used = capacity = 0
        for node in self._view.up():
            link = self._links.get(node)
            if link is None:
                continue
            try:
                answer = await call(link.storage.StatNode, pb.StatNodeRequest(), timeout_s=2.0)
            except Failure:
                continue
            used, capacity = used + answer.used, capacity + answer.slots
        return StoreStat(len(self._index), used, capacity, "nodes", 0)

    async def close(self) -> None:
        """Ends what is on its way."""
        for task in [*self._background, *self._reading.values()]:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)


def _moved(key16: bytes, old: PgMap, new: PgMap) -> int:
    """Returns which shards of a key have another place in the new map, as a bitmap."""
    shards = range(new.profile.num_shards)
    return sum(1 << j for j in shards if old.node_of(key16, j) != new.node_of(key16, j))


def _is_of(data: bytes, key16: bytes, shard: int, put_id: int) -> bool:
    """Returns whether a shard is the one asked for; the node has checked it, the wire may lie."""
    header = ShardHeader.parse(data[:SHARD_HEADER_BYTES])
    return (
        header is not None
        and (header.key16, header.shard, header.put_id) == (key16, shard, put_id)
        and crc32c(memoryview(data)[SHARD_HEADER_BYTES:]) == header.data_crc
    )


def _joined(shards: dict[int, bytes], pgmap: PgMap) -> bytes | None:
    """Returns the object that good shards make, not yet checked; for a thread."""
    first = ShardHeader.parse(next(iter(shards.values()))[:SHARD_HEADER_BYTES])
    assert first is not None
    parts = {j: memoryview(shard)[SHARD_HEADER_BYTES:] for j, shard in shards.items()}
    return join(parts, first.object_bytes, pgmap.profile)


def _assemble(
    shards: dict[int, bytes], pgmap: PgMap, key: bytes, layout: bytes
) -> tuple[bytes | None, ReadStatus]:
    """Returns the object, header and payload, checked in full; for a thread."""
    data = _joined(shards, pgmap)
    if data is None or len(data) <= OBJECT_HEADER_BYTES:
        return None, ReadStatus.DATA
    header, payload = data[:OBJECT_HEADER_BYTES], memoryview(data)[OBJECT_HEADER_BYTES:]
    status = check_object(header, payload, key, layout)
    return (data, status) if status is ReadStatus.OK else (None, status)
