"""The streams of one Parse call: steps in, results out, a failing stream ends alone.

Consecutive steps that only bring ids go to the codec in one call.
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pelagos.recipe.v1 import recipe_pb2 as pb

from services.common.errors import Failure, Reason
from services.recipe.codec import CodecError, FinishReason, Streams, StreamSpec
from services.recipe.registry import Registry

log = logging.getLogger(__name__)

_FINISHES: dict[int, FinishReason] = {
    pb.PARSE_FINISH_STOP: "stop",
    pb.PARSE_FINISH_LENGTH: "length",
    pb.PARSE_FINISH_CONTENT_FILTER: "content_filter",
}


@dataclass
class _Open:
    handle: int
    keeps_response: bool


class ParseSession:
    """Not thread-safe. `num_open` streams are held until they end or are discarded."""

    def __init__(
        self,
        registry: Registry,
        max_streams: int,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._max_streams = max_streams
        self._now_s = now_s
        self._streams = Streams()
        self._open: dict[int, _Open] = {}
        self._results: dict[int, pb.ParseResult] = {}
        # Results of streams that ended in this message and whose id it has given away again.
        self._earlier_results: list[pb.ParseResult] = []
        self._batch: list[tuple[int, bytes]] = []
        self.num_token_ids = 0

    @property
    def num_open(self) -> int:
        """Returns how many streams are open."""
        return len(self._open)

    def step(self, items: Iterable[pb.ParseItem]) -> list[pb.ParseResult]:
        """Takes steps in order; returns one result per stream that has something to say."""
        self._results = {}
        self._earlier_results = []
        for item in items:
            kind = item.WhichOneof("step")
            if kind == "tokens" and not item.tokens.logprobs and not item.tokens.top:
                self._batch.append((item.stream_id, item.tokens.token_ids))
                continue
            self._flush()
            try:
                self._single(item, kind)
            except (Failure, CodecError, ValueError) as error:
                self._failed(item.stream_id, str(error))
            except Exception:
                # Whatever one stream brings, the others of this call go on.
                log.exception("a step of a stream failed")
                self._failed(item.stream_id, "internal error")
        self._flush()
        return [*self._earlier_results, *self._results.values()]

    # -- one step

    def _single(self, item: pb.ParseItem, kind: str | None) -> None:
        if kind == "open":
            self._opened(item.stream_id, item.open)
            return
        opened = self._open.get(item.stream_id)
        if opened is None:
            return  # ended already; the caller may not know yet
        handle, now = opened.handle, int(self._now_s())
        match kind:
            case "ready":
                ready = item.ready
                fingerprint = ready.system_fingerprint or None
                pushed = self._streams.ready(
                    handle, ready.prompt_tokens, ready.cached_tokens, fingerprint, now
                )
            case "tokens":
                self.num_token_ids += len(item.tokens.token_ids) // 4
                pushed = self._streams.tokens(
                    handle, item.tokens.token_ids, now, _logprobs(item.tokens)
                )
            case "text":
                text = item.text
                pushed = self._streams.text(handle, text.content, text.token_count, now)
            case "finish" if item.finish in _FINISHES:
                pushed = self._streams.finish(handle, _FINISHES[item.finish], now)
            case "finish":
                self._add(item.stream_id, self._streams.close(handle, now))
                self._ended(item.stream_id)
                return
            case "fail":
                fail = item.fail
                frame = self._streams.fail(handle, fail.reason, fail.message, fail.request_id)
                self._add(item.stream_id, frame)
                self._ended(item.stream_id)
                return
            case "discard":
                self._forget(item.stream_id)
                self._results.pop(item.stream_id, None)
                return
            case _:
                return  # a step of a newer protocol
        self._add(item.stream_id, pushed.sse)
        if pushed.error is not None:
            self._failed(item.stream_id, pushed.error)
        elif pushed.is_over:
            self._ended(item.stream_id, stopped=kind in ("tokens", "text"))

    def _opened(self, stream_id: int, step: pb.ParseOpen) -> None:
        if stream_id in self._open:
            raise Failure(Reason.INVALID_REQUEST, f"stream {stream_id} is open already")
        if len(self._open) >= self._max_streams:
            raise Failure(Reason.OVERLOADED, f"more than {self._max_streams} streams on one call")
        if step.created_unix_s < 0:
            raise Failure(Reason.INVALID_REQUEST, "the time of creation is before the epoch")
        model, is_streamed = _model_of(step.parse_state)
        name = step.tokenizer
        if not name and model not in self._registry.models:
            # The model is another process's; its version says which vocabulary it has.
            name = step.model_version
        loaded = self._registry.tokenizer_of(model, name)
        spec = StreamSpec(
            response_id=step.response_id,
            created=step.created_unix_s,
            call_id_seed=step.id_seed,
            eager=step.eager,
            separate_usage=step.separate_usage,
            spellings=self._registry.spellings,
        )
        handle = self._streams.open(step.parse_state, loaded.tokenizer, spec)
        self._open[stream_id] = _Open(handle, not is_streamed)
        if stream_id in self._results:
            self._earlier_results.append(self._results.pop(stream_id))

    # -- many steps

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        known = [(i, ids, self._open[i].handle) for i, ids in batch if i in self._open]
        if not known:
            return
        for stream_id in {i for i, ids, _ in known if len(ids) % 4}:
            self._failed(stream_id, "token ids are 4 bytes each")
        known = [entry for entry in known if entry[0] in self._open]
        handles = struct.pack(f"<{len(known)}I", *(handle for _, _, handle in known))
        counts = struct.pack(f"<{len(known)}I", *(len(ids) // 4 for _, ids, _ in known))
        token_ids = b"".join(ids for _, ids, _ in known)
        self.num_token_ids += len(token_ids) // 4
        pushed = self._streams.push_tokens(handles, counts, token_ids, int(self._now_s()))
        errors = dict(pushed.errors)
        over = set(pushed.over)
        start = 0
        for index, (stream_id, _, _) in enumerate(known):
            end = pushed.ends[index]
            if stream_id in self._open:  # else it ended earlier in this very batch
                self._add(stream_id, pushed.sse[start:end])
                if index in errors:
                    self._failed(stream_id, errors[index])
                elif index in over:
                    self._ended(stream_id, stopped=True)
            start = end

    # -- results

    def _result(self, stream_id: int) -> pb.ParseResult:
        found = self._results.get(stream_id)
        if found is None:
            found = self._results[stream_id] = pb.ParseResult(stream_id=stream_id)
        return found

    def _add(self, stream_id: int, sse: bytes) -> None:
        if sse:
            self._result(stream_id).sse += sse

    def _ended(self, stream_id: int, stopped: bool = False) -> None:
        result = self._result(stream_id)
        opened = self._open[stream_id]
        result.done = True
        result.stopped = stopped
        result.completion_tokens = self._streams.num_completion_tokens(opened.handle)
        if opened.keeps_response:
            result.folded = self._streams.folded(opened.handle)
        self._forget(stream_id)

    def _failed(self, stream_id: int, text: str) -> None:
        result = self._result(stream_id)
        result.error = text
        result.done = True
        self._forget(stream_id)

    def _forget(self, stream_id: int) -> None:
        opened = self._open.pop(stream_id, None)
        if opened is not None:
            self._streams.remove(opened.handle)


def _model_of(parse_state: bytes) -> tuple[str, bool]:
    """Returns the model's name and whether events are wanted. Raises: Failure(INVALID_REQUEST)."""
    try:
        state: Any = json.loads(parse_state or b"null")
        model, response = state["model"], state["response"]
        if isinstance(model, str) and isinstance(response, dict):
            return model, bool(response.get("stream"))
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    raise Failure(Reason.INVALID_REQUEST, "the stream's state cannot be read")


def _logprobs(step: pb.ParseTokens) -> list[tuple[float, list[tuple[int, float]]]] | None:
    """Returns the log probability of each id, with its alternatives; None when there are none."""
    if not step.logprobs:
        return None
    fields = (step.logprobs, *(part for top in step.top for part in (top.token_ids, top.logprobs)))
    if any(len(field) % 4 for field in fields):
        raise Failure(Reason.INVALID_REQUEST, "ids and log probabilities are 4 bytes each")
    own = struct.unpack(f"<{len(step.logprobs) // 4}f", step.logprobs)
    tops: list[list[tuple[int, float]]] = [[] for _ in own]
    for index, top in enumerate(step.top[: len(tops)]):
        ids = struct.unpack(f"<{len(top.token_ids) // 4}I", top.token_ids)
        values = struct.unpack(f"<{len(top.logprobs) // 4}f", top.logprobs)
        tops[index] = list(zip(ids, values, strict=True))
    return list(zip(own, tops, strict=True))
