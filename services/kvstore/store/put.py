"""PUT: finished blocks from engines into the store, in parent order, never slowing decode.

A put is answered, not failed: committed, there already, refused because its key does not agree
with its tokens or its parent is not stored, or dropped because the queue or the disk is full.
Source: kvcache-and-balancing.md, section 7.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.kvstore.backends.base import wait_all
from services.kvstore.checksums import Buffer, xxh3_128
from services.kvstore.hash_chain import EXTRA_BYTES, TOKEN_BYTES, Uncacheable, chain
from services.kvstore.store.blocks import BlockStore, NewBlock, Outcome


class PutResult(enum.Enum):
    """How a put ended."""

    COMMITTED = "committed"
    EXISTS = "exists"
    KEY_MISMATCH = "key_mismatch"
    NO_PARENT = "no_parent"
    DROPPED = "dropped"
    TORN = "torn"  # the slot does not hold what the writer made


_OF_OUTCOME = {
    Outcome.COMMITTED: PutResult.COMMITTED,
    Outcome.EXISTS: PutResult.EXISTS,
    Outcome.NO_PARENT: PutResult.NO_PARENT,
    Outcome.DROPPED: PutResult.DROPPED,
    Outcome.TORN: PutResult.TORN,
}


def key_agrees(block: NewBlock, token_ids: Buffer, extra: bytes) -> bool:
    """Returns whether the key is that of the tokens behind the parent."""
    if not token_ids or len(token_ids) % TOKEN_BYTES or len(extra) % EXTRA_BYTES:
        return False
    extras = [(0, extra)] if extra else []
    try:
        key = chain(block.parent, token_ids, len(token_ids) // TOKEN_BYTES, extras)
    except Uncacheable:
        return False
    return key == block.key


@dataclass
class _Turn:
    """Whose turn it is among the puts of one key."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class Putter:
    """The queue of puts of one store.

    Writes of a chain's blocks overlap; a child's commit waits for its parent's. Two puts of one
    key at a time become one.
    """

    def __init__(self, blocks: BlockStore, max_queued_bytes: int, max_parallel: int) -> None:
        self._blocks = blocks
        self._max_queued_bytes = max_queued_bytes
        self._turns = asyncio.Semaphore(max_parallel)
        self._in_flight: dict[bytes, asyncio.Future[PutResult]] = {}
        self._blocks_in_flight: dict[bytes, NewBlock] = {}
        self._erasing: Counter[bytes] = Counter()
        self._of_key: dict[bytes, _Turn] = {}
        self.num_queued = 0
        self.num_queued_bytes = 0
        self.results: dict[PutResult, int] = dict.fromkeys(PutResult, 0)

    async def delete_tenant(self, tag: bytes) -> int:
        """Erases a tenant's blocks, those on their way too; returns how many.

        What the tenant puts while it runs is dropped: nothing that was put before this returned is
        there after it.
        """
        self._erasing[tag] += 1
        try:
            while pending := [
                put
                for key, put in self._in_flight.items()
                if self._blocks_in_flight[key].tenant_tag == tag
            ]:
                await asyncio.wait(pending)
            return await self._blocks.delete_tenant(tag)
        finally:
            self._erasing[tag] -= 1
            if not self._erasing[tag]:
                del self._erasing[tag]

    async def put(self, block: NewBlock, token_ids: Buffer, extra: bytes = b"") -> PutResult:
        """Stores one block and returns how that ended. The payload may be reused after it."""
        result = await self._put(block, token_ids, extra)
        self.results[result] += 1
        return result

    async def _put(self, block: NewBlock, token_ids: Buffer, extra: bytes) -> PutResult:
        if not key_agrees(block, token_ids, extra):
            return PutResult.KEY_MISMATCH
        size = len(block.payload)
        if self.num_queued_bytes + size > self._max_queued_bytes:
            return PutResult.DROPPED  # the newest goes, and with it everything built on it
        # From its first wait on, also behind a twin: who waits holds its bytes as well.
        self.num_queued += 1
        self.num_queued_bytes += size
        try:
            # Twins one after the other, so that each that ends wakes one. If the one before is gone
            # or was refused, this one's bytes are as good; if it put an approximate block, an
            # exact one still takes its place.
            async with self._alone_with(block.key):
                result = await self._without_a_write(block)
                return result or await self._put_as_first(block)
        finally:
            self.num_queued -= 1
            self.num_queued_bytes -= size

    @asynccontextmanager
    async def _alone_with(self, key: bytes) -> AsyncIterator[None]:
        turn = self._of_key.setdefault(key, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._of_key[key]

    async def _without_a_write(self, block: NewBlock) -> PutResult | None:
        """Returns how a put ends that has nothing to write; None when there is something."""
        if block.tenant_tag in self._erasing:
            return PutResult.DROPPED
        if self._blocks.is_stored(block):
            await self._blocks.touch(block.key, block.ttl_class)
            return PutResult.EXISTS
        return None

    async def _put_as_first(self, block: NewBlock) -> PutResult:
        parent = self._in_flight.get(block.parent)
        parent_index = self._index_of(block.parent)
        if block.block_index > 1 and parent_index is None:
            return PutResult.NO_PARENT
        # Eviction goes by it, leaves first. The root, which is before the first block, has none.
        if parent_index is not None and block.block_index != parent_index + 1:
            return PutResult.KEY_MISMATCH
        ours: asyncio.Future[PutResult] = asyncio.get_running_loop().create_future()
        self._in_flight[block.key] = ours
        self._blocks_in_flight[block.key] = block
        result = PutResult.DROPPED
        try:
            async with self._turns:
                result = await self._store(block, parent)
            return result
        finally:
            del self._in_flight[block.key], self._blocks_in_flight[block.key]
            ours.set_result(result)

    def _index_of(self, key: bytes) -> int | None:
        on_its_way = self._blocks_in_flight.get(key)
        return on_its_way.block_index if on_its_way is not None else self._blocks.index_of(key)

    async def _store(self, block: NewBlock, parent: asyncio.Future[PutResult] | None) -> PutResult:
        if block.digest and xxh3_128(block.payload) != block.digest:
            return PutResult.TORN
        # From here to the commit a cancelled caller (a client that died) must not leave a half:
        # it runs to its end by itself.
        work = asyncio.ensure_future(self._write_and_commit(block, parent))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await wait_all([work])
            raise

    async def _write_and_commit(
        self, block: NewBlock, parent: asyncio.Future[PutResult] | None
    ) -> PutResult:
        put_id = await self._blocks.write(block)
        if put_id is None:
            return PutResult.DROPPED
        if parent is not None:
            await asyncio.wait([parent])
            stored = (PutResult.COMMITTED, PutResult.EXISTS)
            if parent.cancelled() or parent.result() not in stored:
                await self._blocks.take_back(block, put_id)
                return PutResult.NO_PARENT
        return _OF_OUTCOME[await self._blocks.commit(block, put_id)]
