"""StoreService: messages in, FETCH and PUT asked, messages out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc.aio
from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import store_pb2 as pb
from pelagos.kvstore.v1 import store_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.common.rpc_server import deadline_of
from services.common.shm_ring import RingRef
from services.kvstore.backends.base import ReadStatus, StorageAway
from services.kvstore.checksums import Buffer
from services.kvstore.formats import FLAG_APPROXIMATE, FLAG_DECODE, FLAG_PREFILL, TtlClass
from services.kvstore.hash_chain import KEY_BYTES, TOKEN_BYTES
from services.kvstore.limits import check_number, pin_life_s
from services.kvstore.store.blocks import BlockStore, NewBlock
from services.kvstore.store.fetch import Fetcher
from services.kvstore.store.put import PutResult, Putter
from services.kvstore.store.rings import RingCache

_PUT_STATUS: Final = {
    PutResult.COMMITTED: pb.PUT_STATUS_COMMITTED,
    PutResult.EXISTS: pb.PUT_STATUS_EXISTS,
    PutResult.KEY_MISMATCH: pb.PUT_STATUS_KEY_MISMATCH,
    PutResult.NO_PARENT: pb.PUT_STATUS_NO_PARENT,
    PutResult.DROPPED: pb.PUT_STATUS_DROPPED,
    PutResult.TORN: pb.PUT_STATUS_STALE_RING,
}
_HEARTBEAT_S: Final = 1.0
_RETRY_ERASE_S: Final = 5.0
_FETCH_MARGIN_S: Final = 0.02
# A fetch that comes without a deadline gets this one, as unary calls do: a client that is frozen
# keeps its connection, and with it all that its fetches hold.
_DEFAULT_FETCH_S: Final = 30.0
# Puts of one stream that run, or whose answers its reader has not taken yet.
_MAX_PUTS_PER_STREAM: Final = 4096

log = logging.getLogger(__name__)


def ttl_class_of(message: int) -> TtlClass:
    """Returns the class; an unset one is chat."""
    return TtlClass.AGENT if message == records_pb2.TTL_CLASS_AGENT else TtlClass.CHAT


def index_keys_of(keys: bytes) -> bytes:
    """Returns the 16-byte keys of concatenated full keys.

    Raises: Failure(INVALID_REQUEST) for other lengths, or more keys than one message may hold.
    """
    if len(keys) % KEY_BYTES:
        raise Failure(Reason.INVALID_REQUEST, "keys have 32 bytes each")
    check_number(len(keys) // KEY_BYTES)
    return b"".join(keys[at : at + 16] for at in range(0, len(keys), KEY_BYTES))


class StoreServicer(rpc.StoreServiceServicer):
    """The RPCs of one STORE process."""

    def __init__(
        self, blocks: BlockStore, fetcher: Fetcher, putter: Putter, rings: RingCache
    ) -> None:
        self._blocks = blocks
        self._fetcher = fetcher
        self._putter = putter
        self._rings = rings
        self._is_ending = False

    def end_streams(self) -> None:
        """Ends the streams that would live as long as the process; for its drain."""
        self._is_ending = True
        self._blocks.wake_followers()

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.FetchResponse]:
        """Moves blocks into slots, or inline."""
        deadline_s, limit = deadline_of(context), None
        task = asyncio.current_task()
        if deadline_s == math.inf and task is not None:
            limit = asyncio.get_running_loop().call_later(_DEFAULT_FETCH_S, task.cancel)
        try:
            async with aclosing(self._fetch(request, deadline_s)) as parts:
                async for part in parts:
                    yield part
        finally:
            if limit is not None:
                limit.cancel()

    async def _fetch(
        self, request: pb.FetchRequest, deadline_s: float
    ) -> AsyncGenerator[pb.FetchResponse, None]:
        ring = self._rings.get(_ref(request.ring)) if request.HasField("ring") else None
        if request.pin_id:
            await self._blocks.renew_pin(request.pin_id)
        fetched = self._fetcher.fetch(
            request.keys,
            request.layout_fingerprint,
            ring=ring,
            slots=request.slots,
            priority=request.priority,
            deadline_s=deadline_s - _FETCH_MARGIN_S,
            fetch_id=request.fetch_id,
        )
        async with aclosing(fetched) as parts:
            async for part in parts:
                yield pb.FetchResponse(
                    index=part.index,
                    status=_fetch_status(part.read.status, part.timed_out),
                    watermark=part.watermark,
                    payload=part.payload,
                    approximate=part.read.approximate,
                    payload_bytes=part.read.num_bytes,
                )

    async def CancelFetch(
        self, request: pb.CancelFetchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelFetchResponse:
        """Ends a fetch and says when its last write is done."""
        return pb.CancelFetchResponse(was_running=await self._fetcher.cancel(request.fetch_id))

    async def Put(
        self,
        requests: AsyncIterator[pb.PutRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.PutResponse]:
        """Stores blocks; answers come in the order in which they end."""
        answers: asyncio.Queue[pb.PutResponse | None] = asyncio.Queue()
        room = asyncio.Semaphore(_MAX_PUTS_PER_STREAM)

        async def one(request: pb.PutRequest) -> None:
            try:
                status = await self._put(request)
            except Failure:
                status = pb.PUT_STATUS_STALE_RING
            except Exception:
                # One put that fails as nobody thought of must not take its neighbours along.
                log.exception("put failed")
                status = pb.PUT_STATUS_DROPPED
            answers.put_nowait(pb.PutResponse(put_seq=request.put_seq, status=status))

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as puts:
                    async for request in requests:
                        await room.acquire()
                        puts.create_task(one(request))
            finally:
                answers.put_nowait(None)

        reader = asyncio.create_task(read(), name="kv puts of a stream")
        try:
            while (answer := await answers.get()) is not None:
                yield answer
                # Only now: answers that nobody takes must not gather without end.
                room.release()
            await reader
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _put(self, request: pb.PutRequest) -> pb.PutStatus.ValueType:
        payload: Buffer = request.payload
        if request.HasField("ring"):
            payload = self._rings.get(_ref(request.ring)).view(request.slot)
            if request.payload_bytes:
                if request.payload_bytes > len(payload):
                    return pb.PUT_STATUS_STALE_RING
                payload = payload[: request.payload_bytes]
        flags = FLAG_DECODE if request.by_decode else FLAG_PREFILL
        sizes = (len(request.key), len(request.parent_key), len(request.layout_fingerprint))
        num_tokens = len(request.token_ids) // TOKEN_BYTES
        is_numbered = request.block_index > 0 and 0 < num_tokens < 1 << 16
        if sizes != (32, 32, 32) or not payload or not is_numbered:
            return pb.PUT_STATUS_KEY_MISMATCH
        block = NewBlock(
            key=request.key,
            parent=request.parent_key,
            layout=request.layout_fingerprint,
            block_index=request.block_index,
            num_tokens=num_tokens,
            ttl_class=ttl_class_of(request.ttl_class),
            payload=payload,
            flags=flags | (FLAG_APPROXIMATE if request.approximate else 0),
            writer=request.writer_id.encode()[:16].ljust(16, b"\0"),
            tenant_tag=request.domain_id[:16].ljust(16, b"\0"),
            digest=request.payload_digest,
        )
        return _PUT_STATUS[await self._putter.put(block, request.token_ids, request.extra)]

    async def Exists(
        self, request: pb.ExistsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExistsResponse:
        """Says which keys are stored."""
        index_keys_of(request.keys)
        return pb.ExistsResponse(present=self._blocks.exists(request.keys))

    async def FollowCommits(
        self, request: pb.FollowCommitsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.FollowCommitsResponse]:
        """Streams the commit log."""
        follow = self._blocks.follow(request.log_id, request.from_seq, _HEARTBEAT_S)
        async with aclosing(follow) as parts:
            async for part in parts:
                if self._is_ending:
                    return
                yield pb.FollowCommitsResponse(
                    log_id=part.log_id,
                    next_seq=part.next_seq,
                    entries=part.entries,
                    reset=part.reset,
                    level=part.level,
                )

    async def Touch(
        self, request: pb.TouchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TouchResponse:
        """Renews access."""
        index_keys_of(request.keys)
        touched = await self._blocks.touch(request.keys, ttl_class_of(request.ttl_class))
        return pb.TouchResponse(touched=touched)

    async def Pin(
        self, request: pb.PinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PinResponse:
        """Holds blocks against eviction."""
        ttl_s = pin_life_s(request.pin_id, request.ttl_ms)
        keys16 = index_keys_of(request.keys)
        return pb.PinResponse(pinned=await self._blocks.pin(request.pin_id, keys16, ttl_s))

    async def DeleteTenant(
        self, request: pb.DeleteTenantRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DeleteTenantResponse:
        """Erases a tenant's blocks."""
        if len(request.domain_id) != 16 or not any(request.domain_id):
            raise Failure(Reason.INVALID_REQUEST, "a domain id has 16 bytes, not all zero")
        try:
            blocks = await self._putter.delete_tenant(request.domain_id)
        except StorageAway as error:
            raise Failure(
                Reason.BACKEND_LOST, f"blocks may be left: {error}", retry_after_s=_RETRY_ERASE_S
            ) from None
        return pb.DeleteTenantResponse(blocks=blocks)

    async def Stat(
        self, request: pb.StatRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StatResponse:
        """Counts."""
        stat = await self._blocks.stat()
        return pb.StatResponse(
            blocks=stat.num_blocks,
            used_bytes=stat.used_bytes,
            capacity_bytes=stat.capacity_bytes,
            queued_puts=self._putter.num_queued,
            queued_bytes=self._putter.num_queued_bytes,
            dropped_puts=self._putter.results[PutResult.DROPPED],
            corrupt_blocks=getattr(self._blocks, "num_corrupt", 0),
            backend=stat.backend,
            pins=stat.num_pins,
        )


def _ref(ring: pb.ShmRing) -> RingRef:
    return RingRef(ring.name, ring.slot_bytes, ring.num_slots, ring.owner_epoch)


def _fetch_status(status: ReadStatus, timed_out: bool) -> pb.FetchStatus.ValueType:
    if timed_out or status is ReadStatus.AWAY:
        return pb.FETCH_STATUS_TIMEOUT
    if status is ReadStatus.OK:
        return pb.FETCH_STATUS_OK
    return pb.FETCH_STATUS_CORRUPT if status.is_damage else pb.FETCH_STATUS_ABSENT
