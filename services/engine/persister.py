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

from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import store_pb2 as pb

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure
from services.common.rpc_client import StreamCall, stream_call

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 65_536
_RETRY_S = 0.5
_MAX_UNANSWERED = 64


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
    """One per engine process. `stub` returns the store's stub, or None while none is known."""

    def __init__(
        self,
        stub: Callable[[], object | None],
        *,
        layout_fingerprint: bytes,
        writer_id: str,
        block_bytes: int,
        max_queue_bytes: int,
        by_decode: bool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.counts = PersistCounts()
        self._stub = stub
        self._fingerprint = layout_fingerprint
        self._writer_id = writer_id
        self._max_queued = max(1, max_queue_bytes // block_bytes)
        self._by_decode = by_decode
        self._clock = clock
        self._queue: deque[_Queued] = deque()
        self._unanswered: OrderedDict[int, _Queued] = OrderedDict()
        # Keys that are in the store as far as we know: persisted at most once per engine.
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._next_seq = 1

    @property
    def num_queued(self) -> int:
        """Blocks that wait or are on the way; each holds a pin."""
        return len(self._queue) + len(self._unanswered)

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
        full = len(self._queue) + len(self._unanswered) >= self._max_queued
        if full or block.parent_key in self._dropped or self._stub() is None:
            self.counts.dropped += 1
            _remember(self._dropped, block.key)
            return False
        self._dropped.pop(block.key, None)
        self._queue.append(_Queued(block, read, pin()))
        self._wake.set()
        return True

    async def run(self) -> None:
        """Sends until cancelled; a store that is away costs the blocks on their way."""
        while True:
            await self._wake.wait()
            stub = self._stub()
            if stub is None:
                self._drop_all()
                continue
            try:
                async with stream_call(stub.Put) as stream:  # type: ignore[attr-defined]
                    reader = asyncio.create_task(self._read(stream), name="put answers")
                    try:
                        await self._write(stream, reader)
                    finally:
                        reader.cancel()
                        await asyncio.gather(reader, return_exceptions=True)
            except Failure as failure:
                log.warning("store lost", extra={"reason": failure.reason.value})
                self._drop_all()
                await self._clock.sleep(_RETRY_S)
            except asyncio.CancelledError:
                self._drop_all()
                raise

    async def _write(self, stream: StreamCall[object, pb.PutResponse], reader: object) -> None:
        assert isinstance(reader, asyncio.Task)
        while True:
            if reader.done():
                reader.result()
                return
            if not self._queue or len(self._unanswered) >= _MAX_UNANSWERED:
                self._wake.clear()
                self._answered.clear()
                waits = [
                    asyncio.ensure_future(self._wake.wait()),
                    asyncio.ensure_future(self._answered.wait()),
                ]
                try:
                    await asyncio.wait([*waits, reader], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                continue
            item = self._queue.popleft()
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            self._unanswered[seq] = item
            block = item.block
            await stream.write(
                pb.PutRequest(
                    put_seq=seq,
                    key=block.key,
                    parent_key=block.parent_key,
                    block_index=block.index + 1,
                    token_ids=block.token_ids,
                    extra=block.extra,
                    layout_fingerprint=self._fingerprint,
                    ttl_class=block.ttl_class,
                    payload=item.read(),
                    by_decode=self._by_decode,
                    approximate=block.approximate,
                    writer_id=self._writer_id,
                    request_id=block.request_id,
                )
            )

    async def _read(self, stream: StreamCall[object, pb.PutResponse]) -> None:
        async for answer in stream:
            item = self._unanswered.pop(answer.put_seq, None)
            if item is None:
                continue
            item.unpin()
            if answer.status == pb.PUT_STATUS_COMMITTED:
                self.counts.persisted += 1
                _remember(self._known, item.block.key)
            elif answer.status == pb.PUT_STATUS_EXISTS:
                self.counts.known += 1
                _remember(self._known, item.block.key)
            else:
                self.counts.refused += 1
                _remember(self._dropped, item.block.key)
            self._answered.set()

    def _drop_all(self) -> None:
        self._wake.clear()
        for item in [*self._unanswered.values(), *self._queue]:
            item.unpin()
            _remember(self._dropped, item.block.key)
            self.counts.dropped += 1
        self._unanswered.clear()
        self._queue.clear()


def _remember(known: OrderedDict[bytes, None], key: bytes) -> None:
    known[key] = None
    known.move_to_end(key)
    while len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)
