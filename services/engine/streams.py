"""Token streams: what requests emit, and the channels that carry it to their readers.

One channel per pair of processes. Everything posted while a step is post-processed leaves as one
message, so the cost per token is a share of a message. A stream keeps its tokens until their
reader has acknowledged them, replays from any index, and never has more than `window` tokens
unacknowledged on the way. No gRPC here: `attach` is the body of both engines' Attach handlers.
Source: engine.md, sections 7.4 and 7.5; architecture.md, section 3.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pelagos.engine.v1 import records_pb2 as pb

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.rpc_errors import to_proto
from services.engine.records import (
    finish_to_proto,
    key_from_proto,
    tokens_event,
    usage_to_proto,
)
from services.engine.requests import FinishReason, RequestKey, TokenOut, Usage

log = logging.getLogger(__name__)

_MAX_TOMBSTONES = 10_000
_MAX_WAITING_PER_CHANNEL = 10_000


@dataclass(frozen=True)
class StreamLimits:
    """Bounds of what a stream may hold for its reader."""

    window_tokens: int = 4096  # unacknowledged tokens on the way; beyond it the request is parked
    reader_timeout_s: float = 10.0  # without a reader, or parked, for so long: aborted
    keep_ended_s: float = 10.0  # events are kept so long after the end
    wait_unknown_s: float = 10.0  # a subscription may come before its request


class Channel:
    """One reader's connection: posted events leave together."""

    def __init__(self) -> None:
        self._pending: list[pb.RequestEvent] = []
        self._wake = asyncio.Event()
        self.streams: dict[int, RequestStream] = {}
        self.waiting: dict[int, tuple[RequestKey, int, float]] = {}
        self.closed = False

    def post(self, event: pb.RequestEvent) -> None:
        if not self.closed:
            self._pending.append(event)
            self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[pb.RequestEvent]]:
        """Yields what was posted since the last batch, until the channel is closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, []
            if batch:
                yield batch
            if self.closed and not self._pending:
                return


class RequestStream:
    """Everything one request has emitted on this engine, and who reads it."""

    def __init__(
        self, hub: StreamHub, key: RequestKey, first_index: int, logprobs: bool, now_s: float
    ) -> None:
        self.key = key
        self.ended_s: float | None = None
        self._hub = hub
        self._logprobs = logprobs
        self._first_index = first_index
        self._tokens: list[TokenOut] = []
        self._accepted: pb.Accepted | None = None
        self._progress: pb.Progress | None = None
        self._first_usage: Usage | None = None
        self._end: pb.RequestEvent | None = None
        self._channel: Channel | None = None
        self._stream_id = 0
        self._next_sent = self._next_acked = first_index
        self._unread_since_s: float | None = now_s
        self._end_sent = False

    @property
    def next_index(self) -> int:
        """Index of the token that would be emitted next."""
        return self._first_index + len(self._tokens)

    @property
    def num_unacked(self) -> int:
        return self.next_index - self._next_acked

    @property
    def is_full(self) -> bool:
        """Whether the request must pause: its reader is a whole window behind (or away)."""
        return self.num_unacked >= self._hub.limits.window_tokens

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    @property
    def end_event(self) -> pb.RequestEvent:
        """The terminal event; empty while the stream goes on."""
        return self._end or pb.RequestEvent()

    @property
    def has_reader(self) -> bool:
        return self._channel is not None

    def accepted(self, rank: int, instance_id: str) -> None:
        self._accepted = pb.Accepted(rank=rank, instance_id=instance_id)
        self._post(accepted=self._accepted)

    def progress(self, computed: int, cached: int, replayed: int) -> None:
        """Only the latest is kept for a reader that comes later."""
        self._progress = pb.Progress(
            computed_tokens=computed, cached_tokens=cached, replayed_tokens=replayed
        )
        self._post(progress=self._progress)

    def preload(self, tokens: Sequence[TokenOut]) -> None:
        """Takes over tokens that another engine has emitted already: for replay only."""
        self._tokens.extend(tokens)
        self._next_sent = self._next_acked = self.next_index

    def emit(self, tokens: Sequence[TokenOut], usage: Usage | None = None) -> None:
        """Appends a step's tokens; counters go along with the first ones."""
        if self.has_ended:
            raise AssertionError(f"tokens after the end of {self.key.request_id}")
        if self._first_usage is None:
            self._first_usage = usage
        self._tokens.extend(tokens)
        self._flush()
        if self.is_full and self._unread_since_s is None:
            self._unread_since_s = self._hub.clock.now_s()

    def finish(self, reason: FinishReason, usage: Usage) -> None:
        message = pb.Finished(reason=finish_to_proto(reason), usage=usage_to_proto(usage))
        self._end_with(pb.RequestEvent(finished=message, usage=message.usage))

    def fail(self, failure: Failure, usage: Usage | None = None) -> None:
        event = pb.RequestEvent(failed=to_proto(failure))
        if usage is not None:
            event.usage.CopyFrom(usage_to_proto(usage))
        self._end_with(event)

    def moved(self, instance_id: str, address: str, epoch: int) -> None:
        message = pb.Moved(
            instance_id=instance_id, address=address, epoch=epoch, next_index=self.next_index
        )
        self._end_with(pb.RequestEvent(moved=message))

    def _end_with(self, event: pb.RequestEvent) -> None:
        """Ends the stream, once: a second end is our own mistake (P-01)."""
        if self._end is not None:
            raise AssertionError(f"a second end of {self.key.request_id}")
        event.epoch = self.key.epoch
        self._end = event
        self.ended_s = self._hub.clock.now_s()
        self._flush()

    # --- readers --------------------------------------------------------------------------------

    def attach(self, channel: Channel, stream_id: int, from_index: int) -> None:
        """Gives the stream to a reader, from an index on; an older reader loses it."""
        self.detach(self._channel)
        self._channel, self._stream_id = channel, stream_id
        channel.streams[stream_id] = self
        start = min(max(from_index, self._first_index), self.next_index)
        self._next_sent = self._next_acked = start
        self._end_sent = False
        self._unread_since_s = None
        if self._accepted is not None:
            self._post(accepted=self._accepted)
        if self._progress is not None and not self._tokens and not self.has_ended:
            self._post(progress=self._progress)
        self._flush()

    def detach(self, channel: Channel | None) -> None:
        """Ends a reader's interest; nothing happens for one that has lost the stream already."""
        if channel is None or self._channel is not channel:
            return
        channel.streams.pop(self._stream_id, None)
        self._channel = None
        self._unread_since_s = self._hub.clock.now_s()

    def ack(self, next_index: int) -> None:
        was_full, before = self.is_full, self._next_acked
        self._next_acked = max(self._next_acked, min(next_index, self._next_sent))
        if self._channel is not None and self._next_acked > before:
            # A reader that takes anything at all is alive, however slow.
            self._unread_since_s = self._hub.clock.now_s() if self.is_full else None
        self._flush()
        if was_full and not self.is_full:
            self._hub.on_room(self.key)

    def unread_for_s(self, now_s: float) -> float:
        """How long nobody has taken anything; 0 while a reader keeps up."""
        return 0.0 if self._unread_since_s is None else now_s - self._unread_since_s

    @property
    def is_delivered(self) -> bool:
        """Whether the reader has the end and has acknowledged every token."""
        return self._end_sent and self._next_acked == self.next_index

    def _post(self, **event: Any) -> None:
        if self._channel is not None:
            message = pb.RequestEvent(stream_id=self._stream_id, epoch=self.key.epoch, **event)
            self._channel.post(message)

    def _flush(self) -> None:
        """Sends what the window allows, in one event, and the end once all tokens are out."""
        if self._channel is None:
            return
        limit = min(self.next_index, self._next_acked + self._hub.limits.window_tokens)
        if self._next_sent < limit:
            first, last = self._next_sent - self._first_index, limit - self._first_index
            event = pb.RequestEvent(
                stream_id=self._stream_id,
                epoch=self.key.epoch,
                tokens=tokens_event(self._next_sent, self._tokens[first:last], self._logprobs),
            )
            if first == 0 and self._first_usage is not None:
                event.usage.CopyFrom(usage_to_proto(self._first_usage))
            self._next_sent = limit
            self._channel.post(event)
        if self._end is not None and not self._end_sent and self._next_sent == self.next_index:
            self._end_sent = True
            end = pb.RequestEvent()
            end.CopyFrom(self._end)
            end.stream_id = self._stream_id
            self._channel.post(end)


