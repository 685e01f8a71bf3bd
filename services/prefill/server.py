"""PrefillService: messages in, the engine asked, messages out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pelagos.prefill.v1 import prefill_pb2 as pb

from services.engine import streams
from services.engine.records import key_from_proto
from services.prefill.engine import PrefillEngine

_ENDS = ("finished", "moved", "failed")


class PrefillServicer:
    """The RPCs of engine.md, section 7.1, over one engine."""

    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine

    async def Run(
        self, request: pb.RunRequest, context: Any
    ) -> AsyncGenerator[pb.RunResponse, None]:
        work = self._engine.submit(request.spec)
        channel = self._engine.hub.connect()
        ended = False
        try:
            work.stream.attach(channel, 0, 0)
            async for batch in channel.batches():
                for event in batch:
                    yield pb.RunResponse(event=event)
                    if event.HasField("tokens"):
                        num = len(event.tokens.token_ids) // 4
                        work.stream.ack(event.tokens.first_index + num)
                    ended = ended or event.WhichOneof("event") in _ENDS
                if ended:
                    return
        finally:
            self._engine.hub.disconnect(channel)
            if not ended:
                self._engine.abort(work.key)

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        async for response in streams.attach(self._engine.hub, requests, pb.AttachResponse):
            yield response

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(found=self._engine.abort(key_from_proto(request.key)))
