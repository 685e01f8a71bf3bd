"""The worker of one storage node: passes over the groups that its node leads, through its RPCs.

It runs beside the node (`pelagos serve gc`) or inside it, with the same code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pelagos.kvstore.v1 import storage_pb2 as storage

from services.common.clock import Clock
from services.common.errors import Failure
from services.common.rpc_client import call, stream_call
from services.kvstore.backends.base import ShardRef
from services.kvstore.config import GcConfig
from services.kvstore.formats import Record, ShardHeader
from services.kvstore.gc.collector import Collector
from services.kvstore.gc.policy import Waterlines
from services.kvstore.index_table import TTL_S, IndexTable, new_table
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links, NodeLink
from services.kvstore.storage.pgmap import PgMap

_TIMEOUT_S = 30.0
_ORPHAN_AGE_S = 600
_LOOKUP = 1024
_SETTLED_AT_ONCE = 16
_MAX_SETTLED = 8_192


class NodeTarget:
    """The groups one node leads, through its RPCs. What is fullest among all members counts: an
    evicted block frees a slot on each of them."""

    def __init__(
        self, link: NodeLink, links: Links, view: MapView, lines: Waterlines, clock: Clock
    ) -> None:
        self._lines = lines
        self._link = link
        self._links = links
        self._view = view
        self._clock = clock
        self._table: IndexTable = new_table()
        self._is_emergency = False

    async def refresh(self) -> None:
        """Reads the node's records. Raises Failure when it is away."""
        table = new_table()
        request = storage.FollowLogRequest(pg=-1)
        async with stream_call(self._link.meta.FollowLog, request, timeout_s=_TIMEOUT_S) as stream:
            while True:
                part = await stream.read()
                if part is None:
                    break
                table.apply_log(part.entries)
                if part.level:
                    break
        self._table = table

    async def usage(self) -> tuple[int, int]:
        """Returns (slots, used), scaled to the share that this node leads."""
        fullest, led_share = (1, 0), 0.0
        pgmap = self._view.pgmap
        for node in self._view.up():
            link = self._links.get(node)
            if link is None:
                continue
            try:
                stat = await call(link.storage.StatNode, storage.StatNodeRequest(), timeout_s=5.0)
            except Failure:
                continue
            if stat.used * fullest[0] > fullest[1] * stat.slots:
                fullest = (stat.slots, stat.used)
            if link.address == self._link.address and pgmap is not None:
                led_share = stat.primary_of / pgmap.num_groups
        num_slots, num_used = fullest
        self._is_emergency = num_used >= self._lines.emergency * num_slots
        return int(num_slots * led_share), round(num_used * led_share)

    def eviction_order(self, limit: int, only_expired: bool = False) -> list[tuple[bytes, bool]]:
        """Returns (key, is expired), first to go first."""
        wall_s = int(self._clock.wall_s())
        return self._table.eviction_order(wall_s, TTL_S, limit, only_expired)

    def access_epoch(self, key16: bytes) -> int | None:
        """Returns when the block was last used, in units of 600 s."""
        fields = self._table.get(key16)
        return fields[3] if fields else None

    def pinned(self) -> set[bytes]:
        """Returns nothing: the primary itself passes over what is pinned."""
        return set()

    async def evict(self, keys16: Sequence[bytes], reason: str) -> int:
        """Asks the primary to evict."""
        why = "emergency" if self._is_emergency else reason
        request = storage.EvictObjectsRequest(keys16=b"".join(keys16), reason=why)
        answer = await call(self._link.meta.EvictObjects, request, timeout_s=_TIMEOUT_S)
        return int(answer.evicted)

    async def free_orphans(self) -> int:
        """Frees old shards on this node that their primaries do not name, or have elsewhere; what
        a primary does not know at all it settles itself."""
        pgmap = self._view.pgmap
        headers = await self._link.headers()
        if pgmap is None or headers is None:
            return 0
        # What no writer of ours makes, no primary names either.
        orphans = [
            ShardRef(h.key16, h.shard, h.put_id)
            for h in map(ShardHeader.parse, headers)
            if h is not None and not h.is_usable
        ]
        before_s = int(self._clock.wall_s()) - _ORPHAN_AGE_S
        old = [h for h in map(ShardHeader.parse, headers) if h and h.created_s <= before_s]
        by_primary: dict[str, list[ShardHeader]] = {}
        up = self._view.up()
        here = next((node for node, at in up.items() if at == self._link.address), None)
        for header in old:
            primary = pgmap.primary_of(pgmap.group_of(header.key16), up)
            if primary is not None and header.is_usable:
                by_primary.setdefault(primary, []).append(header)
        for primary, some in by_primary.items():
            link = self._links.get(primary)
            if link is not None:
                orphans += await self._orphans_at(link, some, pgmap, here)
        return await self._link.delete(orphans, pgmap.epoch) if orphans else 0

    async def _orphans_at(
        self, link: NodeLink, headers: list[ShardHeader], pgmap: PgMap, here: str | None
    ) -> list[ShardRef]:
        """Returns the shards that the primary knows under another put, or knows to be where the
        map has them and this node is not. A key of a group that it is taking over just now is left
        for the next pass."""
        orphans = []
        unknown: list[ShardRef] = []
        for at in range(0, len(headers), _LOOKUP):
            part = headers[at : at + _LOOKUP]
            request = storage.LookupRequest(keys16=b"".join(h.key16 for h in part))
            try:
                answer = await call(link.meta.Lookup, request, timeout_s=_TIMEOUT_S)
            except Failure:
                break
            for header, found in zip(part, answer.objects, strict=False):
                ref = ShardRef(header.key16, header.shard, header.put_id)
                record = Record.parse(found.record)
                if record is None:
                    unknown += [ref] if found.key16 == header.key16 else []
                    continue
                is_elsewhere = pgmap.node_of(header.key16, header.shard) != here
                is_rebuilt = bool(record.shards >> header.shard & 1)
                if record.put_id != header.put_id or (is_elsewhere and is_rebuilt and here):
                    orphans.append(ref)
        await self._settle(link, unknown)
        return orphans

    async def _settle(self, link: NodeLink, refs: Sequence[ShardRef]) -> None:
        """Reports shards of unknown blocks; those past the bound come in the next pass."""
        for at in range(0, min(len(refs), _MAX_SETTLED), _SETTLED_AT_ONCE):
            part = refs[at : at + _SETTLED_AT_ONCE]
            await asyncio.gather(*(link.report_orphan(ref) for ref in part))


class RefreshedCollector:
    """A collector whose target reads the node anew before each pass."""

    def __init__(self, target: NodeTarget, collector: Collector) -> None:
        self._target = target
        self.collector = collector

    async def collect(self, with_orphans: bool) -> None:
        """Runs one pass. Raises Failure when the node is away."""
        await self._target.refresh()
        await self.collector.collect(with_orphans)


def passes_over(
    link: NodeLink, links: Links, view: MapView, config: GcConfig, clock: Clock
) -> RefreshedCollector:
    """Returns passes over one node."""
    target = NodeTarget(link, links, view, config.lines, clock)
    collector = Collector(
        target, config.lines, max_deletes_per_s=config.max_deletes_per_s, clock=clock
    )
    return RefreshedCollector(target, collector)


async def run_passes(passes: RefreshedCollector, config: GcConfig, clock: Clock) -> None:
    """Passes for ever; while the node is away there is nothing to do."""
    next_orphans_s = clock.now_s() + config.orphans_every_s
    while True:
        await clock.sleep(config.every_s)
        with_orphans = clock.now_s() >= next_orphans_s
        try:
            await passes.collect(with_orphans)
        except Failure:
            continue
        if with_orphans:
            next_orphans_s = clock.now_s() + config.orphans_every_s
