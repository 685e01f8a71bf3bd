"""DecodeService: messages in, the engine asked, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pelagos.decode.v1 import decode_pb2 as pb

from services.common import tracing
from services.common.errors import Failure, Reason
from services.common.rpc_errors import to_proto
from services.decode.engine import DecodeEngine
from services.engine import streams
from services.engine.records import key_from_proto
from services.engine.requests import RequestKey


class DecodeServicer:
    """The RPCs of engine.md, section 7.1, over one engine."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        boot_id = self._engine.identity.boot_id
        try:
            held = self._engine.reserve(
                key_from_proto(request.key),
                request.num_tokens,
                request.expected_output_tokens,
                request.layout_signature,
                request.rank,
                request.lease_ms,
            )
        except Failure as failure:
            if failure.reason is Reason.INVALID_REQUEST:
                raise
            return pb.ReserveResponse(
                granted=False,
                boot_id=boot_id,
                refusal=to_proto(failure),
                retry_after_ms=round(1e3 * (failure.retry_after_s or 0)),
            )
        return pb.ReserveResponse(
            granted=True,
            reservation_id=held.reservation_id,
            rank=held.rank.rank,
            blocks_held=len(held.table),
            lease_ms=request.lease_ms or self._engine.config.lease_ms,
            boot_id=boot_id,
        )

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:
        seconds = self._engine.renew(request.reservation_id, request.lease_ms)
        return pb.RenewResponse(lease_ms=round(1e3 * seconds))

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(released=self._engine.release(request.reservation_id))

    async def Run(
        self, request: pb.RunRequest, context: Any
    ) -> AsyncGenerator[pb.RunResponse, None]:
        with tracing.span(
            "decode.commit",
            {tracing.REQUEST_ID: request.record.key.request_id},
            traceparent=request.record.spec.traceparent,
            kind="server",
        ):
            constraint = await self._engine.constraint_of(request.record)
            sequence = self._engine.commit(
                request.reservation_id, request.record, request.transfer_id, constraint
            )
        channel = self._engine.hub.connect()
        ended = request.detached
        try:
            sequence.stream.attach(channel, 0, sequence.stream.next_index)
            async for batch in channel.batches():
                for event in batch:
                    yield pb.RunResponse(event=event)
                    if event.HasField("tokens"):
                        num = len(event.tokens.token_ids) // 4
                        sequence.stream.ack(event.tokens.first_index + num)
                    ended = ended or event.WhichOneof("event") in ("finished", "moved", "failed")
                if ended:
                    return
        finally:
            self._engine.hub.disconnect(channel)
            if not ended:
                self._engine.abort(sequence.key)

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        async for response in streams.attach(self._engine.hub, requests, pb.AttachResponse):
            yield response

    async def Export(
        self, request: pb.ExportRequest, context: Any
    ) -> AsyncIterator[pb.ExportResponse]:
        key = key_from_proto(request.key)
        self._engine.find(key)
        # Whether the caller waits or not: a request that was paused must move or go on.
        work = self._engine.tasks.start(self._export(key, request.target_address), "export")
        yield await asyncio.shield(work)

    async def _export(self, key: RequestKey, address: str) -> pb.ExportResponse:
        rank, sequence = self._engine.find(key)
        if not address:
            sequence.paused = True
            await rank.settled(sequence)
            record, _ = self._engine.record_of(rank, sequence)
            self._engine.end_resumable(rank, sequence)
            return pb.ExportResponse(record=record)
        try:
            await self._engine.export(key, address)
        except Failure as failure:
            if not sequence.finished:
                self._engine.resume(key)
            return pb.ExportResponse(failed=to_proto(failure))
        return pb.ExportResponse(moved=sequence.stream.end_event.moved)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(found=self._engine.abort(key_from_proto(request.key)))
