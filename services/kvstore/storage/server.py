"""The RPCs of a storage node: DATA (shards on its disk) and META (records of what it leads)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc.aio
from pelagos.kvstore.v1 import storage_pb2 as pb
from pelagos.kvstore.v1 import storage_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.kvstore.backends.base import (
    BlockBackend,
    PutStatus,
    ReadStatus,
    ShardRef,
    StorageAway,
)
from services.kvstore.formats import MAX_FLAGS, MAX_SHARDS, Record, ShardHeader, is_class
from services.kvstore.gc.policy import Waterlines, admits_put
from services.kvstore.limits import check_number, pin_life_s
from services.kvstore.placement import SHARD_HEADER_BYTES
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.leader import CommitStatus, Leader
from services.kvstore.storage.stripes import fits

_PUT: Final = {
    PutStatus.BUFFERED: pb.SHARD_STATUS_BUFFERED,
    PutStatus.DURABLE: pb.SHARD_STATUS_DURABLE,
    PutStatus.FULL: pb.SHARD_STATUS_FULL,
}
_COMMIT: Final = {
    CommitStatus.COMMITTED: pb.COMMIT_STATUS_COMMITTED,
    CommitStatus.DEGRADED: pb.COMMIT_STATUS_DEGRADED,
    CommitStatus.EXISTS: pb.COMMIT_STATUS_EXISTS,
    CommitStatus.REFUSED: pb.COMMIT_STATUS_REFUSED,
}
_HEARTBEAT_S: Final = 1.0
# How far a writer's map may be ahead of ours, and for how long that counts unless ours follows.
_MAX_EPOCHS_AHEAD: Final = 64
_AHEAD_S: Final = 30.0
_MAX_REFS: Final = 1024


def ref_of(message: pb.ShardRef) -> ShardRef:
    """Returns the ref. Raises Failure for a key of another size."""
    if len(message.key16) != 16 or message.index > 255:
        raise Failure(Reason.INVALID_REQUEST, "a shard has a key of 16 bytes")
    return ShardRef(message.key16, message.index, message.put_id)


def keys_of(keys16: bytes) -> list[bytes]:
    """Returns the index keys.

    Raises: Failure(INVALID_REQUEST) for other lengths, or more keys than one message may hold.
    """
    if len(keys16) % 16:
        raise Failure(Reason.INVALID_REQUEST, "index keys have 16 bytes each")
    check_number(len(keys16) // 16)
    return [keys16[at : at + 16] for at in range(0, len(keys16), 16)]


class StorageServicer(rpc.StorageServiceServicer):
    """DATA: slots of shards."""

    def __init__(
        self,
        node: str,
        backend: BlockBackend,
        view: MapView,
        leader: Leader,
        scrub_bytes_per_s: float,
        lines: Waterlines,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._node = node
        self._backend = backend
        self._view = view
        self._leader = leader
        self._scrub_bytes_per_s = scrub_bytes_per_s
        self._lines = lines
        self._ahead = 0  # epoch of a writer whose map is newer than ours
        self._ahead_until_s = float("-inf")
        self.num_bad = 0

    @property
    def _epoch(self) -> int:
        known = self._view.pgmap.epoch if self._view.pgmap is not None else 0
        is_ahead = self._clock.now_s() < self._ahead_until_s
        return max(known, self._ahead) if is_ahead else known

    def _fence(self, epoch: int) -> None:
        """Refuses a writer with an older map, and learns of a newer one.

        Only for a while, and only of one that may be: a writer of another cluster, whose node was
        at this address once, must not shut ours out.
        """
        current = self._epoch
        known = self._view.pgmap.epoch if self._view.pgmap is not None else epoch
        if not current <= epoch <= known + _MAX_EPOCHS_AHEAD:
            raise Failure(
                Reason.STALE_EPOCH,
                "the placement map has moved on" if epoch < current else "no map of that epoch",
                {"epoch": str(epoch), "current": str(current)},
            )
        if epoch > known:
            self._ahead, self._ahead_until_s = epoch, self._clock.now_s() + _AHEAD_S

    def _fits(self, shard: bytes) -> bool:
        header, pgmap = ShardHeader.parse(shard[:SHARD_HEADER_BYTES]), self._view.pgmap
        if header is None or pgmap is None:
            return header is not None and header.is_usable
        return fits(header, pgmap)

    async def PutShards(
        self, request: pb.PutShardsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PutShardsResponse:
        """Writes shards."""
        self._fence(request.epoch)
        statuses = []
        stat = await self._backend.stat()
        num_used = stat.num_used
        for shard in request.shards:
            if not self._fits(shard.bytes):
                statuses.append(pb.SHARD_STATUS_CORRUPT)
                continue
            ttl_class = shard.bytes[9]
            if not admits_put(stat.num_slots, num_used, ttl_class, self._lines):
                statuses.append(pb.SHARD_STATUS_FULL)
                continue
            num_used += 1
            pieces = [shard.bytes[:SHARD_HEADER_BYTES], shard.bytes[SHARD_HEADER_BYTES:]]
            try:
                # Durable ones wait together: the group commit takes all that were written.
                status = await self._backend.put_shard(pieces)
            except ValueError:
                statuses.append(pb.SHARD_STATUS_CORRUPT)
                continue
            statuses.append(_PUT[status])
        if request.durable:
            await self._backend.sync()
            done = (pb.SHARD_STATUS_BUFFERED, pb.SHARD_STATUS_DURABLE)
            statuses = [pb.SHARD_STATUS_DURABLE if s in done else s for s in statuses]
        return pb.PutShardsResponse(statuses=statuses)

    async def GetShards(
        self, request: pb.GetShardsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetShardsResponse:
        """Reads shards."""
        if len(request.shards) > _MAX_REFS:
            raise Failure(Reason.INVALID_REQUEST, "too many shards in one read")
        results = []
        for message in request.shards:
            data, status = await self._backend.get_shard(ref_of(message))
            if data is not None:
                results.append(pb.ShardResult(status=pb.SHARD_STATUS_OK, bytes=data))
                continue
            damaged = status not in (ReadStatus.ABSENT, ReadStatus.REUSED)
            self.num_bad += damaged
            results.append(
                pb.ShardResult(
                    status=pb.SHARD_STATUS_CORRUPT if damaged else pb.SHARD_STATUS_ABSENT
                )
            )
        return pb.GetShardsResponse(shards=results)

    async def DeleteShards(
        self, request: pb.DeleteShardsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DeleteShardsResponse:
        """Frees shards."""
        self._fence(request.epoch)
        refs = [ref_of(message) for message in request.shards]
        try:
            deleted = await self._backend.delete_shards(refs, request.erase)
        except StorageAway as error:
            raise Failure(Reason.BACKEND_LOST, f"bytes may be left: {error}") from None
        return pb.DeleteShardsResponse(deleted=deleted)

    async def ListShards(
        self, request: pb.ListShardsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ListShardsResponse]:
        """Lists headers."""
        pgmap = self._view.pgmap
        async with aclosing(self._backend.list_headers()) as parts:
            async for headers in parts:
                if request.pg < 0 and not request.created_before_unix_s:
                    yield pb.ListShardsResponse(headers=headers)
                    continue
                wanted = []
                for at in range(0, len(headers), SHARD_HEADER_BYTES):
                    raw = headers[at : at + SHARD_HEADER_BYTES]
                    header = ShardHeader.parse(raw)
                    if header is None:
                        continue
                    before_s = request.created_before_unix_s
                    is_old = not before_s or header.created_s < before_s
                    in_group = request.pg < 0 or (
                        pgmap is not None and pgmap.group_of(header.key16) == request.pg
                    )
                    if is_old and in_group:
                        wanted.append(raw)
                if wanted:
                    yield pb.ListShardsResponse(headers=b"".join(wanted))

    async def Scrub(
        self, request: pb.ScrubRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ScrubResponse]:
        """Checks everything."""
        report = await self._backend.scrub(request.bytes_per_s or self._scrub_bytes_per_s)
        self.num_bad += len(report.bad)
        await self._leader.tell_primaries([ref for ref, _ in report.bad])
        yield pb.ScrubResponse(
            checked=report.num_checked,
            bad=[pb.ShardRef(key16=r.key16, put_id=r.put_id, index=r.shard) for r, _ in report.bad],
        )

    async def StatNode(
        self, request: pb.StatNodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StatNodeResponse:
        """Counts."""
        stat = await self._backend.stat()
        return pb.StatNodeResponse(
            node_id=self._node,
            slots=stat.num_slots,
            used=stat.num_used,
            bad=self.num_bad,
            epoch=self._epoch,
            primary_of=len(self._leader.led),
        )


class MetaServicer(rpc.MetaServiceServicer):
    """META: records, for the groups this node leads."""

    def __init__(self, leader: Leader, view: MapView, clock: Clock = SYSTEM_CLOCK) -> None:
        self._leader = leader
        self._meta = leader.meta
        self._view = view
        self._clock = clock
        self._is_ending = False

    def end_streams(self) -> None:
        """Ends the streams that would live as long as the process; for its drain."""
        self._is_ending = True
        self._meta.wake_followers()

    def _may_be(self, record: Record) -> bool:
        pgmap = self._view.pgmap
        num_shards = MAX_SHARDS if pgmap is None else pgmap.profile.num_shards
        in_stripe = record.shards < 1 << num_shards
        return in_stripe and is_class(record.ttl_class) and record.flags <= MAX_FLAGS

    async def Commit(
        self, request: pb.CommitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CommitResponse:
        """Commits a block."""
        pgmap = self._view.pgmap
        key16, record = request.object.key16, Record.parse(request.object.record)
        if len(key16) != 16 or record is None or not self._may_be(record):
            raise Failure(Reason.INVALID_REQUEST, "an object has a key and a sound record")
        if pgmap is None or request.epoch < pgmap.epoch:
            raise Failure(Reason.STALE_EPOCH, "the placement map has moved on")
        if not self._leader.leads(key16):
            raise Failure(Reason.WRONG_ROLE, "this node does not lead the group")
        status, put_id, replaced = self._leader.commit(key16, record)
        if replaced is not None:
            await self._leader.free_put(key16, replaced)
        return pb.CommitResponse(status=_COMMIT[status], put_id=put_id)

    async def Lookup(
        self, request: pb.LookupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LookupResponse:
        """Looks records up."""
        objects = []
        for key16 in keys_of(request.keys16):
            fields = self._meta.get(key16) if self._leader.leads(key16) else None
            if fields is None:
                # Named when it is of a group that we lead: then it is absent for certain.
                objects.append(pb.ObjectRecord(key16=key16 if self._leader.leads(key16) else b""))
                continue
            put_id, index, created, epoch, shards, state, ttl_class, flags = fields
            record = Record(put_id, index, created, epoch, shards, state, ttl_class, flags)
            objects.append(pb.ObjectRecord(key16=key16, record=record.pack(0)))
        return pb.LookupResponse(objects=objects)

    async def FollowLog(
        self, request: pb.FollowLogRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.FollowLogResponse]:
        """Streams the log of all groups this node leads."""
        if request.pg >= 0:
            raise Failure(Reason.UNSUPPORTED_FEATURE, "one log holds all groups of a node: pg -1")
        follow = self._meta.follow(request.log_id, request.from_seq, _HEARTBEAT_S)
        async with aclosing(follow) as parts:
            async for part in parts:
                if self._is_ending:
                    return
                yield pb.FollowLogResponse(
                    next_seq=part.next_seq,
                    reset=part.reset,
                    entries=part.entries,
                    log_id=part.log_id,
                    level=part.level,
                )

    async def TouchObjects(
        self, request: pb.TouchObjectsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TouchObjectsResponse:
        """Renews access."""
        keys_of(request.keys16)
        if not is_class(request.ttl_class):
            raise Failure(
                Reason.INVALID_REQUEST,
                f"{request.ttl_class} is no retention class",
                {"ttl_class": str(request.ttl_class)},
            )
        return pb.TouchObjectsResponse(
            touched=self._meta.touch(request.keys16, 16, request.ttl_class)
        )

    async def PinObjects(
        self, request: pb.PinObjectsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PinObjectsResponse:
        """Holds blocks against eviction."""
        ttl_s = pin_life_s(request.pin_id, request.ttl_ms)
        keys_of(request.keys16)
        return pb.PinObjectsResponse(
            pinned=self._meta.pin(request.pin_id, request.keys16, ttl_s, self._clock.now_s())
        )

    async def ReportShard(
        self, request: pb.ReportShardRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReportShardResponse:
        """Takes note of a missing or damaged shard, of one that no record names, or of a put that
        is about to be taken back."""
        ref = ref_of(request.shard)
        if request.finding == pb.SHARD_FINDING_ORPHAN:
            await self._leader.settle(ref.key16, ref.put_id)
            return pb.ReportShardResponse()
        if request.finding == pb.SHARD_FINDING_WITHDRAWN:
            self._leader.withdraw(ref.put_id)
            return pb.ReportShardResponse()
        return pb.ReportShardResponse(
            queued=self._leader.report_bad(ref.key16, ref.put_id, ref.shard)
        )

    async def EvictObjects(
        self, request: pb.EvictObjectsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EvictObjectsResponse:
        """Evicts blocks that nobody has pinned, or all of them in an emergency."""
        keys = keys_of(request.keys16)
        if request.reason not in ("tenant", "emergency"):
            pinned = self._meta.pinned(self._clock.now_s())
            keys = [key16 for key16 in keys if key16 not in pinned]
        return pb.EvictObjectsResponse(evicted=await self._leader.evict(keys, request.reason))

    async def AppendLog(
        self, request: pb.AppendLogRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AppendLogResponse:
        """Not needed here: a new primary rebuilds a group from shard headers (docs/adr)."""
        raise Failure(Reason.UNSUPPORTED_FEATURE, "groups are taken over from shard headers")
