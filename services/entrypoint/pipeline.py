"""One API request, start to end.

    encode -> [compile] + match -> queue -> follow engines -> parse -> events

Before the first byte of the answer everything that can fail is plain HTTP. The status line goes out
with the first token, or with the first keep-alive comment, whichever comes first, so a deadline
that passes in the queue is still a 504 (UR-61). Every request that was accepted ends in exactly
one outcome (P-01, P-40).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pelagos.engine.v1 import records_pb2 as records
from pelagos.recipe.v1 import recipe_pb2 as recipe
from pelagos.so_compiler.v1 import so_compiler_pb2 as so

from services.common import tracing
from services.common.call import Call
from services.common.errors import Api, Failure, Reason
from services.entrypoint import telemetry
from services.entrypoint.admission import Door, Load, LoadShare
from services.entrypoint.api.dialect import Headers, error_response, public_message
from services.entrypoint.auth import Identity
from services.entrypoint.catalog import Catalog, Profile
from services.entrypoint.client_left import ClientLeft, as_ours
from services.entrypoint.codec_models import CodecModels
from services.entrypoint.config import EntrypointConfig
from services.entrypoint.constraint import Constraint, constraint_of
from services.entrypoint.generation import Engines, Generation, Job, settle
from services.entrypoint.http_body import Body
from services.entrypoint.http_server import HttpServer
from services.entrypoint.image_fetch import ImageFetcher
from services.entrypoint.key_store import KeyStore
from services.entrypoint.ledger import Entry, Ledger, Outcome, outcome_of
from services.entrypoint.media import media_spans
from services.entrypoint.neighbours import Codec, Compiler
from services.entrypoint.parse_mux import ParseMux
from services.entrypoint.quota import Grant, Quota
from services.entrypoint.responses_asgi import Answer
from services.entrypoint.stream_output import StreamOutput

log = logging.getLogger(__name__)

PROTOCOLS: Final = {
    Api.CHAT: recipe.PROTOCOL_CHAT,
    Api.RESPONSES: recipe.PROTOCOL_RESPONSES,
    Api.MESSAGES: recipe.PROTOCOL_MESSAGES,
}
_ID_PREFIXES: Final = {Api.CHAT: "chatcmpl-", Api.RESPONSES: "resp_", Api.MESSAGES: "msg_"}
_MAX_SEED: Final = 2**63
TOKEN_API: Final = "tokens"  # label of the token-level API, which has no error shape of its own


@dataclass(frozen=True)
class Admitted:
    """A request that is past the door.

    Args:
        deadline_s: monotonic.
    """

    api: Api
    request_id: str
    identity: Identity
    entry: Entry
    grant: Grant
    share: LoadShare
    deadline_s: float
    cache_salt: str = ""
    traceparent: str = ""


@dataclass
class Parts:
    """What every request of this process uses."""

    config: EntrypointConfig
    codec: Codec
    compiler: Compiler
    catalog: Catalog
    models: CodecModels
    engines: Engines
    mux: ParseMux
    ledger: Ledger
    door: Door
    load: Load
    quota: Quota
    instruments: telemetry.Instruments
    fetcher: ImageFetcher
    keys: KeyStore
    outputs: set[StreamOutput]
    http: HttpServer | None = None


class Pipeline:
    """Runs requests; holds no state of its own between them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._clock = parts.engines.clock

    async def admit(
        self,
        api: Api | str,
        request_id: str,
        identity: Identity,
        arrived_s: float,
        timeout_s: float | None,
        cache_salt: str,
        traceparent: str,
    ) -> Admitted:
        """Takes the request through the door, or raises Failure (counted as refused)."""
        parts = self._parts
        if parts.ledger.has(request_id):
            raise Failure(Reason.CONFLICT, "a request with this id is in progress")
        label = api.value if isinstance(api, Api) else api
        grant = await parts.door.enter(identity)
        share = None
        try:
            share = parts.load.enter()
            entry = parts.ledger.open(Entry(request_id, identity.tenant, label, arrived_s))
        except Failure:
            if share is not None:
                share.leave()
            parts.door.leave(grant)
            raise
        parts.instruments.accepted.labels(api=label).inc()
        parts.engines.budget.on_request()
        config = parts.config
        limit_s = min(timeout_s or config.default_timeout_s, config.max_timeout_s)
        return Admitted(
            api=api if isinstance(api, Api) else Api.CHAT,
            request_id=request_id,
            identity=identity,
            entry=entry,
            grant=grant,
            share=share,
            deadline_s=arrived_s + limit_s,
            cache_salt=cache_salt,
            traceparent=traceparent,
        )

    def close(self, admitted: Admitted, outcome: Outcome) -> None:
        """Ends the request's account: shares, ledger, metrics. Exactly once."""
        parts, entry = self._parts, admitted.entry
        admitted.share.leave()
        parts.door.leave(admitted.grant, entry.prompt_tokens + entry.output_tokens)
        parts.ledger.close(entry, outcome)
        parts.instruments.closed(entry, outcome, self._clock.now_s())

    async def answer(self, admitted: Admitted, read: Callable[[], Any], answer: Answer) -> Outcome:
        """Reads, runs and answers a request whatever happens; returns how it ended.

        Cancelling the task is the client's leaving: everything is let go within the turn.
        """
        parts = self._parts
        request = ApiRun(parts, admitted, answer)
        outcome = Outcome.INTERNAL
        failure: Failure | None = None
        left_s = max(0.0, admitted.deadline_s - self._clock.now_s())
        try:
            async with asyncio.timeout(left_s) as deadline:
                await request.run(await read())
            outcome = Outcome.OK
        except Failure as error:
            failure = as_ours(error)
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_CANCEL
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                failure = Failure(Reason.DEADLINE, "the request's deadline has passed")
            else:
                log.exception("unforeseen failure", extra={"request_id": admitted.request_id})
                failure = Failure(Reason.INTERNAL, type(error).__name__)
        finally:
            if failure is not None:
                outcome = outcome_of(failure)
            request.let_go(is_failed=failure is not None)
            self.close(admitted, outcome)
        if failure is not None:
            await request.report(failure)
        return outcome

    async def count_tokens(self, api: Api, body: Body) -> recipe.CountTokensResponse:
        """Returns the length of a prompt, without queueing anything."""
        request = recipe.CountTokensRequest(protocol=PROTOCOLS[api], body=body.data)
        return await self._parts.codec.count_tokens(request)

    def tick(self) -> None:
        """Sends keep-alive comments where nothing was sent for long; called every second."""
        now_s = self._clock.now_s()
        for output in list(self._parts.outputs):
            output.tick(now_s)


