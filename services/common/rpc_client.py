"""Calling other services: one cached channel per address, deadlines, metadata, `Failure` back.

    channels = Channels()
    stub = rpc.DecodeLbServiceStub(channels.get(address))
    reply = await call(stub.PickRank, pb.PickRankRequest(...), timeout_s=1.0)

    async with stream_call(stub.Run, pb.RunRequest(...), timeout_s=60) as stream:
        async for item in stream:          # leaving the block cancels the call, always
            ...

Request id, tenant, trace context and the remaining deadline of `current_call()` go along by
themselves, less `margin_s` for our own answer. Nothing here retries unless a `RetryPolicy` is
given: only who chose the instance may retry (reliability-and-security.md, section 2).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

import grpc
import grpc.aio

from services.common import tracing
from services.common.call import TRACEPARENT_KEY, current_call, to_metadata
from services.common.clock import SYSTEM_CLOCK
from services.common.config import ConfigError
from services.common.errors import Failure, Reason, Retry
from services.common.rpc_errors import from_rpc_error
from services.common.rpc_server import FRAME_BYTES, MAX_MESSAGE_BYTES
from services.common.tls import TlsFiles, channel_credentials, stamp

DEFAULT_TIMEOUT_S: Final = 30.0
# What the way back costs: the answer of a call made for another must leave time for its own.
DEFAULT_MARGIN_S: Final = 0.05
_LOOK_EVERY_S: Final = 1.0

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True)
class RetryPolicy:
    """Retries of an idempotent unary call on the same address; full jitter between tries."""

    max_attempts: int = 3
    first_wait_s: float = 0.05
    max_wait_s: float = 2.0

    def wait_s(self, attempt: int, pushback_s: float | None, rng: random.Random) -> float:
        """Returns how long to wait after failed try `attempt` (1 is the first)."""
        ceiling_s = min(self.max_wait_s, self.first_wait_s * 2 ** (attempt - 1))
        return max(pushback_s or 0.0, rng.uniform(0, ceiling_s))


class Channels:
    """A cache of channels, one per address; the whole process shares one object."""

    def __init__(
        self, tls: TlsFiles | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._tls = tls or TlsFiles()
        self._options = channel_options(max_message_bytes)
        self._channels: dict[str, grpc.aio.Channel] = {}
        # Channels on certificates that have been renewed: their streams go on until the next
        # renewal, which is what "short-lived" leaves them.
        self._renewed: dict[str, grpc.aio.Channel] = {}
        self._certificates: tuple[int, ...] = ()
        if self._tls.enabled:
            channel_credentials(self._tls)  # files that cannot be read stop the start
            self._certificates = stamp(self._tls)
        self._looked_s = 0.0
        self._closing: set[asyncio.Future[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """Returns the channel to `host:port` or `unix:path`; it connects when first used.

        With TLS, renewed files are noticed here: ask for the channel again rather than keep it.
        """
        if self._tls.enabled:
            self._follow_certificates()
        channel = self._channels.get(address)
        if channel is None:
            if self._tls.enabled:
                channel = grpc.aio.secure_channel(
                    address, channel_credentials(self._tls), options=self._options
                )
            else:
                channel = grpc.aio.insecure_channel(address, options=self._options)
            self._channels[address] = channel
        return channel

    async def forget(self, address: str) -> None:
        """Closes the channel to an instance that has gone; its calls end CANCELLED."""
        for channels in (self._channels, self._renewed):
            channel = channels.pop(address, None)
            if channel is not None:
                await channel.close()

    @property
    def num_channels(self) -> int:
        """Returns how many channels are open; a row of the census."""
        return len(self._channels)

    async def close(self) -> None:
        """Closes every channel."""
        channels = [*self._channels.values(), *self._renewed.values()]
        self._channels, self._renewed = {}, {}
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    def _follow_certificates(self) -> None:
        """Retires every channel when the files have changed; looks once a second at most."""
        now_s = SYSTEM_CLOCK.now_s()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            certificates = stamp(self._tls)
            channel_credentials(self._tls)
        except (OSError, ConfigError):
            return  # half-written: keep what works
        if certificates == self._certificates:
            return
        self._certificates = certificates
        for address, old in self._renewed.items():
            if address in self._channels:
                task = asyncio.ensure_future(old.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._renewed, self._channels = {**self._renewed, **self._channels}, {}


async def call(
    method: Callable[..., Any],
    request: Any,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    margin_s: float = DEFAULT_MARGIN_S,
    retry: RetryPolicy | None = None,
    wait_for_ready: bool = False,
) -> Any:
    """Returns the answer of a unary call, or raises Failure.

    Args:
        method: a stub's method, `stub.PickRank`.
        timeout_s: longest this call may take; the current call's deadline shortens it.
        margin_s: kept back from that deadline for our own answer.
        retry: for idempotent calls to something that has only one address.
        wait_for_ready: wait for the connection instead of failing at once.
    """
    attempt = 1
    while True:
        try:
            return await _call_once(method, request, timeout_s, margin_s, wait_for_ready)
        except Failure as failure:
            if retry is None or attempt >= retry.max_attempts or not _worth_retrying(failure):
                raise
            wait_s = retry.wait_s(attempt, failure.retry_after_s, _RNG)
            if wait_s >= current_call().remaining_s(margin_s):
                raise
            attempt += 1
            await asyncio.sleep(wait_s)


async def _call_once(
    method: Callable[..., Any],
    request: Any,
    timeout_s: float,
    margin_s: float,
    wait_for_ready: bool,
) -> Any:
    with _client_span(method):
        rpc = method(
            request,
            timeout=_timeout_s(timeout_s, margin_s),
            metadata=_metadata(),
            wait_for_ready=wait_for_ready,
        )
        try:
            return await rpc
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            raise _cancelled(rpc) from None


def _cancelled(rpc: Any) -> BaseException:
    """Returns Failure if it was the call that was cancelled, else the task's own error.

    Whoever closes a channel ends the calls of all others on it: they lost a peer, and nobody asked
    their tasks to end.
    """
    task = asyncio.current_task()
    if rpc.cancelled() and not (task is not None and task.cancelling()):
        return Failure(Reason.CLIENT_CANCELLED, "the call was cancelled")
    return asyncio.CancelledError()


class StreamCall(Generic[RequestT, ResponseT]):
    """An open streaming call; iterate it, write to it, all failures are `Failure`."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc

    async def __aiter__(self) -> AsyncIterator[ResponseT]:
        try:
            async for item in self._rpc:
                yield item
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            raise _cancelled(self._rpc) from None

    async def read(self) -> ResponseT | None:
        """Returns the next item, None at the end."""
        try:
            item = await self._rpc.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            raise _cancelled(self._rpc) from None
        return None if item is grpc.aio.EOF else cast(ResponseT, item)

    async def write(self, item: RequestT) -> None:
        """Sends one item; waits while the transport's window is full."""
        try:
            await self._rpc.write(item)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._end(error) from None
        except asyncio.CancelledError:
            raise _cancelled(self._rpc) from None

    async def done_writing(self) -> None:
        """Says that no more items follow."""
        try:
            await self._rpc.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._end(error) from None
        except asyncio.CancelledError:
            raise _cancelled(self._rpc) from None

    async def response(self) -> ResponseT:
        """Returns the single answer of a stream-to-unary call."""
        try:
            return cast(ResponseT, await self._rpc)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            raise _cancelled(self._rpc) from None

    def cancel(self) -> None:
        """Ends the call now; the peer's handler reaches its `finally`."""
        self._rpc.cancel()

    async def _end(self, error: Exception) -> Failure:
        """Returns why the call is over, when a write came too late."""
        if isinstance(error, grpc.aio.AioRpcError):
            if error.details() == _WRITTEN_TOO_LATE:
                return Failure(Reason.BACKEND_LOST, "the peer has ended the stream")
            return from_rpc_error(error)
        code = await self._rpc.code()
        if code is grpc.StatusCode.OK:
            return Failure(Reason.CLIENT_CANCELLED, "the peer has ended the stream")
        return from_rpc_error(
            grpc.aio.AioRpcError(
                code,
                await self._rpc.initial_metadata(),
                await self._rpc.trailing_metadata(),
                details=await self._rpc.details(),
            )
        )


