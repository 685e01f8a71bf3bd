"""One node's disk and metadata together: what an embedded store and a storage node are made of.

Opening reconciles the two: where records name shards that the disk's index does not, the slots are
looked through once more; a record without its shard is then forgotten, and a shard without a record
is taken up from its header (metadata is reconstructible), unless a tombstone says it was evicted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from services.common.clock import SYSTEM_CLOCK, Clock
from services.kvstore.backends.base import BlockBackend, ShardRef
from services.kvstore.formats import LOG_ENTRY_BYTES, ObjectHeader, Record, ShardHeader, State
from services.kvstore.index_table import EPOCH_S
from services.kvstore.placement import OBJECT_HEADER_BYTES, SHARD_HEADER_BYTES, WHOLE
from services.kvstore.storage.meta import Meta

log = logging.getLogger(__name__)

# A put that is still on its way has shards and no record yet.
_ORPHAN_AGE_S: Final = 600


@runtime_checkable
class Rescans(Protocol):
    """A backend whose places say by themselves what they hold."""

    async def rescan(self) -> int:
        """Takes up shards that lie on the medium and that its index does not name; returns how
        many. For an owner whose records say that some are missing, before its first put."""
        ...


class Node:
    """Backend and metadata of one node that leads all its groups. A GcTarget."""

    def __init__(self, backend: BlockBackend, meta: Meta, clock: Clock = SYSTEM_CLOCK) -> None:
        self.backend = backend
        self.meta = meta
        self._clock = clock
        self.num_adopted = 0
        self.num_lost = 0

    @classmethod
    async def open(
        cls, backend: BlockBackend, meta_path: Path | None, clock: Clock = SYSTEM_CLOCK
    ) -> Node:
        """Returns the node with records and shards reconciled."""
        node = cls(backend, Meta(meta_path, clock.wall_s), clock)
        await node._reconcile()
        return node

    async def _reconcile(self) -> None:
        found = await self._headers()
        lost = self._lost(found)
        if lost and isinstance(self.backend, Rescans) and await self.backend.rescan():
            found = await self._headers()
            lost = self._lost(found)
        self.num_lost = self.meta.remove(lost)
        # Only now: the log may name a put of the key that another one has replaced since. And it
        # may end with the eviction of a put after which the key was put again.
        stray = [header for header in found.values() if self._is_stray(header)]
        self.meta.remove([header.key16 for header in stray])
        # Newest first: of two puts of one key the later one was acknowledged last.
        for header in sorted(stray, key=lambda h: h.created_s, reverse=True):
            self.num_adopted += self.meta.adopt(header.key16, record_of(header))

    async def _headers(self) -> dict[tuple[bytes, int], ShardHeader]:
        found = {}
        async for headers in self.backend.list_headers():
            for at in range(0, len(headers), SHARD_HEADER_BYTES):
                header = ShardHeader.parse(headers[at : at + SHARD_HEADER_BYTES])
                if header is not None and is_whole(header):
                    found[header.key16, header.put_id] = header
        return found

    def _is_stray(self, header: ShardHeader) -> bool:
        fields = self.meta.table.get(header.key16)
        return fields is None or (fields[5] > State.DEGRADED and fields[0] != header.put_id)

    def _lost(self, found: Container[tuple[bytes, int]]) -> list[bytes]:
        """Returns the keys of live records whose shard is not among these."""
        lost: list[bytes] = []
        cursor: int | None = 0
        while cursor is not None:
            entries, cursor = self.meta.table.snapshot(cursor, 8192, 0)
            for at in range(0, len(entries), LOG_ENTRY_BYTES):
                key16 = entries[at + 12 : at + 28]
                fields = self.meta.table.get(key16)
                if fields and fields[5] <= State.DEGRADED and (key16, fields[0]) not in found:
                    lost.append(key16)
        return lost

    # ---- what garbage collection asks ---------------------------------------------------------

    async def usage(self) -> tuple[int, int]:
        """Returns (slots, slots used)."""
        stat = await self.backend.stat()
        return stat.num_slots, stat.num_used

    def eviction_order(self, limit: int, only_expired: bool = False) -> list[tuple[bytes, bool]]:
        """Returns (key, is expired), first to go first."""
        return self.meta.eviction_order(limit, only_expired)

    def access_epoch(self, key16: bytes) -> int | None:
        """Returns when the block was last used, in units of 600 s."""
        fields = self.meta.table.get(key16)
        return fields[3] if fields else None

    def pinned(self) -> set[bytes]:
        """Returns the keys that are pinned now."""
        return self.meta.pinned(self._clock.now_s())

    async def evict(self, keys16: Sequence[bytes], reason: str) -> int:
        """Evicts blocks: nothing reads them from here on, then their slots are free."""
        refs = []
        for key16 in keys16:
            fields = self.meta.get(key16, even_expired=True)
            if fields is not None:
                self.meta.set_state(key16, State.EVICTING)
                refs += [ShardRef(key16, j, fields[0]) for j in range(16) if fields[4] >> j & 1]
        await self.backend.delete_shards(refs)
        for ref in refs:
            self.meta.bury(ref.key16, ref.put_id)
        log.info("blocks evicted", extra={"num_blocks": len(refs), "why": reason})
        return len(refs)

    async def drop(self, key16: bytes, put_id: int) -> None:
        """Forgets a block whose bytes proved bad; a later put may store it again."""
        fields = self.meta.table.get(key16)
        if fields is not None and fields[0] == put_id:
            self.meta.remove([key16])
            refs = [ShardRef(key16, j, put_id) for j in range(16) if fields[4] >> j & 1]
            await self.backend.delete_shards(refs)

    async def free_orphans(self) -> int:
        """Frees old shards that no record names; purges old tombstones."""
        self.meta.purge_tombstones()
        before_s = int(self._clock.wall_s()) - _ORPHAN_AGE_S
        orphans = []
        async for headers in self.backend.list_headers():
            for at in range(0, len(headers), SHARD_HEADER_BYTES):
                header = ShardHeader.parse(headers[at : at + SHARD_HEADER_BYTES])
                if header is None or header.created_s > before_s:
                    continue
                if self._is_orphan(header):
                    orphans.append(ShardRef(header.key16, header.shard, header.put_id))
        return await self.backend.delete_shards(orphans) if orphans else 0

    def _is_orphan(self, header: ShardHeader) -> bool:
        fields = self.meta.table.get(header.key16)
        return fields is None or fields[0] != header.put_id or fields[5] > State.DEGRADED

    async def delete_tenant(self, tag: bytes) -> int:
        """Erases every block that carries the tag; returns how many. No tombstone is left.

        Raises: StorageAway when the bytes of some may still be there.
        """
        going: list[tuple[bytes, ShardRef]] = []
        async for headers in self.backend.list_headers():
            for at in range(0, len(headers), SHARD_HEADER_BYTES):
                header = ShardHeader.parse(headers[at : at + SHARD_HEADER_BYTES])
                if header is None:
                    continue
                ref = ShardRef(header.key16, header.shard, header.put_id)
                shard, _ = await self.backend.get_shard(ref)
                start = SHARD_HEADER_BYTES
                found = (
                    ObjectHeader.parse(shard[start : start + OBJECT_HEADER_BYTES])
                    if shard is not None
                    else None
                )
                if found is not None and found.tenant_tag == tag:
                    going.append((header.key16, ref))
        try:
            await self.backend.delete_shards([ref for _, ref in going], erase=True)
        finally:
            # After it, for a put may have been committed meanwhile; one of another name keeps its
            # record. A read in between finds nothing and forgets the block just so.
            self.meta.remove([key16 for key16, ref in going if self.meta.is_of(key16, ref.put_id)])
        await self.backend.sync()
        return len(going)

    async def sync(self) -> None:
        """Makes shards durable, then the records that name them."""
        await self.backend.sync()
        await asyncio.to_thread(self.meta.sync)

    async def close(self) -> None:
        """Makes everything durable and lets go."""
        await self.backend.close()
        await asyncio.to_thread(self.meta.close)


def is_whole(header: ShardHeader) -> bool:
    """Returns whether a shard is a block stored whole that a record can name."""
    return header.is_usable and (header.k, header.m) == (WHOLE.k, WHOLE.m)


def record_of(header: ShardHeader) -> Record:
    """Returns the record of a block stored whole, rebuilt from its shard."""
    return Record(
        put_id=header.put_id,
        block_index=header.block_index,
        created_s=header.created_s,
        access_epoch=header.created_s // EPOCH_S,
        shards=1 << header.shard,
        state=State.COMMITTED,
        ttl_class=header.ttl_class,
        flags=header.flags,
        parent16=header.parent16,
    )
