"""All output streams through one `Parse` call, one batch per turn of the event loop.

    mux = ParseMux(link)
    stream = mux.open(open_item, sink)     # sink.on_parsed(result), sink.on_parse_lost(failure)
    stream.ready(...); stream.tokens(...); stream.finish(...)

Whatever many requests have to say within one turn leaves as one message. If the codec process is
lost, the streams go on at another one: the steps of each are played again, in the same pieces, and
the bytes that were sent already are cut off. Parsing is a function of the steps, so the client
sees no seam (P-02, P-03).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pelagos.engine.v1 import records_pb2 as records
from pelagos.recipe.v1 import recipe_pb2 as pb

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason

log = logging.getLogger(__name__)

MAX_OUTAGE_S: Final = 10.0  # a stream waits so long for a codec; then its request fails
_RECONNECT_FIRST_S: Final = 0.05
_RECONNECT_MAX_S: Final = 1.0
_MAX_BATCH_ITEMS: Final = 4096
_TOKEN_BYTES: Final = 4


class ParseLink(Protocol):
    """A way to a codec. `run` works until the codec is lost, then raises Failure."""

    async def run(
        self,
        next_batch: Callable[[], asyncio.Future[Sequence[pb.ParseItem]]],
        on_results: Callable[[Sequence[pb.ParseResult]], None],
    ) -> None:
        """Takes batches, gives results, in order."""
        ...


class ParseSink(Protocol):
    """Who gets a stream's events. Both methods return at once."""

    def on_parsed(self, result: pb.ParseResult) -> None:
        """Takes new events; after `done` nothing follows."""
        ...

    def on_parse_lost(self, failure: Failure) -> None:
        """The codec cannot go on with this stream."""
        ...


