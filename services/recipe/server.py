"""gRPC in front of the codec: message in, codec asked, message out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pelagos.recipe.v1 import recipe_pb2 as pb
from pelagos.recipe.v1 import recipe_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.common.metrics import Metrics
from services.recipe.config import RecipeConfig
from services.recipe.encoder import RequestEncoder
from services.recipe.parse_session import ParseSession
from services.recipe.registry import Registry

log = logging.getLogger(__name__)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

# Encoding uses the codec's own threads; these only wait for it, or convert a large body.
_NUM_WORKERS = 4


class RecipeServicer(rpc.RecipeServiceServicer):
    """The RPCs. All state of a stream is in its call."""

    def __init__(self, config: RecipeConfig, registry: Registry, metrics: Metrics) -> None:
        self._config = config
        self._registry = registry
        self._encoder = RequestEncoder(registry, config.context_limit)
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="recipe")
        self._num_waiting = 0
        self._sessions: set[ParseSession] = set()
        self._prompt_tokens = metrics.counter("prompt_tokens_total", "Ids of encoded prompts")
        self._parsed_tokens = metrics.counter("parsed_tokens_total", "Ids given to streams")
        self._refused = metrics.counter("refused_total", "Requests refused", ("reason",))
        metrics.gauge("open_streams", "Output streams open").set_function(lambda: self.num_streams)
        metrics.gauge("waiting_encodes", "Bodies beside the event loop").set_function(
            lambda: self._num_waiting
        )
        metrics.gauge("cached_bytes", "Text and ids kept of earlier prompts").set_function(
            lambda: sum(t.tokenizer.num_cached_bytes for t in registry.tokenizers.values())
        )

    @property
    def num_streams(self) -> int:
        """Returns how many output streams are open."""
        return sum(session.num_open for session in self._sessions)

    def close(self) -> None:
        """Ends the workers; what they still do is thrown away."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    # -- RPCs

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        try:
            response = await self._run(self._encoder.encode, request, len(request.body))
        except Failure as failure:
            self._refused.labels(reason=failure.reason.value).inc()
            raise
        self._prompt_tokens.inc(len(response.token_ids) // 4)
        return response

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Any
    ) -> pb.CountTokensResponse:
        return await self._run(self._encoder.count_tokens, request, len(request.body))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return await self._run(self._encoder.tokenize, request, len(request.text))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        return await self._run(self._encoder.detokenize, request, len(request.token_ids))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        return self._encoder.list_models()

    async def Parse(
        self, request_iterator: AsyncIterator[pb.ParseRequest], context: Any
    ) -> AsyncIterator[pb.ParseResponse]:
        session = ParseSession(self._registry, self._config.max_streams_per_call)
        self._sessions.add(session)
        num_counted = 0
        try:
            async for request in request_iterator:
                results = session.step(request.items)
                self._parsed_tokens.inc(session.num_token_ids - num_counted)
                num_counted = session.num_token_ids
                # Also when nothing is to be said: a caller may wait for the answer to each message.
                yield pb.ParseResponse(results=results)
        finally:
            self._sessions.discard(session)
            if session.num_open:
                log.info("a parse call ended", extra={"open_streams": session.num_open})

    async def _run(
        self, work: Callable[[_Request], _Response], request: _Request, num_bytes: int
    ) -> _Response:
        """Works in place for a small input, beside the event loop for a large one."""
        if num_bytes <= self._config.inline_max_bytes:
            return work(request)
        if self._num_waiting >= self._config.max_waiting_encodes:
            raise Failure(
                Reason.OVERLOADED,
                f"{self._num_waiting} requests are being encoded",
                {"num_waiting": str(self._num_waiting)},
                retry_after_s=0.5,
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work, request)
        finally:
            self._num_waiting -= 1
