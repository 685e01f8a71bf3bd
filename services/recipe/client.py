"""The codec as siblings see it: over gRPC, or embedded in their own process.

    response = await recipe.encode(pb.EncodeRequest(protocol=pb.PROTOCOL_CHAT, body=body))
    async with recipe.parse() as parsing:
        results = await parsing.step(items)

Both take and give the messages of `recipe.proto` and raise the same Failures; the API's own error
body is `failure.metadata["body"]`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast

from pelagos.recipe.v1 import recipe_pb2 as pb
from pelagos.recipe.v1 import recipe_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call, stream_call

# The codec itself, for tools without a service: training renders and encodes as requests are.
from services.recipe import codec as codec
from services.recipe import make_tokenizer as make_tokenizer
from services.recipe.config import RecipeConfig
from services.recipe.encoder import BODY_KEY as BODY_KEY
from services.recipe.encoder import RequestEncoder
from services.recipe.parse_session import ParseSession
from services.recipe.registry import Registry, load_registry

ENCODE_TIMEOUT_S = 30.0


class Parsing(Protocol):
    """One call's streams."""

    async def step(self, items: Sequence[pb.ParseItem]) -> Sequence[pb.ParseResult]:
        """Takes steps of any streams and returns what they gave; waits only if some step answers.

        Every batch must hold a step that gives a result (ids, text, an end): steps that give none
        are answered with the next ones.
        """
        ...


class Recipe(Protocol):
    """What the client and the embedded codec offer."""

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Converts, renders and encodes one request."""
        ...

    async def count_tokens(self, request: pb.CountTokensRequest) -> pb.CountTokensResponse:
        """Counts a request's prompt tokens, images included."""
        ...

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Encodes plain text."""
        ...

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Decodes ids."""
        ...

    async def list_models(self) -> Sequence[pb.Model]:
        """Lists the models, sorted by name."""
        ...

    def parse(self) -> AbstractAsyncContextManager[Parsing]:
        """Opens a call for output streams."""
        ...


class RecipeClient:
    """The codec over gRPC. Every call but `parse` is pure and may be repeated elsewhere."""

    def __init__(
        self, channels: Channels, address: str, timeout_s: float = ENCODE_TIMEOUT_S
    ) -> None:
        self._channels = channels
        self._address = address
        self._timeout_s = timeout_s

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Converts, renders and encodes one request."""
        return cast(pb.EncodeResponse, await self._call("Encode", request))

    async def count_tokens(self, request: pb.CountTokensRequest) -> pb.CountTokensResponse:
        """Counts a request's prompt tokens."""
        return cast(pb.CountTokensResponse, await self._call("CountTokens", request))

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Encodes plain text."""
        return cast(pb.TokenizeResponse, await self._call("Tokenize", request))

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Decodes ids."""
        return cast(pb.DetokenizeResponse, await self._call("Detokenize", request))

    async def list_models(self) -> Sequence[pb.Model]:
        """Lists the models."""
        return list((await self._call("ListModels", pb.ListModelsRequest())).models)

    @asynccontextmanager
    async def parse(self) -> AsyncIterator[Parsing]:
        """Opens a call for output streams."""
        async with stream_call(self._stub().Parse) as stream:
            yield _GrpcParsing(stream)

    async def _call(self, method: str, request: Any) -> Any:
        return await call(getattr(self._stub(), method), request, timeout_s=self._timeout_s)

    def _stub(self) -> Any:
        return rpc.RecipeServiceStub(self._channels.get(self._address))


class _GrpcParsing:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def step(self, items: Sequence[pb.ParseItem]) -> Sequence[pb.ParseResult]:
        await self._stream.write(pb.ParseRequest(items=items))
        response = await self._stream.read()
        if response is None:
            raise Failure(Reason.BACKEND_LOST, "the codec has ended the call")
        return list(response.results)


class EmbeddedRecipe:
    """The same code in the caller's process: one hop less, the caller's cores."""

    def __init__(self, config: RecipeConfig, registry: Registry | None = None) -> None:
        """Loads the tokenizers unless they are given. Raises: RuntimeError, ValueError."""
        self._config = config
        self._registry = registry or load_registry(config)
        self._encoder = RequestEncoder(self._registry, config.context_limit)

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Converts, renders and encodes one request."""
        return self._encoder.encode(request)

    async def count_tokens(self, request: pb.CountTokensRequest) -> pb.CountTokensResponse:
        """Counts a request's prompt tokens."""
        return self._encoder.count_tokens(request)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Encodes plain text."""
        return self._encoder.tokenize(request)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Decodes ids."""
        return self._encoder.detokenize(request)

    async def list_models(self) -> Sequence[pb.Model]:
        """Lists the models."""
        return list(self._encoder.list_models().models)

    @asynccontextmanager
    async def parse(self) -> AsyncIterator[Parsing]:
        """Opens a session for output streams."""
        yield _EmbeddedParsing(ParseSession(self._registry, self._config.max_streams_per_call))


class _EmbeddedParsing:
    def __init__(self, session: ParseSession) -> None:
        self._session = session

    async def step(self, items: Sequence[pb.ParseItem]) -> Sequence[pb.ParseResult]:
        return self._session.step(items)
