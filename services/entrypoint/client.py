"""The token-level API as callers see it.

    client = EntrypointClient(channels, "127.0.0.1:7001", key)
    async with client.generate(GenerateRequest(model=..., prompt_tokens=..., ...)) as output:
        async for event in output:      # tokens, then finished or failed
            ...

Leaving the block cancels the request everywhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

import grpc.aio
from pelagos.entrypoint.v1 import entrypoint_pb2 as pb
from pelagos.entrypoint.v1 import entrypoint_pb2_grpc as rpc

from services.common.rpc_client import Channels, stream_call
from services.common.rpc_errors import from_rpc_error

DEFAULT_TIMEOUT_S: Final = 600.0


class Entrypoint(Protocol):
    """What the client and the fake offer."""

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AbstractAsyncContextManager[AsyncIterator[pb.GenerateResponse]]:
        """Opens a generation. Failures before the first token raise from the iterator."""
        ...

    async def models(self) -> list[pb.Model]:
        """Returns the models served, sorted by id."""
        ...

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        """Returns what is known of a request of this key's tenant. Raises Failure(NOT_FOUND)."""
        ...


class EntrypointClient:
    """The API over gRPC with one key."""

    def __init__(self, channels: Channels, address: str, key: str) -> None:
        self._stub = rpc.EntrypointServiceStub(channels.get(address))
        self._metadata = (("authorization", f"Bearer {key}"),)

    @asynccontextmanager
    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncIterator[AsyncIterator[pb.GenerateResponse]]:
        """Opens a generation; leaving the block cancels it."""
        async with stream_call(
            self._with_key(self._stub.Generate), request, timeout_s=timeout_s
        ) as stream:
            yield aiter(stream)

    async def models(self) -> list[pb.Model]:
        """Returns the models served, sorted by id."""
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest())
        return list(response.models)

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        """Returns what is known of a request of this key's tenant."""
        response: pb.ExplainResponse = await self._call(
            self._stub.Explain, pb.ExplainRequest(request_id=request_id)
        )
        return response

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=10.0)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def _with_key(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = (), **kwargs: Any) -> Any:
            return method(*args, metadata=(*metadata, *self._metadata), **kwargs)

        return call
