"""Tells the directory which window states this machine holds, and fetches those of others.

One logical map, split by key over the directory's shards: the owner of a key is the live shard e
that maximises SHA-256(key16 + id(e)). What is lost with a shard costs a replay, no more.
Source: kvcache-and-balancing.md, section 10.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable

import xxhash
from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import swa_pb2, swa_pb2_grpc

from services.common.errors import Failure, Reason
from services.common.membership import ClusterView, Member
from services.common.rpc_client import Channels, call, stream_call
from services.engine.swa_pool import KEY16_BYTES, Entry, SwaPool, location_of
from services.engine.tasks import TaskSet

log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_FETCH_TIMEOUT_S = 5.0
_TTL_S = 180


def owner(key16: bytes, members: Iterable[Member]) -> Member | None:
    """The shard that a key belongs to; None when there is none."""
    return max(
        members,
        key=lambda m: hashlib.sha256(key16 + m.instance_id.encode()).digest(),
        default=None,
    )


class SwaDirectory:
    """This machine's pool, as the rest of the cluster sees it."""

    def __init__(
        self,
        pool: SwaPool,
        view: ClusterView,
        channels: Channels,
        tasks: TaskSet,
        *,
        instance_id: str,
        address: str,
        host_epoch: int,
        role: str = "swa",
    ) -> None:
        self._pool = pool
        self._view = view
        self._channels = channels
        self._tasks = tasks
        self._instance_id = instance_id
        self._address = address
        self._host_epoch = host_epoch
        self._role = role

    def keep(self, block_key: bytes, position: int, window: bytes, approximate: bool) -> None:
        """Puts a state into the pool; it is announced after the bytes are there (2.6)."""
        entry = self._pool.put(block_key, position, window, approximate)
        if entry is not None and entry.data is window:
            self._tasks.start(self._publish(entry), "swa publish")

    def _stub(self, key16: bytes) -> swa_pb2_grpc.SwaDirectoryServiceStub | None:
        member = owner(key16, self._view.members(self._role))
        if member is None:
            return None
        return swa_pb2_grpc.SwaDirectoryServiceStub(self._channels.get(member.address))

    def _key(self, key16: bytes) -> swa_pb2.SwaKey:
        return swa_pb2.SwaKey(key16=key16, layout_digest=self._pool.layout_digest)

    async def _publish(self, entry: Entry) -> None:
        stub = self._stub(entry.key16)
        if stub is None:
            return
        location = location_of(entry, self._instance_id, self._address, self._host_epoch)
        request = swa_pb2.PublishRequest(
            key=self._key(entry.key16), location=location, ttl_s=_TTL_S
        )
        try:
            await call(stub.Publish, request, timeout_s=_TIMEOUT_S)
        except Failure as failure:
            log.info("state not announced", extra={"reason": failure.reason.value})

    def withdraw(self, key16: bytes, host_instance_id: str | None = None) -> None:
        """Takes an announcement back: ours after an eviction, another's when it was gone."""
        self._tasks.start(
            self._withdraw(key16, host_instance_id or self._instance_id), "swa withdraw"
        )

    async def _withdraw(self, key16: bytes, host_instance_id: str) -> None:
        stub = self._stub(key16)
        if stub is None:
            return
        request = swa_pb2.WithdrawRequest(key=self._key(key16), host_instance_id=host_instance_id)
        try:
            await call(stub.Withdraw, request, timeout_s=_TIMEOUT_S)
        except Failure as failure:
            log.info("state not withdrawn", extra={"reason": failure.reason.value})

    async def fetch(self, block_key: bytes, location: records_pb2.SwaLocation) -> bytes | None:
        """The bytes of a state that the directory knows of; None is a miss."""
        key16 = block_key[:KEY16_BYTES]
        if location.host_instance_id == self._instance_id:
            entry = self._pool.get(key16)
            return entry.data if entry is not None else None
        stub = swa_pb2_grpc.SwaPoolServiceStub(self._channels.get(location.address))
        request = swa_pb2.GetStateRequest(
            key=self._key(key16), slot=location.slot, host_epoch=location.host_epoch
        )
        data = bytearray()
        try:
            async with stream_call(stub.GetState, request, timeout_s=_FETCH_TIMEOUT_S) as stream:
                async for piece in stream:
                    data += piece.data
        except Failure as failure:
            if failure.reason is Reason.NOT_FOUND:
                self.withdraw(key16, location.host_instance_id)
            return None
        if xxhash.xxh3_128(data).digest() != location.digest:
            log.warning("a state with a wrong digest", extra={"host": location.host_instance_id})
            return None
        return bytes(data)
