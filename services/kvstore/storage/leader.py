"""META half of a storage node: the records of the groups it leads, their repair and eviction.

Taking a group over means asking every member which shards it has; a put with k shards or more is a
block. So a lost primary loses order of access at most, and nothing is replicated for it. What the
members do not have but should is repaired from the others, newest access first.
Source: kvcache-and-balancing.md, sections 7 to 9.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from services.common.clock import SYSTEM_CLOCK, Clock
from services.kvstore.backends.base import PutStatus, ReadStatus, ShardRef
from services.kvstore.formats import Record, ShardHeader, State
from services.kvstore.placement import SHARD_HEADER_BYTES
from services.kvstore.storage.handover import HandOver
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links
from services.kvstore.storage.meta import CommitOutcome, Meta
from services.kvstore.storage.pgmap import PgMap
from services.kvstore.storage.repairs import RepairQueue
from services.kvstore.storage.stripes import (
    bitmap_in_place,
    bitmap_of,
    fits,
    num_distinct,
    num_shards_in,
    rebuilt_shards,
    record_of,
    state_of,
)

log = logging.getLogger(__name__)

# A put that is still on its way has shards and no record yet.
_LEAVINGS_AGE_S: Final = 600
_RETRY_AUDIT_S: Final = 1.0
_ALL_EPOCHS: Final = (1 << 32) - 1
_MAX_WITHDRAWN: Final = 16_384


class CommitStatus(enum.Enum):
    """How a commit ended at the primary."""

    COMMITTED = "committed"
    DEGRADED = "degraded"
    EXISTS = "exists"
    REFUSED = "refused"


@dataclass
class Counts:
    """What the leader has done since the start."""

    repaired: int = 0
    dropped: int = 0
    taken_over: int = 0
    bad_reported: int = 0


class Leader:
    """The groups that this node leads now."""

    def __init__(
        self,
        node: str,
        meta: Meta,
        view: MapView,
        links: Links,
        *,
        repair_bytes_per_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._node = node
        self._view = view
        self._links = links
        self._clock = clock
        self.meta = meta
        self.led: frozenset[int] = frozenset()  # groups that are ready to serve
        # Groups that records may be of; at the start the log may hold any.
        self._held: frozenset[int] = frozenset(range(1 << 16))
        self._known_up: dict[str, str] = {}  # node -> its life
        self._known_epoch = 0
        self._changed = asyncio.Event()
        # Members that are up but did not say what they have: asked again until they do.
        self._silent: set[str] = set()
        self._is_auditing = False
        self._committed_meanwhile: set[bytes] = set()
        self._withdrawn: dict[int, None] = {}  # puts that are taken back, the latest last
        self.handover = HandOver(node, meta, view, links, clock)
        self.repairs = RepairQueue(self._repair_one, self._age, repair_bytes_per_s, clock)
        self.counts = Counts()

    # ---- leading ------------------------------------------------------------------------------

    def poke(self) -> None:
        """Says that the map or the members may have changed."""
        self._changed.set()

    @property
    def knows_all(self) -> bool:
        """Returns whether every member that is up has told what it has, and all of it is taken."""
        return not (self._changed.is_set() or self._is_auditing or self._silent)

    def leads(self, key16: bytes) -> bool:
        """Returns whether this node answers for a key now."""
        pgmap = self._view.pgmap
        return pgmap is not None and pgmap.group_of(key16) in self.led

    async def run(self) -> None:
        """Follows map and members for ever: takes groups over, gives them up, audits members."""
        while True:
            try:
                async with asyncio.timeout(_RETRY_AUDIT_S if self._silent else None):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            pgmap = self._view.pgmap
            if pgmap is None:
                continue
            up = self._view.lives()
            if self._node not in up:
                self.led = frozenset()  # our lease is gone: others may lead; the records are kept
                continue
            self._is_auditing = True
            try:
                await self._follow(pgmap, up)
            finally:
                self._is_auditing = False
                self._committed_meanwhile.clear()

    async def _follow(self, pgmap: PgMap, up: dict[str, str]) -> None:
        """Leads what this node should lead by the map, with what the members have.

        Args:
            up: the life of each node that is there.
        """
        wanted = pgmap.led_by(self._node, up)
        self._give_up(self._held - wanted, pgmap)
        taken = wanted - self.led
        is_news = bool(taken) or pgmap.epoch != self._known_epoch
        back = {node for node, life in up.items() if self._known_up.get(node) != life}
        self.led = self.led & wanted
        knows_all, silent = await self._audit(pgmap, up if is_news else back, wanted)
        if not knows_all and not is_news:
            # A member has shards of a block that no record names: do the others make it whole?
            _, more = await self._audit(pgmap, up, wanted)
            silent |= more
        self.led = self._held = wanted
        self.counts.taken_over += len(taken)
        # A member that did not answer counts as not seen, or what only it has stays unknown.
        self._silent = silent
        self._known_up = {node: life for node, life in up.items() if node not in silent}
        self._known_epoch = pgmap.epoch

    def _give_up(self, groups: Collection[int], pgmap: PgMap) -> None:
        if not groups:
            return
        going = [key16 for key16 in self._keys() if pgmap.group_of(key16) in groups]
        self.handover.give_up(groups, pgmap)
        self.meta.remove(going)
        for key16 in going:
            self.repairs.forget(key16)

    def _keys(self) -> list[bytes]:
        keys: list[bytes] = []
        cursor: int | None = 0
        while cursor is not None:
            entries, cursor = self.meta.table.snapshot(cursor, 8192, 0)
            keys += [entries[at + 12 : at + 28] for at in range(0, len(entries), 80)]
        return keys

    async def _audit(
        self, pgmap: PgMap, nodes: Collection[str], groups: frozenset[int]
    ) -> tuple[bool, set[str]]:
        """Compares the records of the groups with what these nodes have; returns whether every
        shard they have belongs to a block with a record, and who did not answer."""
        if not nodes or not groups:
            return True, set()
        names = sorted(nodes)
        answers = await asyncio.gather(*(self._headers(node) for node in names))
        found: dict[bytes, dict[int, list[tuple[ShardHeader, str]]]] = defaultdict(dict)
        asked: set[str] = set()
        for node, headers in zip(names, answers, strict=True):
            if headers is None:
                continue
            asked.add(node)
            for raw in headers:
                header = ShardHeader.parse(raw)
                if header is None or not fits(header, pgmap):
                    continue
                if pgmap.group_of(header.key16) not in groups:
                    continue
                # Also elsewhere than the map says: a node that was replaced and is back may have
                # what its successor was not given yet. Once it is, the orphan pass frees it.
                found[header.key16].setdefault(header.put_id, []).append((header, node))
        leavings: list[tuple[ShardHeader, str]] = []
        for key16 in {*found, *(k for k in self._keys() if pgmap.group_of(k) in groups)}:
            # What was committed while the members answered may be in none of their answers.
            if key16 not in self._committed_meanwhile:
                self._audit_block(pgmap, key16, found.get(key16, {}), asked)
                leavings += self._leavings(pgmap, key16, found.get(key16, {}), asked)
        await self._erase(leavings, pgmap)
        knows_all = all(self.meta.table.get(key16) is not None for key16 in found)
        return knows_all, set(names) - asked

    async def _headers(self, node: str) -> list[bytes] | None:
        link = self._links.get(node)
        return await link.headers() if link is not None else None

    def _leavings(
        self,
        pgmap: PgMap,
        key16: bytes,
        puts: dict[int, list[tuple[ShardHeader, str]]],
        asked: set[str],
    ) -> list[tuple[ShardHeader, str]]:
        """Returns old shards of a block that has gone, too few of a put to be one again.

        A node that was away while a tenant was erased, or a block evicted, brings them back; when
        the tombstone has gone as well nobody knows their key, and no orphan pass would free them.
        """
        fields = self.meta.table.get(key16)
        is_gone = fields is None or fields[5] > State.DEGRADED
        if not is_gone or not asked >= pgmap.members_of(key16):
            return []
        before_s = int(self._clock.wall_s()) - _LEAVINGS_AGE_S
        return [
            found
            for shards in puts.values()
            if num_distinct(shards) < pgmap.profile.k
            for found in shards
            if found[0].created_s <= before_s
        ]

    async def _erase(self, leavings: Sequence[tuple[ShardHeader, str]], pgmap: PgMap) -> None:
        by_node: dict[str, list[ShardRef]] = defaultdict(list)
        for header, node in leavings:
            by_node[node].append(ShardRef(header.key16, header.shard, header.put_id))
        links = ((self._links.get(node), refs) for node, refs in by_node.items())
        await asyncio.gather(
            *(link.delete(refs, pgmap.epoch, erase=True) for link, refs in links if link)
        )

    def _audit_block(
        self,
        pgmap: PgMap,
        key16: bytes,
        puts: dict[int, list[tuple[ShardHeader, str]]],
        asked: set[str],
    ) -> None:
        fields = self.meta.table.get(key16)
        whole = [
            shards
            for put_id, shards in puts.items()
            if num_distinct(shards) >= pgmap.profile.k and put_id not in self._withdrawn
        ]
        if fields is not None and fields[5] > State.DEGRADED:
            # Evicted; but a put of another name came after that, or the log has lost its record.
            whole = [shards for shards in whole if shards[0][0].put_id != fields[0]]
            if not whole:
                return
            self.meta.remove([key16])
            fields = None
        is_gone = fields is not None and fields[0] not in puts
        if is_gone and whole and asked >= pgmap.members_of(key16):
            # The log is older than the disks: its put was replaced, and nobody has it any more.
            self.meta.remove([key16])
            fields = None
        if fields is None:
            if not whole:
                return
            best = max(whole, key=lambda shards: (num_distinct(shards), shards[0][0].created_s))
            header = best[0][0]
            bitmap = bitmap_in_place(best, pgmap)
            self.meta.adopt(key16, record_of(header, bitmap, pgmap, self.meta.epoch))
        else:
            bitmap = fields[4]
            for shard in range(pgmap.profile.num_shards):
                if pgmap.node_of(key16, shard) in asked:
                    bitmap &= ~(1 << shard)
            bitmap |= bitmap_in_place(puts.get(fields[0], []), pgmap)
            if bitmap != fields[4]:
                self.meta.set_shards(key16, fields[0], bitmap, state_of(bitmap, pgmap))
        if num_shards_in(bitmap) < pgmap.profile.num_shards:
            self.want_repair(key16)

    # ---- commits ------------------------------------------------------------------------------

    def commit(self, key16: bytes, record: Record) -> tuple[CommitStatus, int, int | None]:
        """Makes a written block visible; returns (status, put in force, put replaced)."""
        pgmap = self._view.pgmap
        assert pgmap is not None
        num = num_shards_in(record.shards)
        if num < pgmap.profile.k:
            return CommitStatus.REFUSED, 0, None
        state = state_of(record.shards, pgmap)
        # Used now at the latest, by the clock that judges its age: the writer's may be ahead.
        own = {"state": state, "access_epoch": min(record.access_epoch, self.meta.epoch)}
        done = self.meta.commit(key16, Record(**{**record.__dict__, **own}))
        if self._is_auditing:
            self._committed_meanwhile.add(key16)
        if done.outcome is CommitOutcome.EXISTS:
            return CommitStatus.EXISTS, done.put_id, None
        self.handover.note_commit(key16)
        if num < pgmap.profile.num_shards:
            self.want_repair(key16)
        status = CommitStatus.DEGRADED if state is State.DEGRADED else CommitStatus.COMMITTED
        return status, done.put_id, done.replaced_put_id

    def withdraw(self, put_id: int) -> None:
        """Makes no block of a put from here on: an audit that lists its shards just now would name
        a block that is gone in a moment."""
        self._withdrawn[put_id] = None
        if len(self._withdrawn) > _MAX_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]

    async def free_put(self, key16: bytes, put_id: int) -> None:
        """Frees all shards of a put, on all members."""
        pgmap = self._view.pgmap
        assert pgmap is not None
        await self._delete({put_id: [key16]}, pgmap)

    async def _delete(
        self, keys_by_put: dict[int, list[bytes]], pgmap: PgMap, erase: bool = False
    ) -> None:
        by_node: dict[str, list[ShardRef]] = defaultdict(list)
        for put_id, keys in keys_by_put.items():
            for key16 in keys:
                for shard in range(pgmap.profile.num_shards):
                    by_node[pgmap.node_of(key16, shard)].append(ShardRef(key16, shard, put_id))
        deletes = []
        for node, refs in by_node.items():
            link = self._links.get(node)
            if link is not None:
                deletes.append(link.delete(refs, pgmap.epoch, erase))
        await asyncio.gather(*deletes)

    # ---- repair -------------------------------------------------------------------------------

    def want_repair(self, key16: bytes) -> bool:
        """Queues a block; returns whether it was queued now."""
        return self.repairs.want(key16)

    def report_bad(self, key16: bytes, put_id: int, shard: int) -> bool:
        """Takes note of a shard that is missing or damaged; returns whether repair was queued."""
        fields = self.meta.get(key16)
        pgmap = self._view.pgmap
        if fields is None or pgmap is None or fields[0] != put_id:
            return False
        self.counts.bad_reported += 1
        bitmap = fields[4] & ~(1 << shard)
        if bitmap != fields[4]:
            self.meta.set_shards(key16, put_id, bitmap, state_of(bitmap, pgmap))
        return self.want_repair(key16)

    async def tell_primaries(self, refs: Sequence[ShardRef]) -> None:
        """Reports bad shards of this node to whoever leads their groups; for its scrub.

        A primary that is away learns of them when it has audited this node again.
        """
        pgmap, up = self._view.pgmap, self._view.up()
        if pgmap is None:
            return
        for ref in refs:
            primary = pgmap.primary_of(pgmap.group_of(ref.key16), up)
            if primary == self._node:
                self.report_bad(ref.key16, ref.put_id, ref.shard)
            elif primary is not None:
                link = self._links.get(primary)
                if link is not None:
                    await link.report_bad(ref, "scrub")

    def _age(self, key16: bytes) -> int:
        """Newest access first: the oldest may be evicted before anybody asks."""
        fields = self.meta.table.get(key16)
        return -fields[3] if fields else 0

    async def _repair_one(self, key16: bytes) -> tuple[int, bool]:
        """Returns (bytes moved, whether there is nothing left to do for now)."""
        pgmap, fields = self._view.pgmap, self.meta.get(key16)
        if pgmap is None or fields is None or not self.leads(key16):
            return 0, True
        profile, put_id = pgmap.profile, fields[0]
        # All members are asked: the bitmap is what was known, this is what is true.
        shards, gone, silent, is_away = await self._read_shards(pgmap, key16, put_id)
        in_place = bitmap_of(shards)
        if len(shards) < profile.k:
            shards |= await self._read_elsewhere(pgmap, key16, put_id, shards)
        if len(shards) < profile.k:
            if is_away or silent:
                # A member that is away is audited when it is back, and then it is queued again.
                return 0, not silent
            # Every member has answered and too few are good: this block is lost. Not the one that
            # has taken its place meanwhile.
            if self._is_in_force(key16, put_id):
                self.meta.remove([key16])
                self.counts.dropped += 1
            await self._delete({put_id: [key16]}, pgmap)
            return 0, True
        targets = sorted(gone)
        written: set[int] = set()
        moved = sum(map(len, shards.values()))
        if targets:
            rebuilt = await asyncio.to_thread(rebuilt_shards, shards, targets, profile)
            moved += sum(map(len, rebuilt.values()))
            for shard, bytes_ in rebuilt.items():
                link = self._links.get(pgmap.node_of(key16, shard))
                if link is not None and self._is_in_force(key16, put_id):
                    status = await link.put(bytes_, pgmap.epoch, False)
                    if status in (PutStatus.BUFFERED, PutStatus.DURABLE):
                        written.add(shard)
        self.counts.repaired += len(written)
        now = self.meta.table.get(key16)
        if now is not None and not self._is_in_force(key16, put_id):
            # Evicted or replaced meanwhile: what was written came after the deletes.
            await self._delete({put_id: [key16]}, pgmap, erase=True)
            return moved, True
        # Only what was seen is changed: an audit may have learned of other shards meanwhile.
        if now is not None:
            bitmap = (now[4] | in_place | bitmap_of(written)) & ~bitmap_of(gone - written)
            if bitmap != now[4]:
                self.meta.set_shards(key16, put_id, bitmap, state_of(bitmap, pgmap))
        return moved, not silent and len(written) == len(targets)

    def _is_in_force(self, key16: bytes, put_id: int) -> bool:
        fields = self.meta.table.get(key16)
        return fields is not None and fields[0] == put_id and fields[5] <= State.DEGRADED

    async def _read_shards(
        self, pgmap: PgMap, key16: bytes, put_id: int
    ) -> tuple[dict[int, bytes], set[int], set[int], bool]:
        """Returns the good shards, those that their member says are not good, those whose member
        is up and did not answer, and whether a member is away."""
        asked = {}
        is_away = False
        for shard in range(pgmap.profile.num_shards):
            link = self._links.get(pgmap.node_of(key16, shard))
            if link is None:
                is_away = True
            else:
                asked[shard] = link.get(ShardRef(key16, shard, put_id))
        answers = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        good = {j: data for j, (data, _) in answers.items() if data is not None}
        silent = {j for j, (_, status) in answers.items() if status is ReadStatus.IO}
        return good, answers.keys() - good.keys() - silent, silent, is_away

    async def _read_elsewhere(
        self, pgmap: PgMap, key16: bytes, put_id: int, known: Collection[int]
    ) -> dict[int, bytes]:
        """Returns good shards, of those not known, that lie on nodes which are no members now."""
        asked = []
        for node in sorted(self._view.up().keys() - pgmap.members_of(key16)):
            link = self._links.get(node)
            for shard in range(pgmap.profile.num_shards):
                if link is not None and shard not in known:
                    asked.append((shard, link.get(ShardRef(key16, shard, put_id))))
        answers = await asyncio.gather(*(answer for _, answer in asked))
        both = zip(asked, answers, strict=True)
        return {shard: data for (shard, _), (data, _) in both if data is not None}

    # ---- eviction -----------------------------------------------------------------------------

    async def evict(self, keys16: Sequence[bytes], reason: str) -> int:
        """Evicts blocks from all members; returns how many went."""
        pgmap = self._view.pgmap
        if pgmap is None:
            return 0
        by_put: dict[int, list[bytes]] = defaultdict(list)
        for key16 in keys16:
            if self.leads(key16) and self.meta.get(key16, even_expired=True) is not None:
                fields = self.meta.set_state(key16, State.EVICTING)
                if fields is not None:
                    by_put[fields[0]].append(key16)
                self.repairs.forget(key16)
        await self._free_evicted(by_put, pgmap, erase=reason == "tenant")
        num_evicted = sum(map(len, by_put.values()))
        log.info("blocks evicted", extra={"num_blocks": num_evicted, "why": reason})
        return num_evicted

    async def _free_evicted(
        self, keys_by_put: dict[int, list[bytes]], pgmap: PgMap, erase: bool
    ) -> None:
        await self._delete(keys_by_put, pgmap, erase)
        for put_id, keys in keys_by_put.items():
            for key16 in keys:
                self.meta.bury(key16, put_id)

    async def finish_evictions(self) -> None:
        """Brings to an end what was broken off: the process was killed, or whoever asked left."""
        pgmap = self._view.pgmap
        by_put: dict[int, list[bytes]] = defaultdict(list)
        for key16 in self.meta.table.stale(State.EVICTING, _ALL_EPOCHS):
            fields = self.meta.table.get(key16)
            if fields is not None and self.leads(key16):
                by_put[fields[0]].append(key16)
        if pgmap is not None and by_put:
            # Why they go is not known any more: as if it were for a tenant.
            await self._free_evicted(by_put, pgmap, erase=True)

    async def settle(self, key16: bytes, put_id: int) -> None:
        """Decides on an old put of which shards lie somewhere and that no record names.

        Whole it is a block again, as after a take-over; of one that was evicted or never finished
        every shard goes, wherever it is. A member that does not answer could have the shard that
        makes it whole: then nothing is done.
        """
        pgmap = self._view.pgmap
        if pgmap is None or not self.leads(key16) or self._is_in_force(key16, put_id):
            return
        shards, _, silent, is_away = await self._read_shards(pgmap, key16, put_id)
        bitmap = bitmap_of(shards)
        shards |= await self._read_elsewhere(pgmap, key16, put_id, shards)
        if is_away or silent or not self.leads(key16) or self._is_in_force(key16, put_id):
            return
        header = ShardHeader.parse(next(iter(shards.values()), b"")[:SHARD_HEADER_BYTES])
        is_whole = len(shards) >= pgmap.profile.k and header is not None and fits(header, pgmap)
        if is_whole and header is not None and self.meta.table.get(key16) is None:
            self.meta.adopt(key16, record_of(header, bitmap, pgmap, self.meta.epoch))
            if num_shards_in(bitmap) < pgmap.profile.num_shards:
                self.want_repair(key16)
            return
        refs = [ShardRef(key16, shard, put_id) for shard in range(pgmap.profile.num_shards)]
        links = map(self._links.get, self._view.up())
        await asyncio.gather(*(link.delete(refs, pgmap.epoch, True) for link in links if link))
