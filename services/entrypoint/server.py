"""The token-level gRPC API: the pipeline below the codec, for callers that bring their own."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio
from pelagos.engine.v1 import records_pb2 as records
from pelagos.entrypoint.v1 import entrypoint_pb2 as pb
from pelagos.entrypoint.v1 import entrypoint_pb2_grpc as rpc
from pelagos.so_compiler.v1 import so_compiler_pb2 as so

from services.common import tracing
from services.common.call import current_call, set_current_call
from services.common.errors import Failure, Reason
from services.common.ids import new_request_id
from services.common.rpc_errors import to_proto
from services.common.rpc_server import deadline_of
from services.entrypoint.auth import SCOPE_EXPLAIN, SCOPE_INFERENCE, Identity, bearer_key
from services.entrypoint.constraint import Constraint, constraint_named
from services.entrypoint.generation import Generation, Job, settle
from services.entrypoint.key_store import KeyStore
from services.entrypoint.ledger import Outcome, outcome_of
from services.entrypoint.pipeline import (
    TOKEN_API,
    Admitted,
    Parts,
    Pipeline,
    call_of,
    demand_fitting,
)
from services.entrypoint.token_request import check_request
from services.entrypoint.token_stream import Delivered

_MAX_QUEUED_STEPS: Final = 4096


class EntrypointServicer(rpc.EntrypointServiceServicer):
    """EntrypointService of one process."""

    def __init__(self, parts: Parts, pipeline: Pipeline, keys: KeyStore) -> None:
        self._parts = parts
        self._pipeline = pipeline
        self._keys = keys

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Generates; failures before the first token are the call's status."""
        parts, clock = self._parts, self._parts.engines.clock
        identity = self._identify(context, SCOPE_INFERENCE)
        profile = parts.catalog.profile(request.model, is_exact=True)
        constraint = constraint_named(request.constraint_type, request.constraint_source)
        check_request(request, profile.max_model_len)
        request_id = request.request_id or new_request_id()
        deadline_s = deadline_of(context, clock)
        now_s = clock.now_s()
        admitted = await self._pipeline.admit(
            TOKEN_API,
            request_id,
            identity,
            now_s,
            None if deadline_s == float("inf") else max(0.0, deadline_s - now_s),
            request.cache_salt,
            current_call().traceparent,
        )
        set_current_call(call_of(admitted))
        run = _TokenRun(parts, admitted)
        outcome = Outcome.INTERNAL
        try:
            async with asyncio.timeout(max(0.0, admitted.deadline_s - clock.now_s())) as deadline:
                async for response in run.stream(request, profile, constraint):
                    yield response
            outcome = run.outcome
        except (GeneratorExit, asyncio.CancelledError):
            outcome = Outcome.CLIENT_CANCEL
            raise
        except TimeoutError:
            outcome = Outcome.DEADLINE if deadline.expired() else Outcome.INTERNAL
            raise Failure(Reason.DEADLINE, "the request's deadline has passed") from None
        except Failure as failure:
            outcome = outcome_of(failure)
            raise
        finally:
            await run.close()
            self._pipeline.close(admitted, outcome)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """Lists the models that engines serve."""
        self._identify(context, SCOPE_INFERENCE)
        catalog = self._parts.catalog
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    id=model_id,
                    context_length=profile.max_model_len,
                    prefill_instances=catalog.count("prefill", model_id),
                    decode_instances=catalog.count("decode", model_id),
                )
                for model_id, profile in sorted(catalog.models().items())
            ]
        )

    async def Explain(
        self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExplainResponse:
        """Says what is known of a request of the caller's tenant."""
        identity = self._identify(context, SCOPE_EXPLAIN)
        entry = self._parts.ledger.explain(request.request_id, identity.tenant)
        return pb.ExplainResponse(
            prompt_tokens=entry.prompt_tokens,
            hit_tokens=entry.hit_tokens,
            replayed_tokens=entry.replayed_tokens,
            ended_by=entry.ended_by,
            stages=[pb.StageTime(stage=stage, at_ms=at_ms) for stage, at_ms in entry.stages],
            outcome=entry.outcome.value if entry.outcome else "",
            attempts=entry.attempts,
            instances=entry.instances,
        )

    def _identify(self, context: grpc.aio.ServicerContext, scope: str) -> Identity:
        headers = [
            (key.encode(), value.encode())
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        ]
        identity = self._keys.identify(bearer_key(headers))
        identity.demand(scope)
        return identity


class _TokenRun:
    """Sink of one request's tokens; at most a window of steps waits for the caller."""

    def __init__(self, parts: Parts, admitted: Admitted) -> None:
        self._parts = parts
        self._admitted = admitted
        self._steps: deque[Delivered] = deque()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._generation: Generation | None = None
        self._working: asyncio.Future[records.FinishReason.ValueType] | None = None
        self._compiling: asyncio.Future[records.GrammarRef] | None = None
        self.outcome = Outcome.OK

    def on_stage(self, stage: str) -> None:
        """Notes the stage and, once matched, the hit."""
        entry = self._admitted.entry
        entry.reached(stage, self._parts.engines.clock.now_s())
        if stage == "matched" and self._generation is not None:
            hit = self._generation.hit
            entry.hit_tokens, entry.ended_by = hit.hit_tokens, hit.ended_by

    def on_tokens(self, delivered: Delivered, usage: records.Usage) -> None:
        """Queues a step for the caller."""
        entry = self._admitted.entry
        if entry.first_token_s is None:
            self._parts.instruments.first_token(entry, self._parts.engines.clock.now_s())
            self._admitted.share.leave()
            if usage.prompt_tokens:
                entry.hit_tokens = usage.cached_tokens
                entry.replayed_tokens = usage.replayed_tokens
        self._steps.append(delivered)
        if len(self._steps) > _MAX_QUEUED_STEPS and self._working is not None:
            self._working.cancel()  # the engine does not honour credits
        self._wake.set()

    async def wait_room(self) -> None:
        """Returns when the caller has taken everything."""
        while self._steps:
            self._drained.clear()
            await self._drained.wait()

    async def stream(
        self, request: pb.GenerateRequest, profile: Any, constraint: Constraint | None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yields tokens, then how it ended."""
        parts, admitted = self._parts, self._admitted
        num_prompt_tokens = len(request.prompt_tokens) // 4
        admitted.entry.prompt_tokens = num_prompt_tokens
        demand_fitting(num_prompt_tokens, profile)
        now_s = parts.engines.clock.now_s()
        num_tokens = num_prompt_tokens + request.sampling.max_tokens
        parts.quota.reserve_tokens(admitted.grant, admitted.identity, num_tokens, now_s)
        parts.load.add_tokens(admitted.share, num_prompt_tokens)
        if constraint is not None:
            self._compiling = asyncio.ensure_future(self._compile(constraint, profile.tokenizer_id))
        job = self._job(request, profile)
        generation = self._generation = Generation(parts.engines, job, self, self._compiling)
        working = self._working = asyncio.ensure_future(generation.run())
        working.add_done_callback(lambda _: self._wake.set())
        index = 0
        sent_usage = False
        while True:
            while self._steps:
                delivered = self._steps.popleft()
                response = pb.GenerateResponse(
                    request_id=admitted.request_id,
                    tokens=records.Tokens(
                        first_index=index,
                        token_ids=delivered.token_ids,
                        logprobs=delivered.logprobs,
                        top=delivered.top,
                    ),
                )
                if not sent_usage:
                    sent_usage = True
                    response.usage.CopyFrom(self._usage(generation))
                index += len(delivered.token_ids) // 4
                yield response
                generation.acknowledge(index)
            self._drained.set()
            if working.done() and not self._steps:
                yield self._end(working, generation, started=index > 0)
                return
            await self._wake.wait()
            self._wake.clear()

    async def close(self) -> None:
        """Lets go of everything."""
        if self._compiling is not None:
            self._compiling.cancel()
        if self._working is not None:
            await settle(self._working)
        if self._generation is not None:
            entry, stream = self._admitted.entry, self._generation.stream
            entry.output_tokens = stream.next_index
            entry.attempts, entry.instances = stream.attempt, stream.instances

    def _end(
        self,
        working: asyncio.Future[records.FinishReason.ValueType],
        generation: Generation,
        *,
        started: bool,
    ) -> pb.GenerateResponse:
        response = pb.GenerateResponse(
            request_id=self._admitted.request_id, usage=self._usage(generation)
        )
        try:
            reason = working.result()
        except Failure as failure:
            if not started:
                raise
            # After the first token the end is a message: what was sent stands.
            self.outcome = outcome_of(failure)
            response.failed.CopyFrom(to_proto(failure))
            return response
        response.finished.CopyFrom(records.Finished(reason=reason, usage=response.usage))
        return response

    def _usage(self, generation: Generation) -> records.Usage:
        usage = records.Usage()
        usage.CopyFrom(generation.stream.usage)
        usage.prompt_tokens = self._admitted.entry.prompt_tokens
        usage.output_tokens = generation.num_output_tokens  # over all attempts
        return usage

    async def _compile(self, constraint: Constraint, tokenizer_id: str) -> records.GrammarRef:
        compiled, address = await self._parts.compiler.compile(
            so.CompileRequest(
                type=constraint.type,
                source=constraint.source,
                strict=True,
                tokenizer_id=tokenizer_id,
                tenant=self._admitted.identity.tenant,
            )
        )
        return constraint.grammar_ref(compiled.artifact_key, address)

    def _job(self, request: pb.GenerateRequest, profile: Any) -> Job:
        admitted, clock = self._admitted, self._parts.engines.clock
        sampling = records.Sampling()
        sampling.CopyFrom(request.sampling)
        if not sampling.seed:
            sampling.seed = secrets.randbits(63) or 1
        remaining_s = admitted.deadline_s - clock.now_s()
        return Job(
            request_id=admitted.request_id,
            tenant=admitted.identity.tenant,
            model=request.model,
            profile=profile,
            prompt_tokens=request.prompt_tokens,
            sampling=sampling,
            deadline_s=admitted.deadline_s,
            deadline_unix_ms=int(1000 * (clock.wall_s() + remaining_s)),
            traceparent=tracing.current_traceparent() or admitted.traceparent,
            cache_salt=request.cache_salt,
            media=list(request.media),
        )
