"""Connections to storage nodes: shards asked for in one turn of the loop travel in one message.

A node that fails or is slow is a status, never an exception: whoever asked has other shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from pelagos.kvstore.v1 import storage_pb2 as pb
from pelagos.kvstore.v1 import storage_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure
from services.common.rpc_client import Channels, call, stream_call
from services.kvstore.backends.base import PutStatus, ReadStatus, ShardRef
from services.kvstore.placement import SHARD_HEADER_BYTES

_MAX_BATCH: Final = 64
# Of shards in one message, well below what a message may hold.
_MAX_BATCH_BYTES: Final = 8 << 20
_REFS_AT_ONCE: Final = 8_192
_EWMA: Final = 0.2
_TIMEOUT_S: Final = 5.0
_LIST_TIMEOUT_S: Final = 120.0
# A node that is frozen keeps its connection: silence between two parts is what tells it.
_LIST_SILENCE_S: Final = 10.0
_READ: Final = {
    pb.SHARD_STATUS_OK: ReadStatus.OK,
    pb.SHARD_STATUS_ABSENT: ReadStatus.ABSENT,
    pb.SHARD_STATUS_CORRUPT: ReadStatus.DATA,
}
_PUT: Final = {
    pb.SHARD_STATUS_BUFFERED: PutStatus.BUFFERED,
    pb.SHARD_STATUS_DURABLE: PutStatus.DURABLE,
}


def ref_to_proto(ref: ShardRef) -> pb.ShardRef:
    """Returns the message of a ref."""
    return pb.ShardRef(key16=ref.key16, put_id=ref.put_id, index=ref.shard)


class NodeLink:
    """One node, at one address."""

    def __init__(
        self,
        channels: Channels,
        address: str,
        clock: Clock = SYSTEM_CLOCK,
        timeout_s: float = _TIMEOUT_S,
        largest_bytes: int = 0,
    ) -> None:
        self.address = address
        # Shards asked for in one message: as many as fit into the answer when all are the largest.
        fitting = _MAX_BATCH_BYTES // largest_bytes if largest_bytes else _MAX_BATCH
        self._max_gets = max(1, min(fitting, _MAX_BATCH))
        self._timeout_s = timeout_s
        self.storage = rpc.StorageServiceStub(channels.get(address))
        self.meta = rpc.MetaServiceStub(channels.get(address))
        self._clock = clock
        self.latency_s = 0.0
        self._gets: list[tuple[ShardRef, asyncio.Future[tuple[bytes | None, ReadStatus]]]] = []
        self._puts: list[tuple[bytes, int, bool, asyncio.Future[PutStatus | None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, ref: ShardRef) -> asyncio.Future[tuple[bytes | None, ReadStatus]]:
        """Returns a future of the shard, header and data, as the node checked it."""
        answer: asyncio.Future[tuple[bytes | None, ReadStatus]] = (
            asyncio.get_running_loop().create_future()
        )
        if not self._gets:
            asyncio.get_running_loop().call_soon(self._send_gets)
        self._gets.append((ref, answer))
        return answer

    def put(self, shard: bytes, epoch: int, durable: bool) -> asyncio.Future[PutStatus | None]:
        """Returns a future of how the write ended; None when the node did not take it."""
        answer: asyncio.Future[PutStatus | None] = asyncio.get_running_loop().create_future()
        if not self._puts:
            asyncio.get_running_loop().call_soon(self._send_puts)
        self._puts.append((shard, epoch, durable, answer))
        return answer

    def _spawn(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send_gets(self) -> None:
        waiting, self._gets = self._gets, []
        for at in range(0, len(waiting), self._max_gets):
            self._spawn(self._get_batch(waiting[at : at + self._max_gets]))

    async def _get_batch(
        self, batch: Sequence[tuple[ShardRef, asyncio.Future[tuple[bytes | None, ReadStatus]]]]
    ) -> None:
        started_s = self._clock.now_s()
        request = pb.GetShardsRequest(shards=[ref_to_proto(ref) for ref, _ in batch])
        found: list[tuple[bytes | None, ReadStatus]] = [(None, ReadStatus.IO)] * len(batch)
        try:
            answer = await call(self.storage.GetShards, request, timeout_s=self._timeout_s)
            for number, result in enumerate(answer.shards[: len(batch)]):
                status = _READ.get(result.status, ReadStatus.IO)
                found[number] = (result.bytes if status is ReadStatus.OK else None, status)
        except Failure:
            pass
        finally:
            self._measure(self._clock.now_s() - started_s)
            for (_, future), result in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(result)

    def _send_puts(self) -> None:
        waiting, self._puts = self._puts, []
        while waiting:
            count = num_bytes = 0
            for shard, epoch, _, _ in waiting[:_MAX_BATCH]:
                num_bytes += len(shard)
                # A shard cut for an older map must not pass the fence in a newer one's message.
                if count and (num_bytes > _MAX_BATCH_BYTES or epoch != waiting[0][1]):
                    break
                count += 1
            self._spawn(self._put_batch(waiting[:count]))
            waiting = waiting[count:]

    async def _put_batch(
        self, batch: Sequence[tuple[bytes, int, bool, asyncio.Future[PutStatus | None]]]
    ) -> None:
        request = pb.PutShardsRequest(
            shards=[pb.Shard(bytes=shard, index=shard[5]) for shard, *_ in batch],
            epoch=batch[0][1],
            durable=any(durable for _, _, durable, _ in batch),
        )
        found: list[PutStatus | None] = [None] * len(batch)
        try:
            answer = await call(self.storage.PutShards, request, timeout_s=self._timeout_s)
            for number, status in enumerate(answer.statuses[: len(batch)]):
                full = PutStatus.FULL if status == pb.SHARD_STATUS_FULL else None
                found[number] = _PUT.get(status, full)
        except Failure:
            pass
        finally:
            for (*_, future), status in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(status)

    def _measure(self, spent_s: float) -> None:
        self.latency_s += _EWMA * (spent_s - self.latency_s)

    async def delete(self, refs: Sequence[ShardRef], epoch: int, erase: bool = False) -> int:
        """Frees shards; returns how many, fewer when the node is away (its orphans go later)."""
        num_deleted, _ = await self._free(refs, epoch, erase)
        return num_deleted

    async def erase(self, refs: Sequence[ShardRef], epoch: int) -> bool:
        """Frees shards and overwrites their bytes; returns whether the node has said so of all."""
        _, is_done = await self._free(refs, epoch, True)
        return is_done

    async def _free(self, refs: Sequence[ShardRef], epoch: int, erase: bool) -> tuple[int, bool]:
        num_deleted = 0
        for at in range(0, len(refs), _REFS_AT_ONCE):
            shards = [ref_to_proto(ref) for ref in refs[at : at + _REFS_AT_ONCE]]
            request = pb.DeleteShardsRequest(shards=shards, epoch=epoch, erase=erase)
            try:
                answer = await call(self.storage.DeleteShards, request, timeout_s=self._timeout_s)
            except Failure:
                return num_deleted, False
            num_deleted += int(answer.deleted)
        return num_deleted, True

    async def report_bad(self, ref: ShardRef, why: str) -> None:
        """Tells the node, as the primary of a shard's group, that the shard is missing or bad."""
        request = pb.ReportShardRequest(
            shard=ref_to_proto(ref), reason=why, finding=pb.SHARD_FINDING_BAD
        )
        with suppress(Failure):
            await call(self.meta.ReportShard, request, timeout_s=self._timeout_s)

    async def report_orphan(self, ref: ShardRef) -> None:
        """Tells the node, as the primary of a shard's group, that no record names the shard."""
        finding = pb.SHARD_FINDING_ORPHAN
        request = pb.ReportShardRequest(shard=ref_to_proto(ref), finding=finding)
        with suppress(Failure):
            await call(self.meta.ReportShard, request, timeout_s=self._timeout_s)

    async def headers(self, group: int = -1) -> list[bytes] | None:
        """Returns the headers of the node's shards; None when it is away or says nothing more."""
        found: list[bytes] = []
        request = pb.ListShardsRequest(pg=group)
        try:
            async with stream_call(
                self.storage.ListShards, request, timeout_s=_LIST_TIMEOUT_S
            ) as stream:
                while True:
                    async with asyncio.timeout(_LIST_SILENCE_S):
                        part = await stream.read()
                    if part is None:
                        return found
                    found += [
                        part.headers[at : at + SHARD_HEADER_BYTES]
                        for at in range(0, len(part.headers), SHARD_HEADER_BYTES)
                    ]
        except (Failure, TimeoutError):
            return None

    async def close(self) -> None:
        """Ends what is on its way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Links:
    """Links by node id; a node that comes back at another address gets a new one."""

    def __init__(
        self,
        channels: Channels,
        address_of: Callable[[str], str | None],
        clock: Clock = SYSTEM_CLOCK,
        timeout_s: float = _TIMEOUT_S,
        largest_bytes: int = 0,
    ) -> None:
        self._largest_bytes = largest_bytes  # of a shard; 0 when it is small
        self._timeout_s = timeout_s
        self._channels = channels
        self._address_of = address_of
        self._clock = clock
        self._links: dict[str, NodeLink] = {}

    def get(self, node: str) -> NodeLink | None:
        """Returns the link of a node that is up, else None."""
        address = self._address_of(node)
        if address is None:
            return None
        link = self._links.get(node)
        if link is None or link.address != address:
            link = self._links[node] = NodeLink(
                self._channels, address, self._clock, self._timeout_s, self._largest_bytes
            )
        return link

    async def close(self) -> None:
        """Ends what is on its way."""
        for link in self._links.values():
            await link.close()