class StreamHub:
    """All streams of an engine, by request; and the subscriptions that came too early.

    `on_unread(key)` is called for a request whose reader has been away for too long, `on_room(key)`
    when a parked one may go on.
    """

    def __init__(
        self,
        limits: StreamLimits,
        *,
        on_unread: Callable[[RequestKey], None],
        on_abort: Callable[[RequestKey], None],
        on_room: Callable[[RequestKey], None] = lambda key: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.on_room = on_room
        self._on_unread = on_unread
        self._on_abort = on_abort
        self._streams: dict[tuple[str, int], RequestStream] = {}
        self._channels: set[Channel] = set()
        # Requests that were here and are gone: a late subscription gets its answer at once.
        self._gone: OrderedDict[tuple[str, int], RequestKey] = OrderedDict()

    @property
    def num_streams(self) -> int:
        """Streams of live requests: ended ones are kept for late readers and are no leak."""
        return sum(not stream.has_ended for stream in self._streams.values())

    @property
    def num_channels(self) -> int:
        return len(self._channels)

    def open(self, key: RequestKey, first_index: int = 0, logprobs: bool = False) -> RequestStream:
        """Starts the stream of a request; an ended one of an earlier attempt makes place.

        Raises: Failure(CONFLICT) when the request is alive here, or this attempt has been.
        """
        known = self._streams.get(key.stream)
        if known is not None:
            if not known.has_ended or not _newer(key, known.key):
                raise Failure(Reason.CONFLICT, "the request has arrived before")
            self._drop(known)
        gone = self._gone.get(key.stream)
        if gone is not None and not _newer(key, gone):
            raise Failure(Reason.CONFLICT, "the request has been here before")
        stream = RequestStream(self, key, first_index, logprobs, self.clock.now_s())
        self._streams[key.stream] = stream
        for channel in list(self._channels):
            for stream_id, (wanted, from_index, _) in list(channel.waiting.items()):
                if wanted.stream == key.stream and not _newer(wanted, key):
                    del channel.waiting[stream_id]
                    stream.attach(channel, stream_id, from_index)
        return stream

    def find(self, key: RequestKey) -> RequestStream | None:
        return self._streams.get(key.stream)

    # --- channels -------------------------------------------------------------------------------

    def connect(self) -> Channel:
        channel = Channel()
        self._channels.add(channel)
        return channel

    def disconnect(self, channel: Channel) -> None:
        """The reader is gone; its requests go on for a while without one."""
        self._channels.discard(channel)
        channel.close()
        channel.waiting.clear()
        for stream in list(channel.streams.values()):
            stream.detach(channel)

    def subscribe(self, channel: Channel, stream_id: int, key: RequestKey, from_index: int) -> None:
        """Attaches a reader, now or when the request arrives; a request that is gone fails."""
        if stream_id in channel.streams or stream_id in channel.waiting:
            raise Failure(Reason.INVALID_REQUEST, f"stream {stream_id} is in use on this channel")
        stream = self._streams.get(key.stream)
        if stream is not None and not _newer(key, stream.key):
            stream.attach(channel, stream_id, from_index)
            return
        gone = self._gone.get(key.stream)
        too_many = len(channel.waiting) >= _MAX_WAITING_PER_CHANNEL
        if too_many or (gone is not None and not _newer(key, gone)):
            _fail_subscription(channel, stream_id)
            return
        until_s = self.clock.now_s() + self.limits.wait_unknown_s
        channel.waiting[stream_id] = (key, from_index, until_s)

    def unsubscribe(self, channel: Channel, stream_id: int, abort: bool) -> None:
        waiting = channel.waiting.pop(stream_id, None)
        stream = channel.streams.get(stream_id)
        if stream is not None:
            stream.detach(channel)
            if abort and not stream.has_ended:
                self._on_abort(stream.key)
            elif stream.has_ended and stream.is_delivered:
                self._drop(stream)
        elif abort and waiting is not None:
            self._on_abort(waiting[0])

    def command(self, channel: Channel, message: Any) -> None:
        """Carries out one AttachRequest of either engine."""
        match message.WhichOneof("command"):
            case "subscribe":
                wanted = message.subscribe
                key = key_from_proto(wanted.key)
                self.subscribe(channel, wanted.stream_id, key, wanted.from_index)
            case "unsubscribe":
                self.unsubscribe(channel, message.unsubscribe.stream_id, message.unsubscribe.abort)
            case "ack":
                stream = channel.streams.get(message.ack.stream_id)
                if stream is not None:
                    stream.ack(message.ack.next_index)
                    if stream.has_ended and stream.is_delivered:
                        self._drop(stream)

    def sweep(self) -> None:
        """Lets go of what nobody waits for any more; called a few times a second."""
        now_s = self.clock.now_s()
        for channel in self._channels:
            late = [sid for sid, (_, _, until_s) in channel.waiting.items() if now_s >= until_s]
            for stream_id in late:
                del channel.waiting[stream_id]
                _fail_subscription(channel, stream_id)
        for stream in list(self._streams.values()):
            if stream.ended_s is not None:
                if now_s - stream.ended_s >= self.limits.keep_ended_s:
                    self._drop(stream)
            elif stream.unread_for_s(now_s) >= self.limits.reader_timeout_s:
                self._on_unread(stream.key)

    def _drop(self, stream: RequestStream) -> None:
        if stream._channel is not None:
            stream.detach(stream._channel)
        if self._streams.get(stream.key.stream) is stream:
            del self._streams[stream.key.stream]
        self._gone[stream.key.stream] = stream.key
        self._gone.move_to_end(stream.key.stream)
        while len(self._gone) > _MAX_TOMBSTONES:
            self._gone.popitem(last=False)


def _newer(key: RequestKey, than: RequestKey) -> bool:
    return (key.attempt, key.epoch) > (than.attempt, than.epoch)


def _fail_subscription(channel: Channel, stream_id: int) -> None:
    failure = Failure(Reason.NOT_FOUND, "the request is not here")
    channel.post(pb.RequestEvent(stream_id=stream_id, failed=to_proto(failure)))


async def attach(
    hub: StreamHub, requests: AsyncIterator[Any], response: Callable[..., Any]
) -> AsyncIterator[Any]:
    """Body of an Attach handler: commands in, one message per engine step out."""
    channel = hub.connect()

    async def read() -> None:
        async for message in requests:
            hub.command(channel, message)

    reader = asyncio.create_task(read(), name="attach commands")
    failed: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        # A client that only stops sending goes on reading; one that sends nonsense is told so.
        if not task.cancelled() and task.exception() is not None:
            failed.append(task.exception())  # type: ignore[arg-type]
            channel.close()

    reader.add_done_callback(ended)
    try:
        async for batch in channel.batches():
            yield response(events=batch)
        if failed:
            raise failed[0]
    finally:
        reader.cancel()
        hub.disconnect(channel)