class ApiRun:
    """One request of an HTTP API."""

    def __init__(self, parts: Parts, admitted: Admitted, answer: Answer) -> None:
        self._parts = parts
        self._admitted = admitted
        self._answer = answer
        self._output: StreamOutput | None = None
        self._compiling: asyncio.Task[records.GrammarRef] | None = None

    async def run(self, body: Body) -> None:
        """Runs the request to the end of its answer, or raises Failure."""
        parts, admitted = self._parts, self._admitted
        encoded, profile = await self._encode(body)
        entry = admitted.entry
        entry.prompt_tokens = len(encoded.token_ids) // 4
        limits = admitted.identity.limits
        if limits.max_output_tokens:
            encoded.max_tokens = min(encoded.max_tokens, limits.max_output_tokens)
        num_tokens = entry.prompt_tokens + encoded.max_tokens
        demand_fitting(entry.prompt_tokens, profile)
        now_s = parts.engines.clock.now_s()
        parts.quota.reserve_tokens(admitted.grant, admitted.identity, num_tokens, now_s)
        parts.load.add_tokens(admitted.share, entry.prompt_tokens)
        constraint = constraint_of(encoded)
        if constraint is not None:
            self._compiling = asyncio.ensure_future(self._compile(constraint, encoded.tokenizer_id))
        job = self._job(encoded, profile)
        output = self._output = StreamOutput(
            parts.mux,
            self._answer,
            admitted,
            parts.instruments,
            parts.config.limits,
            parts.engines.clock,
            stream=encoded.stream,
            headers=self._headers,
        )
        generation = Generation(parts.engines, job, output, self._compiling)
        output.begin(
            generation,
            recipe.ParseOpen(
                parse_state=encoded.parse_state,
                response_id=_ID_PREFIXES[admitted.api] + secrets.token_hex(12),
                created_unix_s=int(time.time()),
                id_seed=secrets.randbits(63),
                eager=parts.config.eager_output,
                separate_usage=parts.config.separate_usage_chunk,
                model_version=encoded.model_version,
            ),
        )
        parts.outputs.add(output)
        working = asyncio.ensure_future(generation.run())
        try:
            await output.pump(working)
        finally:
            await settle(working)
            entry.output_tokens = generation.num_output_tokens
            entry.attempts = generation.stream.attempt
            entry.instances = generation.stream.instances

    async def report(self, failure: Failure) -> None:
        """Tells the client how the request failed, in the form that fits what was sent already."""
        admitted, answer = self._admitted, self._answer
        try:
            if answer.finished or isinstance(failure, ClientLeft):
                return
            if answer.started:
                assert self._output is not None
                await self._output.end_with_failure(failure, public_message(failure))
                return
        finally:
            if self._output is not None:
                self._output.close()
        response = error_response(
            failure, admitted.api, admitted.request_id, self._parts.engines.rng
        )
        await answer.whole(response.status, response.headers, response.body)

    def let_go(self, *, is_failed: bool) -> None:
        """Frees what the run still holds. The codec's stream stays for the words of a failure."""
        if self._compiling is not None:
            self._compiling.cancel()
        if self._output is not None:
            self._parts.outputs.discard(self._output)
            if not is_failed:
                self._output.close()

    async def _encode(self, body: Body) -> tuple[recipe.EncodeResponse, Profile]:
        parts, admitted = self._parts, self._admitted
        profile, missing = self._profile(body)
        with tracing.span("entrypoint.encode", {telemetry.API: admitted.api.value}):
            encoded = await parts.codec.encode(
                recipe.EncodeRequest(
                    protocol=PROTOCOLS[admitted.api],
                    body=body.data,
                    context_limit=profile.max_model_len if profile else 0,
                )
            )
        admitted.entry.reached("encoded", parts.engines.clock.now_s())
        if profile is None:
            raise missing  # valid, but nobody serves it
        if not profile.speaks(encoded.tokenizer_id):
            # One model answers to every name, but only in the vocabulary it was trained with.
            raise Failure(
                Reason.NOT_FOUND,
                f"the model {encoded.model} is not served here",
                {"model": encoded.model},
            )
        if any(image.url for image in encoded.images):
            encoded = await self._with_fetched_images(body, encoded, profile)
        return encoded, profile

    def _profile(self, body: Body) -> tuple[Profile | None, Failure]:
        """Returns what serves the model asked for, or why nobody does.

        The codec speaks first: it words what is wrong with a request better than we could.
        """
        name = body.document.get("model") if isinstance(body.document, dict) else None
        nobody = Failure(Reason.NO_INSTANCE, "no engine is known", retry_after_s=1.0)
        if not isinstance(name, str):
            return None, nobody
        try:
            return self._parts.catalog.profile(name), nobody
        except Failure as failure:
            return None, failure

    async def _with_fetched_images(
        self, body: Body, encoded: recipe.EncodeResponse, profile: Profile
    ) -> recipe.EncodeResponse:
        """Fetches images given by address and encodes again with their bytes in place."""
        parts, admitted = self._parts, self._admitted
        data = await parts.fetcher.inline(
            body.data, [image.url for image in encoded.images if image.url], admitted.identity
        )
        again = await parts.codec.encode(
            recipe.EncodeRequest(
                protocol=PROTOCOLS[admitted.api],
                body=data,
                context_limit=profile.max_model_len,
            )
        )
        if any(image.url for image in again.images):
            raise Failure(Reason.IMAGE_FETCH, "an image could not be fetched")
        return again

    async def _compile(self, constraint: Constraint, tokenizer_id: str) -> records.GrammarRef:
        parts, admitted = self._parts, self._admitted
        special_ids = (
            await parts.models.special_ids(tokenizer_id) if constraint.needs_special_ids else {}
        )
        with tracing.span("entrypoint.compile"):
            compiled, address = await parts.compiler.compile(
                so.CompileRequest(
                    type=constraint.type,
                    source=constraint.source,
                    strict=True,
                    tokenizer_id=tokenizer_id,
                    tenant=admitted.identity.tenant,
                    special_ids=special_ids,
                )
            )
        return constraint.grammar_ref(compiled.artifact_key, address)

    def _job(self, encoded: recipe.EncodeResponse, profile: Profile) -> Job:
        admitted = self._admitted
        clock = self._parts.engines.clock
        remaining_s = admitted.deadline_s - clock.now_s()
        stop_ids = memoryview(encoded.stop_token_ids).cast("I") if encoded.stop_token_ids else ()
        traceparent = tracing.current_traceparent() or admitted.traceparent
        return Job(
            request_id=admitted.request_id,
            tenant=admitted.identity.tenant,
            model=encoded.model,
            profile=profile,
            prompt_tokens=encoded.token_ids,
            sampling=records.Sampling(
                temperature=encoded.temperature,
                top_p=encoded.top_p,
                # One seed for all attempts: the noise of a position must not change (P-03).
                seed=encoded.seed if encoded.HasField("seed") else secrets.randbelow(_MAX_SEED),
                max_tokens=encoded.max_tokens,
                stop_token_ids=list(stop_ids),
                logprobs=encoded.logprobs,
                top_logprobs=encoded.top_logprobs,
                end_of_thinking_id=encoded.end_of_thinking_id,
                starts_in_reasoning=encoded.starts_in_reasoning,
            ),
            deadline_s=admitted.deadline_s,
            deadline_unix_ms=int(1000 * (clock.wall_s() + remaining_s)),
            traceparent=traceparent,
            cache_salt=admitted.cache_salt,
            media=media_spans(
                encoded.images,
                self._parts.config.preprocessor_revision,
                self._parts.config.max_inline_media_bytes,
            ),
            ttl_class=records.TTL_CLASS_AGENT if encoded.has_tools else records.TTL_CLASS_CHAT,
        )

    def _headers(self) -> Headers:
        return response_headers(self._admitted)


