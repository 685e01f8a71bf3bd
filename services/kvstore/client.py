"""What other services import of the store: keys, CHECK, STORE, window states.

    check = CheckClient(runtime.channels, address)
    answer = await check.match(request)                      # a miss when CHECK is away

    store = StoreClient(runtime.channels, address)
    async with store.fetch(keys, layout, ring=ring, slots=slots) as blocks:
        async for block in blocks: ...                       # each block once; leave any time
    status = await store.put(block)                          # answered, never failed

    directory = SwaDirectoryClient(runtime.channels, lambda: view.members("entrypoint"))
    await directory.publish(key, location); await directory.lookup([key])

Raises nothing for cache reasons: a store that is away is a miss (P-37).
"""

from __future__ import annotations

import asyncio
import enum
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import (
    check_pb2,
    check_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
    swa_pb2,
    swa_pb2_grpc,
)

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, StreamCall, call, stream_call
from services.common.shm_ring import SlotRing
from services.kvstore.backends.base import wait_all
from services.kvstore.checksums import Buffer, xxh3_128
from services.kvstore.formats import TtlClass
from services.kvstore.hash_chain import (
    Identity,
    MediaSpan,
    block_extras,
    chain,
    layout_digest,
    layout_fingerprint,
    media_digest,
    tenant_tag,
)
from services.kvstore.hit_policy import swa_kept_positions, swa_store_position
from services.kvstore.swa.directory import Location, SwaDirectory, SwaKey, owner_of
from services.kvstore.swa.pool import SwaPool
from services.kvstore.swa.server import (
    SwaDirectoryServicer,
    SwaPoolServicer,
    key_to_proto,
    location_of,
    location_to_proto,
)

__all__ = [
    "Block",
    "CheckClient",
    "FetchedBlock",
    "Identity",
    "Location",
    "MediaSpan",
    "PutStatus",
    "StoreClient",
    "SwaDirectory",
    "SwaDirectoryClient",
    "SwaKey",
    "SwaPool",
    "SwaPoolServicer",
    "TtlClass",
    "block_extras",
    "chain",
    "fetch_state",
    "layout_digest",
    "layout_fingerprint",
    "media_digest",
    "swa_directory_servicer",
    "swa_kept_positions",
    "swa_store_position",
    "tenant_tag",
]

_MATCH_TIMEOUT_S: Final = 0.5
_FETCH_TIMEOUT_S: Final = 30.0
_CANCEL_TIMEOUT_S: Final = 10.0
_DIRECTORY_TIMEOUT_S: Final = 2.0
_STATE_TIMEOUT_S: Final = 5.0
_MAX_UNANSWERED_PUTS: Final = 1024


def swa_directory_servicer() -> SwaDirectoryServicer:
    """Returns a directory shard for an entrypoint to add to its server.

    runtime.server.add(
        swa_pb2_grpc.add_SwaDirectoryServiceServicer_to_server, swa_directory_servicer()
    )
    """
    return SwaDirectoryServicer()


