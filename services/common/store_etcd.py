"""`EtcdStore`: the store port on etcd's gRPC API, by stubs of our own (docs/adr/0002).

The channel reconnects by itself; a call made meanwhile is StoreUnavailable at once, and a watch
ends with it. Who resumes is `store.follow`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from pelagos.etcd.v1 import etcd_pb2 as pb

from services.common.store import (
    Change,
    Compacted,
    Compare,
    Delete,
    KeyValue,
    Lease,
    LeaseLost,
    Listing,
    Put,
    StoreUnavailable,
    TxnResult,
    WatchBatch,
)
from services.common.tls import TlsFiles, channel_credentials

CALL_TIMEOUT_S: Final = 2.0
# A watch that does not stand after this long is on a dead member.
_WATCH_START_TIMEOUT_S: Final = 5.0
_DELETED: Final = 1
_CREATE_REVISION: Final = 1
_MOD_REVISION: Final = 2
_VALUE: Final = 3
# A member cut off from the others must refuse, not answer from what it remembers.
_REQUIRE_LEADER: Final = (("hasleader", "true"),)
_LEASE_NOT_FOUND: Final = "requested lease not found"
_COMPACTED: Final = "required revision has been compacted"

_OPTIONS: Final = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # etcd closes connections that ping more often than every 5 s (its own default).
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
]


class EtcdStore:
    """A client of one etcd cluster.

    Args:
        endpoints: "host:port,host:port"; the channel goes to the next when one is gone.
    """

    def __init__(
        self, endpoints: str, tls: TlsFiles | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        target = "ipv4:" + ",".join(part.strip() for part in endpoints.split(","))
        if not endpoints.replace(",", "").replace(".", "").replace(":", "").isdigit():
            target = endpoints  # a name: gRPC resolves it
        self._channel = (
            grpc.aio.secure_channel(target, channel_credentials(tls), options=_OPTIONS)
            if tls is not None and tls.enabled
            else grpc.aio.insecure_channel(target, options=_OPTIONS)
        )
        self._timeout_s = timeout_s
        self._range = self._unary("KV/Range", pb.RangeRequest, pb.RangeResponse)
        self._put = self._unary("KV/Put", pb.PutRequest, pb.PutResponse)
        self._delete = self._unary("KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)
        self._txn = self._unary("KV/Txn", pb.TxnRequest, pb.TxnResponse)
        self._compact = self._unary("KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
        self._grant = self._unary("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
        self._revoke = self._unary(
            "Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse
        )
        self._keep_alive = self._channel.stream_stream(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=pb.LeaseKeepAliveResponse.FromString,
        )
        self._watch = self._channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )

    async def get(self, key: str) -> KeyValue | None:
        """Returns the key's value."""
        reply = await self._call(self._range, pb.RangeRequest(key=key.encode()))
        return _item(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str) -> Listing:
        """Returns everything under the prefix."""
        start = prefix.encode()
        request = pb.RangeRequest(key=start, range_end=prefix_end(start))
        reply = await self._call(self._range, request)
        return Listing(tuple(_item(kv) for kv in reply.kvs), reply.header.revision)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Writes one key."""
        request = pb.PutRequest(key=key.encode(), value=value, lease=lease_id)
        reply = await self._call(self._put, request)
        return int(reply.header.revision)

    async def delete(self, key: str) -> bool:
        """Deletes one key."""
        reply = await self._call(self._delete, pb.DeleteRangeRequest(key=key.encode()))
        return bool(reply.deleted)

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes everything under the prefix."""
        start = prefix.encode()
        request = pb.DeleteRangeRequest(key=start, range_end=prefix_end(start))
        reply = await self._call(self._delete, request)
        return int(reply.deleted)

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Put | Delete],
        otherwise: Sequence[Put | Delete] = (),
    ) -> TxnResult:
        """Compares and writes at one revision."""
        request = pb.TxnRequest(
            compare=[part for compare in compares for part in _conditions(compare)],
            success=[_op(op) for op in then],
            failure=[_op(op) for op in otherwise],
        )
        reply = await self._call(self._txn, request)
        return TxnResult(reply.succeeded, reply.header.revision)

    async def grant(self, ttl_s: float) -> Lease:
        """Returns a new lease; etcd counts whole seconds."""
        reply = await self._call(self._grant, pb.LeaseGrantRequest(ttl=math.ceil(ttl_s)))
        if reply.error:
            raise StoreUnavailable(f"no lease: {reply.error}")
        return Lease(reply.id, float(reply.ttl))

    async def keep_alive(self, lease_id: int) -> float:
        """Renews the lease, by a stream of its own that ends here."""
        rpc = self._keep_alive(timeout=self._timeout_s, metadata=_REQUIRE_LEADER)
        try:
            await rpc.write(pb.LeaseKeepAliveRequest(id=lease_id))
            reply = await rpc.read()
            if reply is grpc.aio.EOF:
                raise StoreUnavailable("the keepalive stream ended")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StoreUnavailable(_text(error)) from None
        finally:
            rpc.cancel()
        if reply.ttl <= 0:
            raise LeaseLost(f"lease {lease_id:x} has expired")
        return float(reply.ttl)

    async def revoke(self, lease_id: int) -> None:
        """Ends the lease."""
        try:
            await self._call(self._revoke, pb.LeaseRevokeRequest(id=lease_id))
        except LeaseLost:
            pass

    async def compact(self, revision: int) -> None:
        """Forgets history before a revision; for tests and operators."""
        try:
            await self._call(self._compact, pb.CompactionRequest(revision=revision))
        except Compacted:
            pass

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchBatch]:
        """Yields changes from a revision on; one gRPC stream."""
        start = prefix.encode()
        create = pb.WatchCreateRequest(
            key=start, range_end=prefix_end(start), start_revision=from_revision
        )
        rpc = self._watch(metadata=_REQUIRE_LEADER)
        try:
            async with asyncio.timeout(_WATCH_START_TIMEOUT_S):
                await rpc.write(pb.WatchRequest(create_request=create))
                reply = await rpc.read()
            pending: list[Change] = []
            while reply is not grpc.aio.EOF:
                if reply.compact_revision:
                    raise Compacted(reply.compact_revision)
                if reply.canceled:
                    raise StoreUnavailable(f"watch canceled: {reply.cancel_reason}")
                pending += [_change(event) for event in reply.events]
                # `created` pins "now"; a fragment is not a whole revision yet.
                if reply.created or (pending and not reply.fragment):
                    yield WatchBatch(tuple(pending), reply.header.revision)
                    pending = []
                reply = await rpc.read()
            raise StoreUnavailable("the watch stream ended")
        except TimeoutError:
            raise StoreUnavailable("the watch did not start in time") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StoreUnavailable(_text(error)) from None
        finally:
            rpc.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    def _unary(self, path: str, request: Any, response: Any) -> Any:
        return self._channel.unary_unary(
            f"/etcdserverpb.{path}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            _raise(error)


def prefix_end(prefix: bytes) -> bytes:
    """Returns the end of the range of all keys with this prefix: its successor at its length."""
    for i in range(len(prefix) - 1, -1, -1):
        if prefix[i] < 0xFF:
            return prefix[:i] + bytes([prefix[i] + 1])
    return b"\0"  # etcd's sign for "to the end"


def _raise(error: grpc.aio.AioRpcError) -> NoReturn:
    text = error.details() or ""
    if _LEASE_NOT_FOUND in text:
        raise LeaseLost(text) from None
    if _COMPACTED in text:
        raise Compacted(0) from None
    raise StoreUnavailable(_text(error)) from None


def _text(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"etcd: {error.code().name} {error.details()}"
    return "etcd: the call was over"


def _item(kv: pb.KeyValue) -> KeyValue:
    key = kv.key.decode(errors="replace")
    return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _change(event: pb.Event) -> Change:
    item = None if event.type == _DELETED else _item(event.kv)
    return Change(event.kv.key.decode(errors="replace"), item, event.kv.mod_revision)


def _conditions(compare: Compare) -> list[pb.Compare]:
    key = compare.key.encode()
    parts = []
    if compare.create_revision is not None:
        parts.append(
            pb.Compare(target=_CREATE_REVISION, key=key, create_revision=compare.create_revision)
        )
    if compare.mod_revision is not None:
        parts.append(pb.Compare(target=_MOD_REVISION, key=key, mod_revision=compare.mod_revision))
    if compare.value is not None:
        parts.append(pb.Compare(target=_VALUE, key=key, value=compare.value))
    return parts


def _op(op: Put | Delete) -> pb.RequestOp:
    if isinstance(op, Put):
        put = pb.PutRequest(key=op.key.encode(), value=op.value, lease=op.lease_id)
        return pb.RequestOp(request_put=put)
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=op.key.encode()))
