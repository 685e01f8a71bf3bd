"""EncoderService: messages in, the card asked, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pelagos.encoder.v1 import encoder_pb2 as pb

from services.common import tracing
from services.common.call import current_call
from services.common.errors import Failure, Reason
from services.common.rpc_errors import to_proto
from services.encoder.engine import EncoderEngine
from services.encoder.patches import Plan

PIECE_BYTES = 1 << 20
_MAX_IMAGES_PER_CALL = 64
_MAX_SIZES = 1024


class EncoderServicer:
    """The RPCs over one card."""

    def __init__(self, engine: EncoderEngine) -> None:
        self._engine = engine

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        if len(request.widths) != len(request.heights) or len(request.widths) > _MAX_SIZES:
            raise Failure(Reason.INVALID_REQUEST, "one height per width, at most 1024 of them")
        plans = [
            self._engine.plan(width, height)
            for width, height in zip(request.widths, request.heights, strict=True)
        ]
        return pb.PlanResponse(images=[geometry_to_proto(plan) for plan in plans])

    async def Encode(
        self, requests: AsyncIterator[pb.EncodeRequest], context: Any
    ) -> AsyncIterator[pb.EncodeResponse]:
        """Results in order of completion; leaving cancels what has not started."""
        results: asyncio.Queue[list[pb.EncodeResponse] | None] = asyncio.Queue()
        room = asyncio.Semaphore(_MAX_IMAGES_PER_CALL)

        async def one(request: pb.EncodeRequest) -> None:
            try:
                results.put_nowait(await self._encode(request))
            finally:
                room.release()

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    async for request in requests:
                        await room.acquire()
                        group.create_task(one(request))
            finally:
                results.put_nowait(None)

        reader = asyncio.create_task(read(), name="images of a call")
        try:
            while (pieces := await results.get()) is not None:
                for piece in pieces:
                    yield piece
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _encode(self, request: pb.EncodeRequest) -> list[pb.EncodeResponse]:
        engine = self._engine
        try:
            with tracing.span(
                "encoder.encode",
                {tracing.REQUEST_ID: request.request_id},
                traceparent=current_call().traceparent,
                kind="server",
            ):
                encoded = await engine.encode(
                    request.width, request.height, request.data, request.digest, request.tenant
                )
        except Failure as failure:
            return [pb.EncodeResponse(item_id=request.item_id, error=to_proto(failure))]
        geometry = geometry_to_proto(encoded.plan)
        return [
            pb.EncodeResponse(
                item_id=request.item_id,
                geometry=geometry,
                embeddings=encoded.data[at : at + PIECE_BYTES],
                offset_bytes=at,
                total_bytes=len(encoded.data),
                hidden=engine.config.model.hidden,
                cached=encoded.cached,
            )
            for at in range(0, len(encoded.data), PIECE_BYTES)
        ]


def geometry_to_proto(plan: Plan) -> pb.Geometry:
    return pb.Geometry(
        width=plan.width,
        height=plan.height,
        vit_width=plan.vit_width,
        vit_height=plan.vit_height,
        llm_width=plan.llm_width,
        llm_height=plan.llm_height,
        num_tokens=plan.num_tokens,
        num_patches=plan.num_patches,
    )