def response_headers(admitted: Admitted) -> Headers:
    """Returns the headers of a successful answer: ids, cache explanation, stage times."""
    entry = admitted.entry
    headers: Headers = [
        (b"x-request-id", admitted.request_id.encode()),
        (
            b"x-pelagos-cache",
            f"hit={entry.hit_tokens}; replayed={entry.replayed_tokens}; "
            f"ended-by={entry.ended_by or 'unknown'}".encode(),
        ),
    ]
    if admitted.api is Api.MESSAGES:
        headers.append((b"request-id", admitted.request_id.encode()))
    if entry.stages:
        timing = ", ".join(f"{stage};dur={at_ms:.1f}" for stage, at_ms in entry.stages[:16])
        headers.append((b"server-timing", timing.encode()))
    return headers


def call_of(admitted: Admitted) -> Call:
    """Returns the current call for a request: id, tenant and deadline travel with what follows."""
    return Call(
        request_id=admitted.request_id,
        tenant=admitted.identity.tenant,
        traceparent=tracing.current_traceparent() or admitted.traceparent,
        deadline_s=admitted.deadline_s,
    )


def demand_fitting(num_prompt_tokens: int, profile: Profile) -> None:
    """Raises Failure(NOT_FITTING) for what no engine could ever hold (P-16)."""
    limit = profile.max_tokens_per_rank
    if limit and num_prompt_tokens + 1 > limit:
        raise Failure(
            Reason.NOT_FITTING,
            f"the prompt has {num_prompt_tokens} tokens, the engines' memory holds {limit}",
            {"num_tokens": str(num_prompt_tokens), "max_tokens": str(limit)},
        )
