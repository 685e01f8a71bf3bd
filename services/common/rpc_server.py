"""The gRPC server of every service: options, health, reflection, errors, deadlines, draining.

    server = RpcServer(RpcServerConfig(listen="127.0.0.1:0"))
    server.add(rpc.add_DecodeLbServiceServicer_to_server, servicer)
    address = server.bind()          # "127.0.0.1:40123", known before anything is served
    await server.start()
    await server.set_serving(True)   # grpc.health.v1, for the whole and each service
    ...
    await server.refuse_new()        # health off; new calls end UNAVAILABLE / DRAINING
    await server.stop(grace_s=60)

A handler raises `Failure`; the interceptor makes it a status. Anything else is INTERNAL: its text
goes to the log under the trace id, not to the caller. Inside a handler `current_call()` is the
request's id, tenant, trace context and deadline. Unary calls without a deadline get the default.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from services.common import tracing
from services.common.call import Call, from_metadata, set_current_call
from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.config import ConfigError, require, weakens
from services.common.errors import Failure, Reason
from services.common.metrics import Metrics
from services.common.rpc_errors import to_status
from services.common.tls import TlsFiles, server_credentials

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
FRAME_BYTES: Final = 1 << 20
_RETRY_AFTER_S: Final = 0.25
# Health and reflection answer while everything else is refused.
_ALWAYS_SERVED: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.v1")


@dataclass(frozen=True)
class RpcServerConfig:
    """How the server listens. The options of gRPC itself are fixed (toolbox.md, gRPC 1)."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    default_deadline_s: float = 30.0  # for unary calls that come without one
    max_calls: int = 16_384  # at once, streams included; one more is refused as OVERLOADED
    tls: TlsFiles = field(default_factory=TlsFiles)
    plaintext_off_loopback_is_insecure: bool = weakens(
        False, "the RPC port is served without TLS to other machines"
    )

    def __post_init__(self) -> None:
        require(self.max_calls > 0, "max_calls must be above 0")


class RpcServer:
    """A grpc.aio server with everything a Pelagos service has in common."""

    def __init__(
        self,
        listen: str,
        config: RpcServerConfig | None = None,
        *,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config = config or RpcServerConfig()
        self._listen = listen
        self._gate = _Interceptor(self._config, _Instruments(metrics or Metrics("rpc")), clock)
        self._server = grpc.aio.server(interceptors=[self._gate], options=_options(self._config))
        self._health = HealthServicer()
        self._names: list[str] = []
        self._address = ""

    def add(
        self,
        register: Callable[[Any, Any], None],
        servicer: object,
        *,
        while_draining: tuple[str, ...] = (),
    ) -> None:
        """Adds a servicer by its generated `add_..._to_server` function.

        Args:
            while_draining: methods that go on for work in flight ("Attach", "Abort"), or ("*",).
        """
        recorder = _NameRecorder(self._server)
        register(servicer, recorder)
        for name in recorder.names:
            self._names.append(name)
            self._gate.served_while_draining.update(f"/{name}/{m}" for m in while_draining)

    def bind(self) -> str:
        """Returns the address it will serve on, with the real port for port 0.

        Raises: ConfigError when the address is taken, or is off loopback without TLS.
        """
        _check_listen(self._listen, self._config)
        try:
            if self._config.tls.enabled:
                credentials = server_credentials(self._config.tls)
                port = self._server.add_secure_port(self._listen, credentials)
            else:
                port = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self._listen}: {error}") from None
        if self._listen.startswith("unix:"):
            self._address = self._listen
        else:
            self._address = f"{self._listen.rpartition(':')[0]}:{port}"
        return self._address

    @property
    def address(self) -> str:
        """Returns what `bind` returned; "" before."""
        return self._address

    @property
    def service_names(self) -> tuple[str, ...]:
        """Returns the full names of the services added."""
        return tuple(self._names)

    @property
    def num_calls(self) -> int:
        """Returns how many calls are in progress, health and reflection left out."""
        return self._gate.num_calls

    @property
    def num_unary_calls(self) -> int:
        """Returns how many of them are not streams; streams between processes live for ever."""
        return self._gate.num_unary_calls

    async def start(self) -> None:
        """Starts to serve; health stays NOT_SERVING until `set_serving(True)`."""
        if not self._address:
            self.bind()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Sets the health of one service, or of all and of the server as a whole ("")."""
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if serving else kinds.NOT_SERVING
        for name in ("", *self._names) if service is None else (service,):
            await self._health.set(name, status)

    async def refuse_new(self) -> None:
        """Turns health off and refuses new calls as DRAINING; calls in progress go on."""
        self._gate.draining = True
        await self.set_serving(False)

    async def stop(self, grace_s: float) -> None:
        """Waits up to `grace_s` for calls in progress, then cancels them and closes."""
        await self._server.stop(grace_s)


def deadline_of(context: grpc.aio.ServicerContext, clock: Clock = SYSTEM_CLOCK) -> float:
    """Returns the call's deadline in monotonic seconds; inf when it has none."""
    remaining_s: float | None = context.time_remaining()
    # gRPC reports "no deadline" as None or as a time far beyond any machine's life.
    if remaining_s is None or remaining_s > 365 * 24 * 3600:
        return math.inf
    return clock.now_s() + remaining_s


