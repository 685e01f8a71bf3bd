"""Following requests on engines: one bidirectional call per engine, shared by all its requests.

An engine sends one message per step with the new tokens of every request of this entrypoint; each
event goes to the follower that subscribed under its stream number. There is no task and no queue
per request here: a follower's `on_event` runs in the reader's turn and must not block.

When the call breaks, every follower on it is told so once, under one incident id. Nothing is
attached again here: what to do with a lost request is decided by `retry.decide`.
Source: architecture.md, section 3 ("token streams are multiplexed"); engine.md, section 7.5.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pelagos.decode.v1 import decode_pb2, decode_pb2_grpc
from pelagos.engine.v1 import records_pb2 as records
from pelagos.prefill.v1 import prefill_pb2, prefill_pb2_grpc

from services.common.call import Call, calling
from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, stream_call
from services.entrypoint.connecting import connect

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S: Final = 60.0


class EngineKind(enum.Enum):
    """Which service of an engine is attached to."""

    PREFILL = "prefill"
    DECODE = "decode"


class Follower(Protocol):
    """Who follows a request. Both methods run on the event loop and return at once."""

    def on_event(self, event: records.RequestEvent) -> None:
        """Takes one event of the request."""
        ...

    def on_lost(self, failure: Failure, incident: str) -> None:
        """The engine can no longer be reached; nothing more comes from this subscription."""
        ...


@dataclass(frozen=True)
class Subscription:
    """A follower's place on a channel; give it back with `EngineHub.leave`."""

    channel: EngineChannel
    stream_id: int


class EngineChannel:
    """The call to one engine. Made and closed by `EngineHub`."""

    def __init__(
        self, kind: EngineKind, address: str, channels: Channels, entrypoint_id: str
    ) -> None:
        self.kind = kind
        self.address = address
        self._channels = channels
        self._entrypoint_id = entrypoint_id
        self._followers: dict[int, Follower] = {}
        self._commands: deque[Any] = deque()
        self._wake = asyncio.Event()
        self._next_id = 1
        self.is_closed = False
        self.incident = ""
        if kind is EngineKind.PREFILL:
            self._request_cls: Any = prefill_pb2.AttachRequest
            self._stub_cls: Any = prefill_pb2_grpc.PrefillServiceStub
        else:
            self._request_cls = decode_pb2.AttachRequest
            self._stub_cls = decode_pb2_grpc.DecodeServiceStub

    @property
    def num_followers(self) -> int:
        """Returns how many requests are followed here."""
        return len(self._followers)

    def subscribe(self, key: records.RequestKey, from_index: int, follower: Follower) -> int:
        """Starts to follow a request; returns its stream number."""
        stream_id, self._next_id = self._next_id, self._next_id + 1
        self._followers[stream_id] = follower
        self._send(subscribe=records.Subscribe(stream_id=stream_id, key=key, from_index=from_index))
        return stream_id

    def unsubscribe(self, stream_id: int, *, abort: bool) -> None:
        """Stops following; with `abort` the engine drops the request too."""
        if self._followers.pop(stream_id, None) is not None and not self.is_closed:
            self._send(unsubscribe=records.Unsubscribe(stream_id=stream_id, abort=abort))

    def ack(self, stream_id: int, next_index: int) -> None:
        """Tells the engine that everything below `next_index` has left for the client."""
        if stream_id in self._followers and not self.is_closed:
            self._send(ack=records.Ack(stream_id=stream_id, next_index=next_index))

    async def run(self) -> None:
        """Carries commands and events until the call breaks or the task is cancelled."""
        try:
            stub = self._stub_cls(await connect(self._channels, self.address))
            # The call belongs to all requests: none's deadline or id may travel with it.
            with calling(Call()):
                async with stream_call(stub.Attach) as stream:
                    writer = asyncio.ensure_future(self._write(stream))
                    try:
                        while (response := await stream.read()) is not None:
                            self._dispatch(response.events)
                    finally:
                        writer.cancel()
                        await asyncio.gather(writer, return_exceptions=True)
            self._lose(Failure(Reason.BACKEND_LOST, "the engine ended the channel"))
        except Failure as failure:
            self._lose(Failure(Reason.BACKEND_LOST, f"the channel broke ({failure.reason.value})"))
        except Exception:
            # A message that this build cannot read ends this channel, not the process.
            log.exception("a channel failed")
            self._lose(Failure(Reason.BACKEND_LOST, "the channel failed"))
        finally:
            self.is_closed = True
            self._lose(Failure(Reason.BACKEND_LOST, "the channel was closed"))

    async def _write(self, stream: Any) -> None:
        first = True
        while True:
            while self._commands:
                command = self._commands.popleft()
                if first:
                    command.entrypoint_id = self._entrypoint_id
                    first = False
                await stream.write(command)
            self._wake.clear()
            if not self._commands:
                await self._wake.wait()

    def _dispatch(self, events: Any) -> None:
        for event in events:
            follower = self._followers.get(event.stream_id)
            if follower is None:
                continue  # unsubscribed while the event was on its way
            try:
                follower.on_event(event)
            except Exception as error:
                # One request's bug must not end the others on this engine (P-07).
                log.exception("a follower failed")
                self.unsubscribe(event.stream_id, abort=True)
                follower.on_lost(Failure(Reason.INTERNAL, type(error).__name__), "follower")

    def _lose(self, failure: Failure) -> None:
        self.is_closed = True
        self._commands.clear()
        followers, self._followers = list(self._followers.values()), {}
        for follower in followers:
            follower.on_lost(failure, self.incident)

    def _send(self, **command: Any) -> None:
        self._commands.append(self._request_cls(**command))
        self._wake.set()


