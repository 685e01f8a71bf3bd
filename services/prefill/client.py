"""Calls a prefill engine: run directly, follow what it pulled, abort.

client = PrefillClient(channels)
async with client.run(address, spec) as events:            # tests, tools, adapters
    async for event in events: ...
async with client.attach(address, "entrypoint-1") as channel:
    async with channel.subscribe(key) as events: ...       # what the balancer assigned there
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from pelagos.engine.v1 import records_pb2
from pelagos.prefill.v1 import prefill_pb2 as pb
from pelagos.prefill.v1 import prefill_pb2_grpc as rpc

from services.common.rpc_client import Channels, call, stream_call
from services.engine.attach_client import AttachChannel, attach
from services.engine.records import key_to_proto
from services.engine.requests import RequestKey

_RPC_TIMEOUT_S = 2.0


class PrefillClient:
    """One object for any number of prefill instances; addresses are arguments."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def _stub(self, address: str) -> rpc.PrefillServiceStub:
        return rpc.PrefillServiceStub(self._channels.get(address))

    @asynccontextmanager
    async def run(
        self, address: str, spec: records_pb2.RequestSpec
    ) -> AsyncIterator[AsyncIterator[records_pb2.RequestEvent]]:
        """Enqueues a request there and follows it; leaving the block aborts it."""
        async with stream_call(self._stub(address).Run, pb.RunRequest(spec=spec)) as stream:

            async def events() -> AsyncIterator[records_pb2.RequestEvent]:
                async for response in stream:
                    yield response.event

            yield events()

    def attach(
        self, address: str, entrypoint_id: str
    ) -> AbstractAsyncContextManager[AttachChannel]:
        """Opens the channel that carries the events of all requests of one entrypoint there."""
        return attach(self._stub(address).Attach, pb.AttachRequest, entrypoint_id)

    async def abort(self, address: str, key: RequestKey) -> bool:
        """Ends a request in any state; False when it is not there. Safe to repeat."""
        request = pb.AbortRequest(key=key_to_proto(key))
        answer = await call(self._stub(address).Abort, request, timeout_s=_RPC_TIMEOUT_S)
        return bool(answer.found)