@asynccontextmanager
async def stream_call(
    method: Callable[..., Any],
    requests: Any = None,
    *,
    timeout_s: float | None = None,
    margin_s: float = DEFAULT_MARGIN_S,
    wait_for_ready: bool = False,
) -> AsyncIterator[StreamCall[Any, Any]]:
    """Opens a streaming call and cancels it on the way out, however the block ends.

    gRPC does not cancel a call whose reader merely stops reading: the peer's handler would hang
    for ever. Hence no stub stream is read outside this helper (a test looks for it).

    Args:
        requests: the request of a unary-to-stream call, an async iterator of requests, or None
            to send them by `stream.write`.
        timeout_s: None for streams that live as long as the two processes do.
    """
    args = () if requests is None else (requests,)
    rpc = method(
        *args,
        timeout=None if timeout_s is None else _timeout_s(timeout_s, margin_s),
        metadata=_metadata(),
        wait_for_ready=wait_for_ready,
    )
    try:
        yield StreamCall(rpc)
    finally:
        rpc.cancel()


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Returns the options every channel has (toolbox.md, gRPC 2)."""
    return [
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Without it a frozen peer is noticed only after 60 s, whatever keepalive says.
        ("grpc.http2.ping_timeout_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Channels of one process to one address share no connection pool with each other by
        # accident: a channel that was forgotten takes its connection with it.
        ("grpc.use_local_subchannel_pool", 1),
    ]


# What gRPC calls a write that meets the end of its call; the peer did not fail, it was done.
_WRITTEN_TOO_LATE: Final = "Internal error from Core"
_RNG: Final = random.Random()


def _timeout_s(timeout_s: float, margin_s: float) -> float:
    """Returns the time the call may take. Raises Failure(DEADLINE) when none is left."""
    deadline_s = current_call().deadline_s
    if deadline_s == math.inf:
        return timeout_s
    remaining_s = current_call().remaining_s(margin_s)
    if remaining_s <= 0:
        raise Failure(Reason.DEADLINE, "no time is left for the onward call")
    return min(timeout_s, remaining_s)


def _metadata() -> list[tuple[str, str]]:
    pairs = [p for p in to_metadata(current_call()) if p[0] != TRACEPARENT_KEY]
    traceparent = tracing.current_traceparent()
    return [*pairs, (TRACEPARENT_KEY, traceparent)] if traceparent else pairs


def _client_span(method: Callable[..., Any]) -> Any:
    # A span only for calls made on behalf of a traced request: heartbeats and reports have none.
    if tracing.enabled() and tracing.current_traceparent():
        path = getattr(method, "_method", b"rpc")
        name = path.decode() if isinstance(path, bytes) else str(path)
        return tracing.span(name.lstrip("/"), kind="client")
    return _NO_SPAN


def _worth_retrying(failure: Failure) -> bool:
    return failure.reason.facts.retry is Retry.PLACER and failure.reason is not Reason.INTERNAL


class _NoSpan:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NO_SPAN: Final = _NoSpan()