class CheckClient:
    """CHECK on this machine."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._stub = check_pb2_grpc.CheckServiceStub(channels.get(address))

    async def match(
        self, request: check_pb2.MatchRequest, timeout_s: float = _MATCH_TIMEOUT_S
    ) -> check_pb2.MatchResponse:
        """Returns the match; an empty one (hit of nothing) when CHECK does not answer in time."""
        try:
            answer: check_pb2.MatchResponse = await call(
                self._stub.Match, request, timeout_s=timeout_s
            )
            return answer
        except Failure as failure:
            if failure.reason is Reason.INVALID_REQUEST:
                raise
            return check_pb2.MatchResponse()

    async def unpin(self, pin_id: str) -> None:
        """Drops a pin; one that cannot be dropped lapses by itself."""
        try:
            await call(self._stub.Unpin, check_pb2.UnpinRequest(pin_id=pin_id), timeout_s=1.0)
        except Failure:
            pass


class PutStatus(enum.Enum):
    """How a put ended; LOST when the store went away before it answered."""

    COMMITTED = store_pb2.PUT_STATUS_COMMITTED
    EXISTS = store_pb2.PUT_STATUS_EXISTS
    KEY_MISMATCH = store_pb2.PUT_STATUS_KEY_MISMATCH
    NO_PARENT = store_pb2.PUT_STATUS_NO_PARENT
    DROPPED = store_pb2.PUT_STATUS_DROPPED
    STALE_RING = store_pb2.PUT_STATUS_STALE_RING
    LOST = -1

    @property
    def is_stored(self) -> bool:
        """Returns whether the block is in the store now."""
        return self in (PutStatus.COMMITTED, PutStatus.EXISTS)


@dataclass(frozen=True)
class Block:
    """A finished block. Give `payload`, or a `slot` of the ring with its `num_bytes`."""

    key: bytes
    parent_key: bytes  # the root for the first block
    index: int  # 1-based
    token_ids: bytes
    layout: bytes
    ttl_class: TtlClass = TtlClass.CHAT
    payload: bytes = b""
    slot: int | None = None
    num_bytes: int = 0
    extra: bytes = b""
    by_decode: bool = True
    approximate: bool = False
    writer_id: str = ""
    request_id: str = ""
    tenant: str = ""


@dataclass(frozen=True)
class FetchedBlock:
    """How one block ended; `payload` only when no ring was given."""

    index: int
    is_ok: bool
    reason: str  # "ok", "absent", "corrupt", "timeout", "lost"
    watermark: int  # first block not yet OK, in order
    payload: bytes = b""
    approximate: bool = False
    num_bytes: int = 0  # of the payload, here or in its slot; 0 unless OK


_CLASS_TO_PROTO: Final = {
    TtlClass.AGENT: records_pb2.TTL_CLASS_AGENT,
    TtlClass.CHAT: records_pb2.TTL_CLASS_CHAT,
}
_REASONS: Final = {
    store_pb2.FETCH_STATUS_OK: "ok",
    store_pb2.FETCH_STATUS_ABSENT: "absent",
    store_pb2.FETCH_STATUS_CORRUPT: "corrupt",
    store_pb2.FETCH_STATUS_TIMEOUT: "timeout",
}


class StoreClient:
    """STORE on this machine."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._stub = store_pb2_grpc.StoreServiceStub(channels.get(address))
        self._puts: _PutStream | None = None

    @asynccontextmanager
    async def fetch(
        self,
        keys: bytes,
        layout: bytes,
        *,
        ring: SlotRing | None = None,
        slots: Sequence[int] = (),
        parent_key: bytes = b"",
        priority: int = 0,
        pin_id: str = "",
        request_id: str = "",
        timeout_s: float = _FETCH_TIMEOUT_S,
    ) -> AsyncIterator[AsyncIterator[FetchedBlock]]:
        """Opens a fetch; the iterator gives every block once.

        The block may be left at any time: on the way out the store is asked to stop and the slots
        are the caller's again when the `async with` has ended. A store that is away gives blocks
        with the reason "lost".

        Raises: Failure(BACKEND_LOST) on the way out when the store did not say that it has
            stopped: the slots must then stay out of use until its process is known to be gone.
        """
        fetch_id = secrets.randbits(63) | 1
        request = store_pb2.FetchRequest(
            request_id=request_id,
            keys=keys,
            parent_key=parent_key,
            layout_fingerprint=layout,
            slots=slots,
            priority=priority,
            pin_id=pin_id,
            fetch_id=fetch_id,
        )
        if ring is not None:
            request.ring.CopyFrom(_ring_to_proto(ring))
        state = _FetchState(len(keys) // 32)
        try:
            async with stream_call(self._stub.Fetch, request, timeout_s=timeout_s) as stream:
                parts = state.read(stream)
                try:
                    yield parts
                finally:
                    await parts.aclose()
        finally:
            if ring is not None and not state.is_whole:
                await self._stop_fetch(fetch_id)

    async def _stop_fetch(self, fetch_id: int) -> None:
        """Returns, or is cancelled, only once the store has said that it has stopped."""
        request = store_pb2.CancelFetchRequest(fetch_id=fetch_id)
        stop = asyncio.ensure_future(
            call(self._stub.CancelFetch, request, timeout_s=_CANCEL_TIMEOUT_S)
        )
        try:
            await wait_all([stop])
        finally:
            # Above all that: a store which did not answer still has the slots.
            stop.result()

    async def put(self, block: Block, ring: SlotRing | None = None) -> PutStatus:
        """Stores one block and returns how that ended; puts of one client share a stream and keep
        their order. A slot is the caller's again when this returns."""
        if self._puts is None or self._puts.is_ended:
            self._puts = _PutStream(self._stub)
        return await self._puts.put(block, ring)

    async def exists(self, keys: bytes) -> bytes:
        """Returns a byte per key of 32 bytes, 1 when stored; zeros when the store is away."""
        try:
            answer = await call(
                self._stub.Exists, store_pb2.ExistsRequest(keys=keys), timeout_s=2.0
            )
            return bytes(answer.present)
        except Failure:
            return bytes(len(keys) // 32)

    async def stat(self) -> store_pb2.StatResponse:
        """Returns the counts. Raises Failure."""
        answer: store_pb2.StatResponse = await call(
            self._stub.Stat, store_pb2.StatRequest(), timeout_s=5.0
        )
        return answer

    async def delete_tenant(self, tenant: str) -> int:
        """Erases a tenant's blocks; returns how many. Raises Failure."""
        request = store_pb2.DeleteTenantRequest(domain_id=tenant_tag(tenant))
        return int((await call(self._stub.DeleteTenant, request, timeout_s=600.0)).blocks)

    async def close(self) -> None:
        """Ends the stream of puts."""
        if self._puts is not None:
            await self._puts.close()


class _FetchState:
    """What has come of one fetch."""

    def __init__(self, num_blocks: int) -> None:
        self._missing = set(range(num_blocks))
        self._watermark = 0

    @property
    def is_whole(self) -> bool:
        return not self._missing

    async def read(self, stream: StreamCall[Any, Any]) -> AsyncGenerator[FetchedBlock, None]:
        try:
            async for part in stream:
                self._missing.discard(part.index)
                self._watermark = part.watermark
                yield FetchedBlock(
                    index=part.index,
                    is_ok=part.status == store_pb2.FETCH_STATUS_OK,
                    reason=_REASONS.get(part.status, "corrupt"),
                    watermark=part.watermark,
                    payload=part.payload,
                    approximate=part.approximate,
                    num_bytes=part.payload_bytes,
                )
        except Failure:
            # What did not come is missing; the slots are still the store's until it has stopped.
            for index in sorted(self._missing):
                yield FetchedBlock(index, False, "lost", self._watermark)


class _PutStream:
    """One stream of puts; ends with the first failure, and its puts with it."""

    def __init__(self, stub: store_pb2_grpc.StoreServiceStub) -> None:
        self._answers: dict[int, asyncio.Future[PutStatus]] = {}
        self._requests: asyncio.Queue[store_pb2.PutRequest | None] = asyncio.Queue()
        self._next_seq = 1
        self.is_ended = False
        self._task = asyncio.create_task(self._run(stub), name="kv put stream")

    async def put(self, block: Block, ring: SlotRing | None) -> PutStatus:
        if self.is_ended:
            return PutStatus.LOST
        if len(self._answers) >= _MAX_UNANSWERED_PUTS:
            return PutStatus.DROPPED
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        answer: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
        self._answers[seq] = answer
        self._requests.put_nowait(_put_request(seq, block, ring))
        # The slot is the store's until it answers, whatever becomes of the caller.
        return await asyncio.shield(answer)

    async def close(self) -> None:
        self._requests.put_nowait(None)
        await asyncio.wait([self._task])

    async def _run(self, stub: store_pb2_grpc.StoreServiceStub) -> None:
        try:
            async with stream_call(stub.Put) as stream, asyncio.TaskGroup() as group:
                group.create_task(self._write(stream))
                group.create_task(self._read(stream))
        except BaseExceptionGroup as group_error:
            if group_error.split(Failure)[1] is not None:
                raise
        finally:
            self.is_ended = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_result(PutStatus.LOST)
            self._answers.clear()

    async def _write(self, stream: StreamCall[Any, Any]) -> None:
        while (request := await self._requests.get()) is not None:
            await stream.write(request)
        await stream.done_writing()

    async def _read(self, stream: StreamCall[Any, Any]) -> None:
        async for item in stream:
            answer = self._answers.pop(item.put_seq, None)
            if answer is not None and not answer.done():
                answer.set_result(PutStatus(item.status))
        if self._answers:
            raise Failure(Reason.BACKEND_LOST, "the store ended the stream")


def _ring_to_proto(ring: SlotRing) -> store_pb2.ShmRing:
    return store_pb2.ShmRing(
        name=ring.ref.name,
        slot_bytes=ring.ref.slot_bytes,
        num_slots=ring.ref.num_slots,
        owner_epoch=ring.ref.owner_epoch,
    )


def _put_request(seq: int, block: Block, ring: SlotRing | None) -> store_pb2.PutRequest:
    request = store_pb2.PutRequest(
        put_seq=seq,
        key=block.key,
        parent_key=block.parent_key,
        block_index=block.index,
        token_ids=block.token_ids,
        extra=block.extra,
        layout_fingerprint=block.layout,
        ttl_class=_CLASS_TO_PROTO[block.ttl_class],
        payload=block.payload,
        by_decode=block.by_decode,
        approximate=block.approximate,
        writer_id=block.writer_id,
        request_id=block.request_id,
        domain_id=tenant_tag(block.tenant) if block.tenant else b"",
    )
    made: Buffer = block.payload
    if ring is not None and block.slot is not None:
        request.ring.CopyFrom(_ring_to_proto(ring))
        request.slot = block.slot
        made = ring.view(block.slot)[: block.num_bytes or None]
        request.payload_bytes = len(made)
    request.payload_digest = xxh3_128(made)
    return request


class Host(Protocol):
    """A member that hosts a directory shard."""

    @property
    def instance_id(self) -> str:
        """Its identity, which owns keys."""
        ...

    @property
    def address(self) -> str:
        """Where its shard answers."""
        ...


class SwaDirectoryClient:
    """The directory as one map: finds the shard of each key among the members of now."""

    def __init__(self, channels: Channels, hosts: Callable[[], Sequence[Host]]) -> None:
        self._channels = channels
        self._hosts = hosts

    def _owners(self, keys: Sequence[SwaKey]) -> dict[str, list[int]]:
        """Returns the numbers of the keys by the address that owns them."""
        addresses = {host.instance_id: host.address for host in self._hosts()}
        if not addresses:
            return {}
        members = sorted(addresses)
        by_address: dict[str, list[int]] = {}
        for number, key in enumerate(keys):
            owner = owner_of(key.key16, members)
            if owner is not None:
                by_address.setdefault(addresses[owner], []).append(number)
        return by_address

    def _stub(self, address: str) -> swa_pb2_grpc.SwaDirectoryServiceStub:
        return swa_pb2_grpc.SwaDirectoryServiceStub(self._channels.get(address))

    async def lookup(
        self, keys: Sequence[SwaKey], timeout_s: float = _DIRECTORY_TIMEOUT_S
    ) -> list[Location | None]:
        """Returns a location or None per key; the shards are asked in parallel, and one that does
        not answer in time is a miss."""
        found: list[Location | None] = [None] * len(keys)

        async def ask(address: str, numbers: list[int]) -> None:
            request = swa_pb2.SwaDirectoryServiceLookupRequest(
                keys=[key_to_proto(keys[number]) for number in numbers]
            )
            try:
                answer = await call(self._stub(address).Lookup, request, timeout_s=timeout_s)
            except Failure:
                return
            for number, location in zip(numbers, answer.locations, strict=False):
                found[number] = location_of(location)

        owners = self._owners(keys)
        if len(owners) == 1:
            await ask(*next(iter(owners.items())))
        elif owners:
            async with asyncio.TaskGroup() as group:
                for address, numbers in owners.items():
                    group.create_task(ask(address, numbers))
        return found

    async def publish(
        self,
        key: SwaKey,
        location: Location,
        ttl_s: int = 0,
        timeout_s: float = _DIRECTORY_TIMEOUT_S,
    ) -> bool:
        """Announces a state; False when it is not in force or the shard is away."""
        for address in self._owners([key]):
            request = swa_pb2.PublishRequest(
                key=key_to_proto(key), location=location_to_proto(location), ttl_s=ttl_s
            )
            try:
                answer = await call(self._stub(address).Publish, request, timeout_s=timeout_s)
                return bool(answer.stored)
            except Failure:
                return False
        return False

    async def withdraw(
        self, key: SwaKey, host: str, timeout_s: float = _DIRECTORY_TIMEOUT_S
    ) -> bool:
        """Takes an announcement back."""
        for address in self._owners([key]):
            request = swa_pb2.WithdrawRequest(key=key_to_proto(key), host_instance_id=host)
            try:
                answer = await call(self._stub(address).Withdraw, request, timeout_s=timeout_s)
                return bool(answer.removed)
            except Failure:
                return False
        return False


async def fetch_state(
    channels: Channels, key: SwaKey, location: Location, timeout_s: float = _STATE_TIMEOUT_S
) -> bytes | None:
    """Returns a window state from the machine that holds it, checked; None when it is gone or
    damaged, which the caller tells the directory and treats as a miss."""
    stub = swa_pb2_grpc.SwaPoolServiceStub(channels.get(location.address))
    request = swa_pb2.GetStateRequest(
        key=key_to_proto(key), slot=location.slot, host_epoch=location.host_epoch
    )
    parts = []
    try:
        async with stream_call(stub.GetState, request, timeout_s=timeout_s) as stream:
            async for item in stream:
                parts.append(item.data)
    except Failure:
        return None
    data = b"".join(parts)
    is_whole = len(data) == location.num_bytes and xxh3_128(data) == location.digest
    return data if is_whole else None
