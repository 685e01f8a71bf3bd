"""From tokens to bytes at the client: one request's way through the codec and out.

Tokens arrive in the engine channel's turn, events in the codec's; the request's own task only
joins what is ready and sends it. While the client is slow, tokens are held back and not
acknowledged, so the engine stops at its credit (P-12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pelagos.engine.v1 import records_pb2 as records
from pelagos.recipe.v1 import recipe_pb2 as recipe

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.entrypoint.api.dialect import Headers, failure_frames
from services.entrypoint.client_left import ClientLeft
from services.entrypoint.limits import Limits
from services.entrypoint.output_buffer import OutputBuffer
from services.entrypoint.parse_mux import OutputStream, ParseMux
from services.entrypoint.responses_asgi import KEEP_ALIVE_COMMENT, STREAM_HEADERS, Answer
from services.entrypoint.telemetry import Instruments
from services.entrypoint.token_stream import Delivered

if TYPE_CHECKING:
    from services.entrypoint.generation import Generation
    from services.entrypoint.pipeline import Admitted

# More held tokens than any engine's window: the engine does not honour credits.
_MAX_HELD_BYTES: Final = 4 * 65_536
# A comment may leave this much early, so that with a tick a second none is late.
_TICK_SLACK_S: Final = 1.5
_FAILURE_GRACE_S: Final = 1.0
_FINISHES: Final = {
    records.FINISH_REASON_STOP: recipe.PARSE_FINISH_STOP,
    records.FINISH_REASON_LENGTH: recipe.PARSE_FINISH_LENGTH,
}


class StreamOutput:
    """The answer of one request: sink of its tokens and of its parsed events."""

    def __init__(
        self,
        mux: ParseMux,
        answer: Answer,
        admitted: Admitted,
        instruments: Instruments,
        limits: Limits,
        clock: Clock,
        *,
        stream: bool,
        headers: Callable[[], Headers],
    ) -> None:
        self._mux = mux
        self._answer = answer
        self._admitted = admitted
        self._instruments = instruments
        self._limits = limits
        self._clock = clock
        self._is_stream = stream
        self._headers = headers
        self._buffer = OutputBuffer(limits.stream_buffer_bytes)
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._parsed: OutputStream | None = None
        self._generation: Generation | None = None
        self._folded = b""
        self._done = False
        self._parse_lost = False
        self._failure: Failure | None = None
        self._comment_due = False
        self._pending_finish: recipe.ParseFinish.ValueType | None = None
        self._num_frames = 0
        self._num_steps = 0
        self._num_event_bytes = 0
        self._response_id = ""

    @property
    def num_waiting_bytes(self) -> int:
        """Returns what waits for this client: events, and tokens held back."""
        return self._buffer.num_bytes + self._buffer.num_held_bytes

    def begin(self, generation: Generation, open_step: recipe.ParseOpen) -> None:
        """Opens the output at the codec."""
        self._generation = generation
        self._response_id = open_step.response_id
        self._parsed = self._mux.open(open_step, self)

    # ---- sink of tokens ------------------------------------------------------------------------

    def on_stage(self, stage: str) -> None:
        """Notes the stage; the cache facts are known from `matched` on."""
        entry = self._admitted.entry
        entry.reached(stage, self._clock.now_s())
        if stage == "matched" and self._generation is not None:
            hit = self._generation.hit
            entry.hit_tokens, entry.ended_by = hit.hit_tokens, hit.ended_by
            entry.replayed_tokens = max(0, hit.stored_tokens - hit.replay_from) if hit.replay else 0

    def on_tokens(self, delivered: Delivered, usage: records.Usage) -> None:
        """Takes new tokens; they go to the codec at once unless the client is slow."""
        entry = self._admitted.entry
        if entry.first_token_s is None:
            self._instruments.first_token(entry, self._clock.now_s())
            entry.reached("first_token", entry.first_token_s or 0.0)
            self._admitted.share.leave()
            if usage.prompt_tokens:
                entry.hit_tokens = usage.cached_tokens
                entry.replayed_tokens = usage.replayed_tokens
        if self._buffer.is_full or self._buffer.has_held:
            self._room.clear()
            self._buffer.hold(delivered)
            if self._buffer.num_held_bytes > _MAX_HELD_BYTES:
                self._fail(ClientLeft("the client does not read"))
            return
        self._parse(delivered)

    async def wait_room(self) -> None:
        """Returns when the client has caught up."""
        await self._room.wait()

    # ---- sink of events ------------------------------------------------------------------------

    def on_parsed(self, result: recipe.ParseResult) -> None:
        """Takes the codec's events."""
        if self._is_stream and result.sse:
            self._buffer.add(result.sse)
            self._num_event_bytes += len(result.sse)
        if result.error:
            self._parse_lost = True
            self._fail(Failure(Reason.INTERNAL, "the codec could not parse the output"))
        elif result.done:
            self._folded = result.folded
            self._done = True
        self._wake.set()

    def on_parse_lost(self, failure: Failure) -> None:
        """The codec is lost for good."""
        self._parse_lost = True
        self._fail(Failure(Reason.BACKEND_LOST, "the codec was lost", failure.metadata))

    # ---- the request's task --------------------------------------------------------------------

    async def pump(self, working: asyncio.Future[records.FinishReason.ValueType]) -> None:
        """Sends events until the output is complete; raises the Failure that ended it."""
        working.add_done_callback(lambda _: self._wake.set())
        finished = False
        while not self._done:
            await self._wake.wait()
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            if working.done() and not finished:
                finished = True
                self._finish(working.result())  # raises the generation's Failure
            await self._send_ready()
        if not self._is_stream:
            await self._send_folded()
            return
        await self._send_ready(last=True)

    def tick(self, now_s: float) -> None:
        """Makes a keep-alive comment due when nothing was sent for long (UR-23)."""
        silent_s = now_s - self._answer.last_sent_s
        if self._is_stream and silent_s >= self._limits.keep_alive_comment_s - _TICK_SLACK_S:
            self._comment_due = True
            self._wake.set()

    def abandon(self, failure: Failure) -> None:
        """Ends the request from outside, at the end of a drain's grace: a failure, not a cut."""
        self._fail(failure)

    async def end_with_failure(self, failure: Failure, message: str) -> None:
        """Ends a stream that has begun in its API's failure form."""
        if self._parsed is not None and not self._done and not self._parse_lost:
            self._failure = None
            self._parsed.fail(failure.reason.shown_as.value, message, self._admitted.request_id)
            try:
                async with asyncio.timeout(_FAILURE_GRACE_S):
                    while not self._done and self._failure is None:
                        await self._wake.wait()
                        self._wake.clear()
            except TimeoutError:
                pass
        frames = self._buffer.take()
        if not self._done:
            # The codec is lost too. What it made until then still goes out, then our own words.
            frames += failure_frames(
                failure,
                self._admitted.api,
                self._admitted.request_id,
                self._response_id,
                self._num_frames + frames.count(b"\n\n"),
            )
        self.close()
        await self._answer.write(frames, more=False)

    def close(self) -> None:
        """Lets go of the codec's stream. Safe twice."""
        if self._parsed is not None:
            self._parsed.close()
            self._parsed = None

    # ---- inside --------------------------------------------------------------------------------

    def _parse(self, delivered: Delivered) -> None:
        if self._parsed is None:
            return
        self._say_ready()
        self._num_steps += 1
        self._parsed.tokens(delivered.token_ids, delivered.logprobs, delivered.top)

    def _say_ready(self) -> None:
        if self._parsed is not None and not self._parsed.is_ready:
            entry = self._admitted.entry
            self._parsed.ready(entry.prompt_tokens, entry.hit_tokens)

    def _finish(self, reason: records.FinishReason.ValueType) -> None:
        finish = _FINISHES.get(reason, recipe.PARSE_FINISH_STOP)
        if self._buffer.has_held:
            self._pending_finish = finish
            return
        if self._parsed is not None:
            self._say_ready()
            self._parsed.finish(finish)

    async def _send_ready(self, *, last: bool = False) -> None:
        data = self._buffer.take() if self._buffer.num_bytes else b""
        if not data and self._comment_due and not last:
            data = KEEP_ALIVE_COMMENT
        self._comment_due = False
        if not self._is_stream:
            self._after_send()  # all of it is ours to keep: credit at once
            return
        if not data and not last:
            return
        if not self._answer.started:
            await self._answer.start(200, [*STREAM_HEADERS, *self._headers()])
        if data is not KEEP_ALIVE_COMMENT:
            self._num_frames += data.count(b"\n\n")
        await self._answer.write(data, more=not last)
        self._after_send()

    def _after_send(self) -> None:
        """Goes on with held tokens, and gives the engine credit for what has left."""
        if self._buffer.has_held:
            for delivered in self._buffer.release(self._num_steps_that_fit()):
                self._parse(delivered)
            if self._buffer.has_held:
                return
            self._room.set()
            if self._pending_finish is not None and self._parsed is not None:
                self._parsed.finish(self._pending_finish)
        if self._generation is not None:
            self._generation.acknowledge(self._generation.num_output_tokens)

    def _num_steps_that_fit(self) -> int:
        """Returns how many held steps may become events, by the size of those so far."""
        step_bytes = max(64, self._num_event_bytes // max(1, self._num_steps))
        return max(1, self._buffer.max_bytes // step_bytes)

    async def _send_folded(self) -> None:
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self._folded)).encode()),
            *self._headers(),
        ]
        await self._answer.whole(200, headers, self._folded)

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake.set()
