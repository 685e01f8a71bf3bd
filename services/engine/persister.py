"""Hands finished blocks to the STORE of this machine, in order, without ever slowing a step.

A block stays pinned until the store has answered. The queue is bounded: when it is full the newest
work is dropped and counted. A block whose parent was dropped is dropped as well, for the store
would refuse it. Source: engine.md, section 2.7; kvcache-and-balancing.md, section 7.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pelagos.engine.v1 import records_pb2

from services.common.shm_ring import SlotRing
from services.engine.store_ring import StoreRing
from services.engine.tasks import TaskSet
from services.kvstore.client import Block, PutStatus, TtlClass

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 65_536
_MAX_UNANSWERED = 64


class Putter(Protocol):
    """What the persister needs of a store client."""

    async def put(self, block: Block, ring: SlotRing | None = None) -> PutStatus:
        """Stores one block, its payload in a slot of the ring; puts of one client keep their
        order. The slot is the store's until this returns, but for LOST."""
        ...


@dataclass(frozen=True)
class FullBlock:
    """A complete, committed block: what the store needs to check and keep it."""

    key: bytes
    parent_key: bytes
    index: int  # 0-based
    token_ids: bytes
    extra: bytes
    ttl_class: records_pb2.TtlClass.ValueType
    approximate: bool
    request_id: str
    tenant: str


@dataclass
class PersistCounts:
    """What became of the blocks that were offered."""

    persisted: int = 0
    known: int = 0
    refused: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class _Queued:
    block: FullBlock
    read: Callable[[], bytes]
    unpin: Callable[[], None]


class Persister:
    """One per engine process.

    store: returns the store's client, None while none is known; ring: returns the slots that this
        store sees too, None where it is on another machine.
    """

    def __init__(
        self,
        store: Callable[[], Putter | None],
        *,
        layout: bytes,
        writer_id: str,
        block_bytes: int,
        max_queue_bytes: int,
        by_decode: bool,
        ring: Callable[[], StoreRing | None] = lambda: None,
    ) -> None:
        self.counts = PersistCounts()
        self._store = store
        self._ring = ring
        self._layout = layout
        self._writer_id = writer_id
        self._max_queued = max(1, max_queue_bytes // block_bytes)
        self._by_decode = by_decode
        self._queue: deque[_Queued] = deque()
        self._puts = TaskSet()
        # Keys that are in the store as far as we know: persisted at most once per engine.
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._missing: OrderedDict[bytes, None] = OrderedDict()
        self._wake = asyncio.Event()

    @property
    def num_queued(self) -> int:
        """Blocks that wait or are on the way; each holds a pin."""
        return len(self._queue) + len(self._puts)

    def offer(
        self, block: FullBlock, pin: Callable[[], Callable[[], None]], read: Callable[[], bytes]
    ) -> bool:
        """Takes a block into the queue; False when it was dropped or is there already.

        Args:
            pin: pins the block's memory and returns how to unpin it.
            read: returns its bytes; called later, in order.
        """
        if block.key in self._known:
            self._known.move_to_end(block.key)
            self.counts.known += 1
            return False
        full = self.num_queued >= self._max_queued
        if full or block.parent_key in self._missing or self._store() is None:
            self.counts.dropped += 1
            _remember(self._missing, block.key)
            return False
        self._missing.pop(block.key, None)
        _remember(self._known, block.key)
        self._queue.append(_Queued(block, read, pin()))
        self._wake.set()
        return True

    async def run(self) -> None:
        """Sends until cancelled; a store that is away costs the blocks on their way."""
        try:
            while True:
                while self._queue and len(self._puts) < _MAX_UNANSWERED:
                    item = self._queue.popleft()
                    self._puts.start(self._put(item), "put")
                self._wake.clear()
                await self._wake.wait()
        finally:
            for item in self._queue:
                item.unpin()
            self._queue.clear()
            await self._puts.close()

    async def _put(self, item: _Queued) -> None:
        status = PutStatus.LOST
        try:
            store = self._store()
            if store is not None:
                status = await self._send(store, item)
        finally:
            item.unpin()
            self._count(item.block.key, status)
            self._wake.set()

    async def _send(self, store: Putter, item: _Queued) -> PutStatus:
        payload, ring = item.read(), self._ring()
        lease = None if ring is None else ring.take(1)
        if ring is None or lease is None:
            return await store.put(self._message(item.block, payload=payload))
        status = PutStatus.LOST
        try:
            lease.write(payload)
            message = self._message(item.block, slot=lease.slots[0], num_bytes=len(payload))
            status = await store.put(message, lease.ring)
        finally:
            # Lost, or left by us while the store is at it: it may still read the slot.
            lease.abandon() if status is PutStatus.LOST else lease.give_back()
        if status is PutStatus.STALE_RING:
            log.warning("the store does not see our shared memory")
            ring.turn_off()
            return await store.put(self._message(item.block, payload=payload))
        return status

    def _message(
        self, block: FullBlock, *, payload: bytes = b"", slot: int | None = None, num_bytes: int = 0
    ) -> Block:
        agent = block.ttl_class == records_pb2.TTL_CLASS_AGENT
        return Block(
            key=block.key,
            parent_key=block.parent_key,
            index=block.index + 1,
            token_ids=block.token_ids,
            layout=self._layout,
            ttl_class=TtlClass.AGENT if agent else TtlClass.CHAT,
            payload=payload,
            slot=slot,
            num_bytes=num_bytes,
            extra=block.extra,
            by_decode=self._by_decode,
            approximate=block.approximate,
            writer_id=self._writer_id,
            request_id=block.request_id,
            tenant=block.tenant,
        )

    def _count(self, key: bytes, status: PutStatus) -> None:
        if status is PutStatus.COMMITTED:
            self.counts.persisted += 1
        elif status is PutStatus.EXISTS:
            self.counts.known += 1
        else:
            self._known.pop(key, None)
            _remember(self._missing, key)
            if status in (PutStatus.LOST, PutStatus.DROPPED):
                self.counts.dropped += 1
            else:
                self.counts.refused += 1


def _remember(known: OrderedDict[bytes, None], key: bytes) -> None:
    known[key] = None
    known.move_to_end(key)
    while len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)
