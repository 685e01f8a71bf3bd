"""The reading side of an Attach channel: one per engine, any number of requests on it.

    async with attach(stub.Attach, pb.AttachRequest, "entrypoint-1") as channel:
        async with channel.subscribe(key, from_index=0) as events:
            async for event in events:      # RequestEvent; ends after finished, moved or failed
                ...

What has been read is acknowledged by itself, a quarter window at a time. When the engine goes away
every open subscription ends with `Failure(BACKEND_LOST)`: the reader asks elsewhere for what it
has not seen. Leaving a subscription before its end aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.rpc_client import stream_call
from services.engine import streams
from services.engine.records import key_to_proto
from services.engine.requests import RequestKey
from services.engine.streams import StreamHub

_ACK_EVERY_TOKENS = 1024
_ENDS = ("finished", "moved", "failed")


class Subscription:
    """The events of one request."""

    def __init__(self, channel: AttachChannel, stream_id: int, from_index: int) -> None:
        self._channel = channel
        self._stream_id = stream_id
        self._events: asyncio.Queue[pb.RequestEvent | Failure] = asyncio.Queue()
        self._acked = self.next_index = from_index
        self.ended = False

    def put(self, item: pb.RequestEvent | Failure) -> None:
        self._events.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[pb.RequestEvent]:
        """Yields events in order; raises Failure(BACKEND_LOST) when the engine is gone."""
        while not self.ended:
            item = await self._events.get()
            if isinstance(item, Failure):
                self.ended = True
                raise item
            if item.HasField("tokens"):
                self.next_index = item.tokens.first_index + len(item.tokens.token_ids) // 4
            kind = item.WhichOneof("event")
            self.ended = kind in _ENDS
            if self.ended or self.next_index - self._acked >= _ACK_EVERY_TOKENS:
                self._acked = self.next_index
                await self._channel.ack(self._stream_id, self.next_index)
            yield item


class Duplex(Protocol):
    """A bidirectional call, over gRPC or in memory."""

    async def write(self, item: Any) -> None: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...


class AttachChannel:
    """One open channel. `lost` is set with the reason once the engine is gone."""

    def __init__(self, call: Duplex, request: Callable[..., Any], entrypoint_id: str) -> None:
        self._call = call
        self._request = request
        self._entrypoint_id = entrypoint_id
        self._subscriptions: dict[int, Subscription] = {}
        self._next_id = 1
        self._write_lock = asyncio.Lock()
        self.lost: Failure | None = None

    @property
    def num_subscriptions(self) -> int:
        return len(self._subscriptions)

    @asynccontextmanager
    async def subscribe(self, key: RequestKey, from_index: int = 0) -> AsyncIterator[Subscription]:
        """Follows a request from an output index on."""
        if self.lost is not None:
            raise self.lost
        stream_id, self._next_id = self._next_id, self._next_id + 1
        subscription = Subscription(self, stream_id, from_index)
        self._subscriptions[stream_id] = subscription
        try:
            wanted = pb.Subscribe(stream_id=stream_id, key=key_to_proto(key), from_index=from_index)
            await self._send(subscribe=wanted)
            yield subscription
        finally:
            self._subscriptions.pop(stream_id, None)
            if not subscription.ended and self.lost is None:
                # Shielded: a cancelled reader must still tell the engine.
                leave = pb.Unsubscribe(stream_id=stream_id, abort=True)
                await asyncio.shield(self._send(unsubscribe=leave))

    async def ack(self, stream_id: int, next_index: int) -> None:
        await self._send(ack=pb.Ack(stream_id=stream_id, next_index=next_index))

    async def _send(self, **command: Any) -> None:
        if self.lost is not None:
            return
        async with self._write_lock:
            try:
                await self._call.write(self._request(entrypoint_id=self._entrypoint_id, **command))
            except Failure as failure:
                self._lose(failure)

    async def run(self) -> None:
        """Hands events to their subscriptions until the channel ends."""
        try:
            async with aclosing(aiter(self._call)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    for event in response.events:
                        subscription = self._subscriptions.get(event.stream_id)
                        if subscription is not None:
                            subscription.put(event)
            self._lose(Failure(Reason.BACKEND_LOST, "the engine has ended the channel"))
        except Failure as failure:
            self._lose(failure)

    def _lose(self, failure: Failure) -> None:
        if self.lost is None:
            # Whatever broke the channel, to a request on it the engine is gone.
            self.lost = Failure(Reason.BACKEND_LOST, failure.message)
            for subscription in self._subscriptions.values():
                subscription.put(self.lost)


@asynccontextmanager
async def attach(
    method: Callable[..., Any], request: Callable[..., Any], entrypoint_id: str
) -> AsyncIterator[AttachChannel]:
    """Opens the channel to one engine; `method` is its stub's Attach."""
    async with stream_call(method) as call, _reading(call, request, entrypoint_id) as channel:
        yield channel


@asynccontextmanager
async def attach_in_memory(
    hub: StreamHub,
    request: Callable[..., Any],
    response: Callable[..., Any],
    entrypoint_id: str,
) -> AsyncIterator[AttachChannel]:
    """The same channel to an engine in this process, for fakes: same commands, same events."""
    commands: asyncio.Queue[Any] = asyncio.Queue()

    async def sent() -> AsyncIterator[Any]:
        while True:
            yield await commands.get()

    class _Call:
        async def write(self, item: Any) -> None:
            commands.put_nowait(item)

        def __aiter__(self) -> AsyncIterator[Any]:
            return streams.attach(hub, sent(), response)

    async with _reading(_Call(), request, entrypoint_id) as channel:
        yield channel


@asynccontextmanager
async def _reading(
    call: Duplex, request: Callable[..., Any], entrypoint_id: str
) -> AsyncIterator[AttachChannel]:
    channel = AttachChannel(call, request, entrypoint_id)
    reader = asyncio.create_task(channel.run(), name="attach events")
    try:
        yield channel
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
