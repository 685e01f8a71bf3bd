"""The token-level API in memory, with the same contract as the client: no engines, no network.

Output is a function of the prompt: its tokens in order, over and over. Two keys of two tenants are
known; everything else about a request is checked as the real server does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from pelagos.engine.v1 import records_pb2 as records
from pelagos.entrypoint.v1 import entrypoint_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.ids import new_request_id
from services.entrypoint.client import DEFAULT_TIMEOUT_S
from services.entrypoint.constraint import constraint_named
from services.entrypoint.ledger import Entry, Ledger, Outcome
from services.entrypoint.token_request import check_request

MODEL = "fake"
MAX_MODEL_LEN = 100_000
_TOKEN_BYTES = 4


class FakeService:
    """What all keys share: the requests that can be explained."""

    def __init__(self) -> None:
        self.ledger = Ledger(1000)
        self.tenants = {"key-a": "tenant-a", "key-b": "tenant-b"}


class FakeEntrypoint:
    """The API with one key."""

    def __init__(self, service: FakeService, key: str = "key-a") -> None:
        self._service = service
        self._key = key

    @asynccontextmanager
    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncIterator[AsyncIterator[pb.GenerateResponse]]:
        """Opens a generation; leaving the block cancels it."""
        async with aclosing(self._events(request)) as events:
            yield events

    async def models(self) -> list[pb.Model]:
        """Returns the one model."""
        self._tenant()
        return [
            pb.Model(
                id=MODEL, context_length=MAX_MODEL_LEN, prefill_instances=1, decode_instances=1
            )
        ]

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        """Returns what is known of a request of this key's tenant."""
        entry = self._service.ledger.explain(request_id, self._tenant())
        return pb.ExplainResponse(
            prompt_tokens=entry.prompt_tokens,
            outcome=entry.outcome.value if entry.outcome else "",
            attempts=entry.attempts,
            ended_by="absent",
        )

    async def _events(
        self, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        tenant = self._tenant()
        if request.model != MODEL:
            raise Failure(Reason.NOT_FOUND, f"the model {request.model} is not served here")
        constraint_named(request.constraint_type, request.constraint_source)
        check_request(request, MAX_MODEL_LEN)
        request_id = request.request_id or new_request_id()
        num_prompt_tokens = len(request.prompt_tokens) // _TOKEN_BYTES
        entry = Entry(request_id, tenant, "tokens", 0.0, prompt_tokens=num_prompt_tokens)
        entry.attempts = 1
        ledger = self._service.ledger
        ledger.open(entry)
        outcome = Outcome.CLIENT_CANCEL
        try:
            usage = records.Usage(prompt_tokens=num_prompt_tokens)
            for index in range(request.sampling.max_tokens):
                start = index % num_prompt_tokens * _TOKEN_BYTES
                token = request.prompt_tokens[start : start + _TOKEN_BYTES]
                response = pb.GenerateResponse(
                    request_id=request_id,
                    tokens=records.Tokens(first_index=index, token_ids=token),
                )
                if index == 0:
                    response.usage.CopyFrom(usage)
                usage.output_tokens = index + 1
                yield response
            outcome = Outcome.OK
            finished = records.Finished(reason=records.FINISH_REASON_LENGTH, usage=usage)
            yield pb.GenerateResponse(request_id=request_id, finished=finished, usage=usage)
        finally:
            ledger.close(entry, outcome)

    def _tenant(self) -> str:
        tenant = self._service.tenants.get(self._key)
        if tenant is None:
            raise Failure(Reason.UNAUTHENTICATED, "the API key is not valid")
        return tenant
