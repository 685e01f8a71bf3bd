"""A node over a storage that other nodes use too: it learns what they did, and evicts only its own.

What others wrote becomes a record here, so that CHECK matches it and FETCH reads it; its age is
judged where it was written. Source: kvcache-and-balancing.md, section 11.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final, cast

from services.common.clock import SYSTEM_CLOCK, Clock
from services.kvstore.backends.base import Changes, ShardRef, SharedBackend, StorageAway
from services.kvstore.formats import FLAG_APPROXIMATE, ObjectHeader, ShardHeader
from services.kvstore.placement import SHARD_HEADER_BYTES
from services.kvstore.storage.meta import Meta
from services.kvstore.storage.node import Node, is_whole, record_of

log = logging.getLogger(__name__)

_HEADERS_AT_ONCE: Final = 64
_MAX_SPARE: Final = 4096  # two that store the same block at once are rare


class SharedNode(Node):
    """A Node whose backend is a SharedBackend."""

    def __init__(self, backend: SharedBackend, meta: Meta, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(backend, meta, clock)
        self._shared = backend
        # Others' puts of blocks that a record names already, taken up when the named one goes.
        self._spare: dict[bytes, ShardHeader] = {}
        self.num_learnt = 0

    @classmethod
    async def open_shared(
        cls, backend: SharedBackend, meta_path: Path | None, clock: Clock = SYSTEM_CLOCK
    ) -> SharedNode:
        """Returns the node with records and shards reconciled. Raises StorageAway."""
        return cast(SharedNode, await cls.open(backend, meta_path, clock))

    def eviction_order(self, limit: int, only_expired: bool = False) -> list[tuple[bytes, bool]]:
        """Returns (key, is expired) of this node's own blocks, first to go first."""
        asked = limit + _HEADERS_AT_ONCE
        while True:
            order = super().eviction_order(asked, only_expired)
            own = [item for item in order if self._is_own(item[0])]
            if len(own) >= limit or len(order) < asked:
                return own[:limit]
            asked *= 4

    def _is_own(self, key16: bytes) -> bool:
        fields = self.meta.table.get(key16)
        return fields is not None and self._shared.owns(ShardRef(key16, 0, fields[0]))

    async def follow_others(self, every_s: float) -> None:
        """Learns for ever; a storage that is away is asked again at the next turn."""
        while True:
            await self._clock.sleep(every_s)
            try:
                await self.learn()
            except StorageAway:
                continue
            except OSError as error:
                log.error("shared storage cannot be listed", extra={"errno": error.errno})

    async def learn(self) -> None:
        """Takes over what others did since the last time. Raises StorageAway."""
        replaced = self._apply(await self._shared.poll())
        if replaced:
            await self._shared.delete_shards(replaced)

    def _apply(self, changes: Changes) -> list[ShardRef]:
        """Returns shards of ours that somebody's better block has replaced."""
        for ref in changes.removed:
            fields = self.meta.table.get(ref.key16)
            if fields is not None and fields[0] == ref.put_id:
                self.meta.remove([ref.key16])
            self._forget_spare(ref)
        replaced = []
        for at in range(0, len(changes.added), SHARD_HEADER_BYTES):
            header = ShardHeader.parse(changes.added[at : at + SHARD_HEADER_BYTES])
            if header is None or not is_whole(header):
                continue
            known = self.meta.get(header.key16)
            if known is not None:
                is_better = known[7] & FLAG_APPROXIMATE and not header.flags & FLAG_APPROXIMATE
                if not is_better:
                    self._keep_spare(header, known[0])
                    continue
                replaced.append(ShardRef(header.key16, 0, known[0]))
            # A tombstone here says that ours was evicted; theirs is another one.
            self.meta.remove([header.key16])
            self.num_learnt += self.meta.adopt(header.key16, record_of(header))
        self._take_up_spare()
        return replaced

    def _keep_spare(self, header: ShardHeader, known_put_id: int) -> None:
        ref = ShardRef(header.key16, header.shard, header.put_id)
        if header.put_id == known_put_id or self._shared.owns(ref):
            return  # one of ours that no record names is an orphan
        self._spare.pop(header.key16, None)
        self._spare[header.key16] = header
        if len(self._spare) > _MAX_SPARE:
            del self._spare[next(iter(self._spare))]

    def _is_orphan(self, header: ShardHeader) -> bool:
        spare = self._spare.get(header.key16)
        is_spare = spare is not None and spare.put_id == header.put_id
        return not is_spare and super()._is_orphan(header)

    def _forget_spare(self, ref: ShardRef) -> None:
        spare = self._spare.get(ref.key16)
        if spare is not None and spare.put_id == ref.put_id:
            del self._spare[ref.key16]

    def _take_up_spare(self) -> None:
        """Names the second put of each block whose first one is gone, whoever removed it."""
        gone = [key for key in self._spare if self.meta.get(key, even_expired=True) is None]
        for key16 in gone:
            header = self._spare.pop(key16)
            self.meta.remove([key16])
            self.num_learnt += self.meta.adopt(key16, record_of(header))

    async def delete_tenant(self, tag: bytes) -> int:
        """Erases every block that carries the tag, whoever wrote it; returns how many.

        Raises: StorageAway when some may be left.
        """
        await self.learn()
        going: dict[ShardRef, None] = {}  # what moves meanwhile may come twice
        async for headers in self._shared.list_headers():
            refs = []
            for at in range(0, len(headers), SHARD_HEADER_BYTES):
                header = ShardHeader.parse(headers[at : at + SHARD_HEADER_BYTES])
                if header is not None:
                    refs.append(ShardRef(header.key16, header.shard, header.put_id))
            for at in range(0, len(refs), _HEADERS_AT_ONCE):
                part = refs[at : at + _HEADERS_AT_ONCE]
                is_theirs = await asyncio.gather(*(self._has_tag(ref, tag) for ref in part))
                going |= {ref: None for ref, goes in zip(part, is_theirs, strict=True) if goes}
        for ref in going:
            self._forget_spare(ref)
        self.meta.remove({ref.key16 for ref in going})
        await self._shared.delete_shards(list(going), erase=True)
        return len(going)

    async def _has_tag(self, ref: ShardRef, tag: bytes) -> bool:
        """Returns whether the block is the tenant's, or can be nobody's for it is damaged."""
        raw = await self._shared.object_header(ref)
        header = None if raw is None else ObjectHeader.parse(raw)
        if header is not None:
            return header.tenant_tag == tag
        _, status = await self._shared.get_shard(ref)
        if not status.is_damage and self._shared.object_bytes(ref) is not None:
            raise StorageAway("a block could not be looked at")
        return status.is_damage