class _NameRecorder:
    """Stands in for the server while generated code registers handlers, to learn the names."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.names: list[str] = []

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        self._server.add_generic_rpc_handlers(handlers)
        self.names += [handler.service_name() for handler in handlers]

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        self._server.add_registered_method_handlers(service_name, handlers)


class _Instruments:
    """Counts every call by method and how it ended, and the time of unary ones."""

    def __init__(self, metrics: Metrics) -> None:
        self._ended = metrics.counter(
            "rpc_calls_total",
            "Calls that ended, by reason ('ok' for success)",
            ("method", "reason"),
        )
        self._seconds = metrics.histogram(
            "rpc_unary_seconds", "Time a unary call took", ("method",)
        )

    def of(self, method: str) -> tuple[Any, Any]:
        """Returns the success counter and the histogram of a method, looked up once."""
        return self._ended.labels(method=method, reason="ok"), self._seconds.labels(method=method)

    def failed(self, method: str, reason: str) -> None:
        """Counts a call that did not succeed."""
        self._ended.labels(method=method, reason=reason).inc()


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Call context, deadline, draining, spans and errors around every handler."""

    def __init__(self, config: RpcServerConfig, instruments: _Instruments, clock: Clock) -> None:
        self._config = config
        self._instruments = instruments
        self._clock = clock
        self._wrapped: dict[str, Any] = {}
        self.draining = False
        self.served_while_draining: set[str] = set()
        self.num_calls = 0
        self.num_unary_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        method: str = handler_call_details.method
        if method.startswith(_ALWAYS_SERVED):
            return await continuation(handler_call_details)
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Any) -> Any:
        behaviour: Any
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            behaviour = self._stream(method, inner, traced=not handler.request_streaming)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            behaviour = self._unary(method, inner, bounded=not handler.request_streaming)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, method: str, inner: Any, bounded: bool) -> Any:
        succeeded, seconds = self._instruments.of(method)

        async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
            self.num_calls += 1
            self.num_unary_calls += 1
            started_s = self._clock.now_s()
            try:
                response = await answer(request, context)
                succeeded.inc()
                return response
            except BaseException as error:
                await self._fail(method, error, context)
            finally:
                seconds.observe(self._clock.now_s() - started_s)
                self.num_calls -= 1
                self.num_unary_calls -= 1

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            call = self._enter(method, context)
            async with asyncio.timeout(self._default_timeout_s(call, bounded)):
                try:
                    if not call.traceparent:
                        return await inner(request, context)
                    with tracing.span(
                        method[1:], traceparent=call.traceparent, kind="server"
                    ) as span:
                        # Onward calls continue from this span, streams by the header.
                        own = tracing.traceparent_of(span) or call.traceparent
                        set_current_call(replace(call, traceparent=own))
                        return await inner(request, context)
                except TimeoutError as error:
                    # The default deadline shows outside of this block; a wait that the handler
                    # itself bounded is its own to handle, and a bug when it does not.
                    raise RuntimeError("a wait inside the handler timed out") from error

        return handle

    def _stream(self, method: str, inner: Any, traced: bool) -> Any:
        """Wraps a streaming method. One span, when the call belongs to a trace, around a stream
        that answers one request; streams that both sides write carry many requests."""
        succeeded, _ = self._instruments.of(method)

        async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            self.num_calls += 1
            span: Any = None
            try:
                call = self._enter(method, context)
                if traced and call.traceparent and tracing.enabled():
                    span = tracing.start_span(
                        method[1:], traceparent=call.traceparent, kind="server"
                    )
                    own = tracing.traceparent_of(span)
                    set_current_call(replace(call, traceparent=own))
                responses = inner(request, context)
                if hasattr(responses, "__aiter__"):
                    # aclosing: a reader that leaves early must reach the handler's finally now,
                    # not when the garbage collector finds the generator.
                    async with aclosing(responses):
                        async for response in responses:
                            yield response
                else:
                    await responses  # a handler that writes by context.write
                succeeded.inc()
            except GeneratorExit:
                raise
            except BaseException as error:
                if span is not None:
                    tracing.mark_failed(span, error)
                await self._fail(method, error, context)
            finally:
                if span is not None:
                    span.end()
                self.num_calls -= 1

        return handle

    def _enter(self, method: str, context: grpc.aio.ServicerContext) -> Call:
        """Makes the call current. Raises Failure while draining, and for one call too many."""
        call = from_metadata(context.invocation_metadata(), deadline_of(context, self._clock))
        set_current_call(call)
        if self.draining and not self._goes_on(method):
            raise Failure(Reason.DRAINING, "the instance is draining")
        if self.num_calls > self._config.max_calls:
            raise Failure(
                Reason.OVERLOADED,
                "the instance has as many calls as it takes at once",
                retry_after_s=_RETRY_AFTER_S,
            )
        return call

    def _goes_on(self, method: str) -> bool:
        service = method.rpartition("/")[0]
        served = self.served_while_draining
        return method in served or f"{service}/*" in served

    def _default_timeout_s(self, call: Call, bounded: bool) -> float | None:
        return self._config.default_deadline_s if bounded and call.deadline_s == math.inf else None

    async def _fail(
        self, method: str, error: BaseException, context: grpc.aio.ServicerContext
    ) -> None:
        """Ends the call with the status that fits; never returns."""
        if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError | grpc.aio.UsageError):
            self._instruments.failed(method, "CLIENT_CANCELLED")
            raise error
        if isinstance(error, Failure) and error.reason is not Reason.INTERNAL:
            failure = error
        elif isinstance(error, TimeoutError):
            failure = Failure(Reason.DEADLINE, "the default deadline has passed")
        elif isinstance(error, Exception):
            trace_id = tracing.current_trace_id()
            log.error("unforeseen failure", exc_info=error, extra=_facts(method, trace_id))
            failure = Failure(Reason.INTERNAL, metadata={"trace_id": trace_id} if trace_id else {})
        else:
            raise error
        self._instruments.failed(method, failure.reason.value)
        await context.abort_with_status(to_status(failure))