class OutputStream:
    """One request's output through the codec, and the steps needed to play it again."""

    def __init__(
        self, mux: ParseMux, stream_id: int, open_step: pb.ParseOpen, sink: ParseSink
    ) -> None:
        self._mux = mux
        self.stream_id = stream_id
        self.sink = sink
        self._open = open_step
        self._ready: pb.ParseReady | None = None
        self._token_ids = bytearray()
        self._logprobs = bytearray()
        self._tops: list[records.TopLogprobs] = []
        self._pieces = array("I")  # tokens per step: the codec's events depend on the pieces
        self._end: pb.ParseItem | None = None
        self.num_sent_bytes = 0
        self.num_skip_bytes = 0
        self.lost_at_s: float | None = None  # since when there has been no codec

    def ready(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Says what is known of the prompt; once, before the first tokens."""
        self._ready = pb.ParseReady(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        self._mux.post(self, pb.ParseItem(stream_id=self.stream_id, ready=self._ready))

    @property
    def is_ready(self) -> bool:
        """Returns whether `ready` was said."""
        return self._ready is not None

    def tokens(
        self, token_ids: bytes, logprobs: bytes, tops: Sequence[records.TopLogprobs]
    ) -> None:
        """Gives the tokens of one step."""
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._tops.extend(tops)
        self._pieces.append(len(token_ids) // _TOKEN_BYTES)
        self._mux.post(self, _tokens_item(self.stream_id, token_ids, logprobs, tops))

    def finish(self, reason: pb.ParseFinish.ValueType) -> None:
        """Says that the engine is done."""
        self._post_end(pb.ParseItem(stream_id=self.stream_id, finish=reason))

    def fail(self, reason: str, message: str, request_id: str) -> None:
        """Says that the engine failed; the codec words it for its API."""
        fail = pb.ParseFail(reason=reason, message=message, request_id=request_id)
        self._post_end(pb.ParseItem(stream_id=self.stream_id, fail=fail))

    def close(self) -> None:
        """Lets go of the stream. Safe at any time and twice."""
        self._mux.drop(self)

    def replay(self) -> list[pb.ParseItem]:
        """Returns all steps so far, in their pieces."""
        items = [pb.ParseItem(stream_id=self.stream_id, open=self._open)]
        if self._ready is not None:
            items.append(pb.ParseItem(stream_id=self.stream_id, ready=self._ready))
        at = 0
        has_logprobs, has_tops = bool(self._logprobs), bool(self._tops)
        for num_tokens in self._pieces:
            end = at + num_tokens
            cut = slice(at * _TOKEN_BYTES, end * _TOKEN_BYTES)
            items.append(
                _tokens_item(
                    self.stream_id,
                    bytes(self._token_ids[cut]),
                    bytes(self._logprobs[cut]) if has_logprobs else b"",
                    self._tops[at:end] if has_tops else (),
                )
            )
            at = end
        if self._end is not None:
            items.append(self._end)
        return items

    def _post_end(self, item: pb.ParseItem) -> None:
        if self._end is None:
            self._end = item
            self._mux.post(self, item)


class ParseMux:
    """Batches the steps of all streams; `run` keeps a link alive."""

    def __init__(self, link: ParseLink, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._link = link
        self._clock = clock
        self._streams: dict[int, OutputStream] = {}
        self._items: list[pb.ParseItem] = []
        self._waiter: asyncio.Future[Sequence[pb.ParseItem]] | None = None
        self._flush_scheduled = False
        self._next_id = 1
        self.num_batches = 0
        self.num_items = 0

    @property
    def num_streams(self) -> int:
        """Returns the open streams; a row of the census."""
        return len(self._streams)

    def open(self, open_step: pb.ParseOpen, sink: ParseSink) -> OutputStream:
        """Opens a stream."""
        stream_id, self._next_id = self._next_id, self._next_id % 0xFFFF_FFFF + 1
        stream = OutputStream(self, stream_id, open_step, sink)
        self._streams[stream_id] = stream
        self.post(stream, pb.ParseItem(stream_id=stream_id, open=open_step))
        return stream

    def post(self, stream: OutputStream, item: pb.ParseItem) -> None:
        """Adds a step to the batch of this turn; steps of a closed stream are dropped."""
        if stream.stream_id not in self._streams:
            return
        self._items.append(item)
        self._schedule()

    def drop(self, stream: OutputStream) -> None:
        """Forgets a stream; the codec is told if it may still hold it."""
        if self._streams.pop(stream.stream_id, None) is not None:
            self._items.append(pb.ParseItem(stream_id=stream.stream_id, discard=True))
            self._schedule()

    async def run(self) -> None:
        """Works until cancelled, over as many links as it takes."""
        wait_s = _RECONNECT_FIRST_S
        while True:
            started_s = self._clock.now_s()
            try:
                await self._link.run(self._next_batch, self._on_results)
                failure = Failure(Reason.BACKEND_LOST, "the codec ended the call")
            except Failure as error:
                failure = error
            if self._clock.now_s() - started_s > _RECONNECT_MAX_S:
                wait_s = _RECONNECT_FIRST_S
            if self._streams:
                log.warning("codec lost", extra={"reason": failure.reason.value})
            self._restart_streams(failure)
            await self._clock.sleep(wait_s)
            wait_s = min(_RECONNECT_MAX_S, wait_s * 2)

    def _restart_streams(self, failure: Failure) -> None:
        self._items.clear()
        self._waiter = None
        now_s = self._clock.now_s()
        for stream in list(self._streams.values()):
            if stream.lost_at_s is None:
                stream.lost_at_s = now_s
            if now_s - stream.lost_at_s > MAX_OUTAGE_S:
                del self._streams[stream.stream_id]
                stream.sink.on_parse_lost(failure)
                continue
            stream.num_skip_bytes = stream.num_sent_bytes
            self._items += stream.replay()
        self._schedule()

    def _next_batch(self) -> asyncio.Future[Sequence[pb.ParseItem]]:
        """Returns a future of the next batch; one reader at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._schedule()
        return self._waiter

    def _schedule(self) -> None:
        # One flush per turn: all that follows in this turn goes into the same batch.
        if self._items and not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._items:
            return
        batch = self._items[:_MAX_BATCH_ITEMS]
        del self._items[:_MAX_BATCH_ITEMS]
        self._waiter = None
        self.num_batches += 1
        self.num_items += len(batch)
        waiter.set_result(batch)

    def _on_results(self, results: Sequence[pb.ParseResult]) -> None:
        for result in results:
            stream = self._streams.get(result.stream_id)
            if stream is None:
                continue
            if stream.num_skip_bytes:
                skipped = min(stream.num_skip_bytes, len(result.sse))
                stream.num_skip_bytes -= skipped
                result.sse = result.sse[skipped:]
            stream.num_sent_bytes += len(result.sse)
            stream.lost_at_s = None
            if result.done or result.error:
                self._streams.pop(stream.stream_id, None)
            try:
                stream.sink.on_parsed(result)
            except Exception as error:
                log.exception("an output sink failed")
                self.drop(stream)
                stream.sink.on_parse_lost(Failure(Reason.INTERNAL, type(error).__name__))


def _tokens_item(
    stream_id: int, token_ids: bytes, logprobs: bytes, tops: Sequence[records.TopLogprobs]
) -> pb.ParseItem:
    tokens = pb.ParseTokens(token_ids=token_ids, logprobs=logprobs)
    for top in tops:
        tokens.top.add(token_ids=top.token_ids, logprobs=top.logprobs)
    return pb.ParseItem(stream_id=stream_id, tokens=tokens)