class EngineHub:
    """The channels to all engines; they open when first needed and close when idle."""

    def __init__(
        self,
        channels: Channels,
        entrypoint_id: str,
        spawn: Callable[[Any, str], asyncio.Task[Any]],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._channels = channels
        self._entrypoint_id = entrypoint_id
        self._spawn = spawn
        self._clock = clock
        self._open: dict[tuple[EngineKind, str], EngineChannel] = {}
        self._tasks: dict[EngineChannel, asyncio.Task[Any]] = {}
        self._num_opened = 0

    @property
    def num_channels(self) -> int:
        """Returns how many engines are attached to."""
        return len(self._open)

    @property
    def num_followers(self) -> int:
        """Returns how many requests are followed; a row of the census."""
        return sum(channel.num_followers for channel in self._open.values())

    def follow(
        self,
        kind: EngineKind,
        address: str,
        key: records.RequestKey,
        from_index: int,
        follower: Follower,
    ) -> Subscription:
        """Follows a request on an engine; failures to reach it come through `on_lost`."""
        channel = self._open.get((kind, address))
        if channel is None or channel.is_closed:
            channel = self._open_channel(kind, address)
        return Subscription(channel, channel.subscribe(key, from_index, follower))

    def leave(self, subscription: Subscription, *, abort: bool) -> None:
        """Ends a subscription. Safe at any time and twice."""
        subscription.channel.unsubscribe(subscription.stream_id, abort=abort)

    def close_idle(self) -> None:
        """Closes the channels that nobody uses; called now and then."""
        for channel in list(self._open.values()):
            if channel.num_followers == 0:
                self._tasks[channel].cancel()

    async def run(self) -> None:
        """Closes idle channels until cancelled."""
        while True:
            await self._clock.sleep(IDLE_TIMEOUT_S)
            self.close_idle()

    def _open_channel(self, kind: EngineKind, address: str) -> EngineChannel:
        channel = EngineChannel(kind, address, self._channels, self._entrypoint_id)
        self._num_opened += 1
        channel.incident = f"{address}#{self._num_opened}"
        self._open[(kind, address)] = channel
        task = self._spawn(channel.run(), f"attach {kind.value}")
        self._tasks[channel] = task
        task.add_done_callback(lambda _: self._forget(channel))
        return channel

    def _forget(self, channel: EngineChannel) -> None:
        self._tasks.pop(channel, None)
        if self._open.get((channel.kind, channel.address)) is channel:
            del self._open[(channel.kind, channel.address)]