def _facts(method: str, trace_id: str) -> dict[str, str]:
    from services.common.call import current_call

    return {"method": method, "trace_id": trace_id, "request_id": current_call().request_id}


def _options(config: RpcServerConfig) -> list[tuple[str, int]]:
    return [
        # By default bursts of new calls over about 1,000 are cancelled at random; admission
        # control belongs in the handler, which can say RESOURCE_EXHAUSTED.
        ("grpc.server.max_pending_requests", 100_000),
        ("grpc.server.max_pending_requests_hard_limit", 100_000),
        # Clients ping every 2 s; the default minimum of 5 minutes would close them.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose machine is gone closes nothing: its calls and what they hold end by this.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        # A prompt or a block in frames of 16 KiB, the default, costs more in frames than in bytes.
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.so_reuseport", 0),  # a second process on the same port is an error, not a lottery
    ]


def is_loopback(listen: str) -> bool:
    """Returns whether only this machine can reach the address `host:port` or `unix:path`."""
    if listen.startswith("unix:"):
        return True
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_listen(listen: str, config: RpcServerConfig) -> None:
    if not listen.startswith("unix:") and not listen.rpartition(":")[2].isdigit():
        raise ConfigError(f"listen: {listen!r} is not host:port")
    if is_loopback(listen) or config.tls.enabled:
        return
    if not config.plaintext_off_loopback_is_insecure:
        raise ConfigError(
            f"listen: {listen} is not on loopback; give tls.* files, or accept the risk with "
            "plaintext_off_loopback_is_insecure"
        )
