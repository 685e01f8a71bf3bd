"""The public HTTP surface: routes, identity, and the way from a request to the pipeline.

Nothing of the admin plane is here (S-10). Routes are starlette's, answers are raw ASGI.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.common import tracing
from services.common.call import set_current_call
from services.common.clock import Clock
from services.common.errors import Api, Failure, Reason
from services.common.ids import is_request_id, new_request_id
from services.entrypoint import index_page, telemetry
from services.entrypoint.api import DIALECTS, Dialect
from services.entrypoint.api.dialect import HTTP_STATUS_KEY, Headers, error_response
from services.entrypoint.api.messages import COUNT_TOKENS_PATHS
from services.entrypoint.api.messages import DIALECT as MESSAGES
from services.entrypoint.auth import SCOPE_EXPLAIN, SCOPE_INFERENCE, Identity, bearer_key
from services.entrypoint.client_left import ClientLeft
from services.entrypoint.generation import settle
from services.entrypoint.http_body import Body, ClientGone, read_body
from services.entrypoint.key_store import KeyStore
from services.entrypoint.pipeline import Admitted, Parts, Pipeline, call_of
from services.entrypoint.responses_asgi import SECURITY_HEADERS, Answer

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TIMEOUT_HEADER: Final = b"x-request-timeout-ms"
CACHE_SALT_HEADER: Final = b"x-pelagos-cache-salt"
_MODELS_PATHS: Final = ("/v1/models", "/models")
_OWNER: Final = "pelagos"
_RNG: Final = random.Random()  # of Retry-After alone


class HttpFront:
    """The application. `is_ready` and `is_alive` come from the process around it."""

    def __init__(
        self,
        parts: Parts,
        pipeline: Pipeline,
        keys: KeyStore,
        *,
        is_ready: Callable[[], bool],
        is_alive: Callable[[], bool],
        base_url: Callable[[], str],
    ) -> None:
        self.parts = parts
        self.pipeline = pipeline
        self.keys = keys
        self.is_ready = is_ready
        self.is_alive = is_alive
        self.base_url = base_url
        self.clock: Clock = parts.engines.clock
        routes = [
            Route(path, _Generate(self, dialect), methods=["POST"])
            for dialect in DIALECTS
            for path in dialect.paths
        ]
        routes += [Route(path, _CountTokens(self), methods=["POST"]) for path in COUNT_TOKENS_PATHS]
        for path in _MODELS_PATHS:
            routes.append(Route(path, _Models(self), methods=["GET"]))
            routes.append(Route(path + "/{model:path}", _Models(self), methods=["GET"]))
        routes.append(Route("/v1/requests/{request_id}", _Explain(self), methods=["GET"]))
        routes.append(Route("/healthz", _Health(self.is_alive), methods=["GET"]))
        routes.append(Route("/readyz", _Health(self.is_ready), methods=["GET"]))
        if parts.config.index_page:
            routes.append(Route("/", _Index(self), methods=["GET"]))
        self.app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_allowed})

    def identify(self, scope: Scope, api_scope: str) -> Identity:
        """Returns who calls. Raises Failure(UNAUTHENTICATED, FORBIDDEN)."""
        identity = self.keys.identify(bearer_key(scope["headers"]))
        identity.demand(api_scope)
        return identity

    def refused(self, failure: Failure) -> None:
        """Counts a refusal at the door."""
        self.parts.instruments.refused.labels(reason=failure.reason.shown_as.value).inc()

    async def send_error(self, answer: Answer, failure: Failure, api: Api, request_id: str) -> None:
        """Answers with a failure in the API's shape."""
        response = error_response(failure, api, request_id, self.parts.engines.rng)
        await answer.whole(response.status, response.headers, response.body)

    def answer(self, scope: Scope, send: Send) -> Answer:
        """Returns the answer to a request."""
        limits = self.parts.config.limits
        return Answer(scope, send, limits.stream_progress_timeout_s, self.clock)


class _Generate:
    """POST of one of the three APIs."""

    def __init__(self, front: HttpFront, dialect: Dialect) -> None:
        self._front = front
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; the client's leaving cancels it wherever it is."""
        front, api = self._front, self._dialect.api
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        answer = front.answer(scope, send)
        arrived_s = front.clock.now_s()
        with tracing.span(
            f"entrypoint {api.value}",
            {telemetry.API: api.value, telemetry.GEN_AI_OPERATION: "chat"},
            traceparent=headers.get(b"traceparent", b"").decode("latin-1")[:128],
            kind="server",
        ) as span:
            span.set_attribute(tracing.REQUEST_ID, request_id)
            run = _Run(self._front, self._dialect, request_id, arrived_s, answer)
            work = asyncio.ensure_future(run(scope, receive, tracing.traceparent_of(span)))
            gone = asyncio.ensure_future(run.wait_gone(receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                await settle(work)
            if run.admitted is None:
                return
            entry = run.admitted.entry
            span.set_attributes(
                {
                    telemetry.TENANT: entry.tenant,
                    telemetry.OUTCOME: entry.outcome.value if entry.outcome else "",
                    telemetry.ATTEMPTS: entry.attempts,
                    telemetry.GEN_AI_INPUT_TOKENS: entry.prompt_tokens,
                    telemetry.GEN_AI_OUTPUT_TOKENS: entry.output_tokens,
                    telemetry.GEN_AI_CACHE_READ_TOKENS: entry.hit_tokens,
                    telemetry.CACHE_ENDED_BY: entry.ended_by,
                }
            )


class _Run:
    """One request between its connection and the pipeline."""

    def __init__(
        self,
        front: HttpFront,
        dialect: Dialect,
        request_id: str,
        arrived_s: float,
        answer: Answer,
    ) -> None:
        self._front = front
        self._dialect = dialect
        self._request_id = request_id
        self._arrived_s = arrived_s
        self._answer = answer
        self._body_read = asyncio.Event()
        self.admitted: Admitted | None = None

    async def __call__(self, scope: Scope, receive: Receive, traceparent: str) -> None:
        front = self._front
        try:
            headers = dict(scope["headers"])
            identity = front.identify(scope, SCOPE_INFERENCE)
            admitted = self.admitted = await front.pipeline.admit(
                self._dialect.api,
                self._request_id,
                identity,
                self._arrived_s,
                _timeout_s(headers),
                _cache_salt(headers, front.parts.config.limits.max_cache_salt_chars),
                traceparent,
            )
        except Failure as failure:
            front.refused(failure)
            await front.send_error(self._answer, failure, self._dialect.api, self._request_id)
            return
        set_current_call(call_of(admitted))
        await front.pipeline.answer(admitted, lambda: self._read(scope, receive), self._answer)

    async def wait_gone(self, receive: Receive) -> None:
        """Learns of a disconnect from the connection, not from the next write (UR-28)."""
        await self._body_read.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _read(self, scope: Scope, receive: Receive) -> Body:
        limits = self._front.parts.config.limits
        try:
            return await read_body(scope, receive, self._dialect, limits, self._front.clock)
        except ClientGone:
            raise ClientLeft("the client has left") from None
        finally:
            self._body_read.set()


class _CountTokens:
    """POST .../count_tokens of the Messages API."""

    def __init__(self, front: HttpFront) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        request_id = _request_id(dict(scope["headers"]))
        answer = front.answer(scope, send)
        grant = None
        try:
            identity = front.identify(scope, SCOPE_INFERENCE)
            grant = await front.parts.door.enter(identity)
            body = await read_body(scope, receive, MESSAGES, front.parts.config.limits, front.clock)
            counted = await front.pipeline.count_tokens(Api.MESSAGES, body)
            await _send_json(
                answer, 200, {"input_tokens": counted.num_tokens}, _id_headers(request_id)
            )
        except Failure as failure:
            front.refused(failure)
            await front.send_error(answer, failure, Api.MESSAGES, request_id)
        except ClientGone:
            return
        finally:
            if grant is not None:
                front.parts.door.leave(grant)


class _Models:
    """GET of the list of models, or of one."""

    def __init__(self, front: HttpFront) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        answer = front.answer(scope, send)
        api = Api.MESSAGES if b"anthropic-version" in headers else Api.CHAT
        try:
            front.identify(scope, SCOPE_INFERENCE)
            known = await front.parts.models.all()
            names = front.parts.catalog.names(known)
            wanted = scope.get("path_params", {}).get("model")
            documents = [_model_document(name, api) for name in names]
            if wanted is None:
                await _send_json(
                    answer, 200, _list_document(documents, api), _id_headers(request_id)
                )
                return
            found = next((d for d in documents if d["id"] == wanted), None)
            if found is None:
                raise Failure(Reason.NOT_FOUND, "no such model is served here")
            await _send_json(answer, 200, found, _id_headers(request_id))
        except Failure as failure:
            front.refused(failure)
            await front.send_error(answer, failure, api, request_id)


class _Explain:
    """GET of what is known of a request of the caller's own tenant."""

    def __init__(self, front: HttpFront) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        request_id = _request_id(dict(scope["headers"]))
        answer = front.answer(scope, send)
        try:
            identity = front.identify(scope, SCOPE_EXPLAIN)
            entry = front.parts.ledger.explain(scope["path_params"]["request_id"], identity.tenant)
            document = {
                "request_id": entry.request_id,
                "api": entry.api,
                "outcome": entry.outcome.value if entry.outcome else "",
                "prompt_tokens": entry.prompt_tokens,
                "output_tokens": entry.output_tokens,
                "hit_tokens": entry.hit_tokens,
                "replayed_tokens": entry.replayed_tokens,
                "ended_by": entry.ended_by,
                "attempts": entry.attempts,
                "stages": [{"stage": s, "at_ms": round(t, 3)} for s, t in entry.stages],
            }
            await _send_json(answer, 200, document, _id_headers(request_id))
        except Failure as failure:
            front.refused(failure)
            await front.send_error(answer, failure, Api.CHAT, request_id)


class _Health:
    """GET /healthz and /readyz: a status, no facts."""

    def __init__(self, is_good: Callable[[], bool]) -> None:
        self._is_good = is_good

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        good = self._is_good()
        request_id = _request_id(dict(scope["headers"]))
        await _send_json(
            Answer(scope, send, 60.0), 200 if good else 503, {"ok": good}, _id_headers(request_id)
        )


class _Index:
    """GET /."""

    def __init__(self, front: HttpFront) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = self._front.parts
        try:
            # As requests must spell them, which is the codec's way and not the engines'.
            names = parts.catalog.names(await parts.models.all())
        except Failure:
            names = []
        page = index_page.render(self._front.base_url(), names[-1] if names else "MODEL")
        headers: Headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-length", str(len(page)).encode()),
            (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
            *_id_headers(_request_id(dict(scope["headers"]))),
        ]
        await self._front.answer(scope, send).whole(200, headers, page)


async def _not_found(request: Request, error: Exception) -> Response:
    return _plain_error(request, Failure(Reason.NOT_FOUND, "no such route"))


async def _not_allowed(request: Request, error: Exception) -> Response:
    allowed = (error.headers or {}).get("Allow", "") if isinstance(error, HTTPException) else ""
    failure = Failure(
        Reason.INVALID_REQUEST, "this route does not take that method", {HTTP_STATUS_KEY: "405"}
    )
    response = _plain_error(request, failure)
    response.headers["allow"] = allowed
    return response


def _plain_error(request: Request, failure: Failure) -> Response:
    request_id = _request_id(dict(request.scope["headers"]))
    made = error_response(failure, Api.CHAT, request_id, _RNG)
    headers = {name.decode(): value.decode() for name, value in made.headers + SECURITY_HEADERS}
    return Response(made.body, made.status, headers)


async def _send_json(
    answer: Answer, status: int, document: dict[str, Any], headers: Headers | None = None
) -> None:
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    base: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await answer.whole(status, base + (headers or []), body)


def _model_document(name: str, api: Api) -> dict[str, Any]:
    if api is Api.MESSAGES:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
        }
    return {"id": name, "object": "model", "created": 0, "owned_by": _OWNER}


def _list_document(documents: list[dict[str, Any]], api: Api) -> dict[str, Any]:
    if api is Api.MESSAGES:
        return {
            "data": documents,
            "has_more": False,
            "first_id": documents[0]["id"] if documents else None,
            "last_id": documents[-1]["id"] if documents else None,
        }
    return {"object": "list", "data": documents}


def _request_id(headers: MutableMapping[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if is_request_id(given) else new_request_id()


def _id_headers(request_id: str) -> Headers:
    return [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]


def _timeout_s(headers: MutableMapping[bytes, bytes]) -> float | None:
    text = headers.get(TIMEOUT_HEADER, b"")
    if not text:
        return None
    if not text.isdigit() or len(text) > 10 or int(text) == 0:
        raise Failure(
            Reason.INVALID_REQUEST, f"{TIMEOUT_HEADER.decode()} must be milliseconds above 0"
        )
    return int(text) / 1000


def _cache_salt(headers: MutableMapping[bytes, bytes], max_chars: int) -> str:
    salt = headers.get(CACHE_SALT_HEADER, b"").decode("latin-1")
    if len(salt) > max_chars:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"{CACHE_SALT_HEADER.decode()} is longer than {max_chars} characters",
            {"max_chars": str(max_chars)},
        )
    return salt
