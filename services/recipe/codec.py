"""The typed face of the Rust codec: convert, render, encode, stream.

Token ids are `bytes`, little-endian u32, everywhere: one copy for any number of them, and the
form they have on the wire. `memoryview(ids).cast("I")` reads them.
Source: recipe.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from services.recipe import _codec

Protocol = Literal["chat", "responses", "messages"]
ModelVersion = Literal["v4", "v4.1"]
FinishReason = Literal["stop", "length", "content_filter"]
RefusalKind = Literal["request", "context_length", "image"]

# The named tokens of recipe.md, section 1.2, in its order.
SPECIAL_NAMES: Final = (
    "Bos",
    "Eos",
    "ThinkingStart",
    "ThinkingEnd",
    "System",
    "User",
    "Assistant",
    "LatestReminder",
    "Dsml",
    "Image",
    "Ref",
    "RefEnd",
    "Box",
    "BoxEnd",
    "Point",
    "PointEnd",
    "Polygon",
    "PolygonEnd",
)
DEFAULT_SPELLINGS: Final[Mapping[str, str]] = dict(
    zip(SPECIAL_NAMES, _codec.DEFAULT_SPELLINGS, strict=True)
)
DEFAULT_MODELS: Final[Mapping[str, ModelVersion]] = {
    "DeepSeek-V4-Pro": "v4",
    "DeepSeek-V4.1-Flash": "v4.1",
}


class CodecError(Exception):
    """A request that is refused (status 400), or a failure of ours (status 500)."""

    def __init__(self, kind: RefusalKind, stage: str, status: int, message: str, body: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.stage = stage
        self.status = status
        self.message = message
        # The API's error body, the same JSON for all three protocols.
        self.body = body


def _refusal(error: Exception) -> CodecError:
    return CodecError(*error.args)


@dataclass(frozen=True)
class Options:
    """Options of the service, not of a request. Source: recipe.md, section 6.1."""

    default_thinking_mode: bool = True
    reasoning_content_behavior: Literal["fill_empty", "reject"] = "fill_empty"
    responses_web_search: Literal["drop", "reject"] = "drop"
    messages_web_search: Literal["drop", "reject"] = "reject"
    # Of strict schemas, where the strict grammar does not know them: section 6.7 drops them;
    # `enforce` leaves them in the output constraint, for the grammar service to enforce or refuse.
    strict_schema_keywords: Literal["drop", "enforce"] = "drop"
    thinking_max_tokens_upper_bound: int = 393_216
    non_thinking_max_tokens_upper_bound: int = 393_216
    # What the model's vision encoder takes: tokens of an image at most, and its least area.
    image_max_tokens: int = 1024
    image_min_pixels: int = 544 * 544
    # Accepted model names, exact and case-sensitive.
    models: Mapping[str, ModelVersion] = field(default_factory=lambda: dict(DEFAULT_MODELS))
    # Spellings that differ from the defaults, by name.
    spellings: Mapping[str, str] = field(default_factory=dict)

    def spelling_list(self) -> list[str] | None:
        """Returns all spellings in the codec's order, None for the defaults.

        Raises: ValueError for a name that no special token has.
        """
        if not self.spellings:
            return None
        if unknown := set(self.spellings) - set(SPECIAL_NAMES):
            raise ValueError(f"no special token is named {', '.join(sorted(unknown))}")
        return [{**DEFAULT_SPELLINGS, **self.spellings}[name] for name in SPECIAL_NAMES]

    def native(self) -> _codec.Options:
        """Returns the options as the native codec takes them. Raises: ValueError."""
        values: dict[str, Any] = {
            "default_thinking_mode": self.default_thinking_mode,
            "reasoning_content_behavior": self.reasoning_content_behavior,
            "responses_web_search": self.responses_web_search,
            "messages_web_search": self.messages_web_search,
            "thinking_max_tokens_upper_bound": self.thinking_max_tokens_upper_bound,
            "non_thinking_max_tokens_upper_bound": self.non_thinking_max_tokens_upper_bound,
        }
        if self.strict_schema_keywords != "drop":
            values["strict_schema_keywords"] = self.strict_schema_keywords
        if self.image_max_tokens != Options.image_max_tokens:
            values["image_max_tokens"] = self.image_max_tokens
        if self.image_min_pixels != Options.image_min_pixels:
            values["image_min_pixels"] = self.image_min_pixels
        return _codec.Options(json.dumps(values), list(self.models.items()), self.spelling_list())

    @staticmethod
    def native_from_vector(options: Mapping[str, Any] | None) -> _codec.Options:
        """Returns the options that a conformance vector carries. Raises: ValueError."""
        return _codec.Options(json.dumps(options or {}))


class Tokenizer:
    """One tokenizer file. Thread-safe; the GIL is released while text is encoded."""

    def __init__(
        self, path: Path | str, *, num_threads: int = 0, cache_bytes: int = 64 << 20
    ) -> None:
        """Loads a `tokenizer.json`.

        Args:
            num_threads: threads of one call; 0 is one per core.
            cache_bytes: text and ids kept of earlier prompts; 0 keeps none.
        Raises: ValueError when the file cannot be read or is no tokenizer this codec knows.
        """
        self.native = _codec.Tokenizer(Path(path), num_threads, cache_bytes)

    @property
    def num_ids(self) -> int:
        """Returns one more than the largest id."""
        return self.native.num_ids

    @property
    def num_cached_bytes(self) -> int:
        """Returns what the cache of earlier prompts holds now, in bytes."""
        return self.native.num_cached_bytes

    def encode_plain(self, text: str) -> bytes:
        """Returns the ids of one plain region: special spellings are ordinary text."""
        return self.native.encode_plain(text)

    def encode_full(self, text: str) -> bytes:
        """Returns ids with added spellings matched in the text. Diagnostics, never prompts."""
        return self.native.encode_full(text)

    def count_full(self, text: str) -> int:
        """Returns how many ids `encode_full` gives."""
        return self.native.count_full(text)

    def encode_prompt(self, text: str, special_ranges: Sequence[tuple[int, int]]) -> bytes:
        """Returns the ids of a rendered prompt; ranges in UTF-8 bytes, ascending.

        Raises: CodecError for a range that spells nothing in the added vocabulary, ValueError for
        ranges that overlap or cut a character.
        """
        try:
            return self.native.encode_prompt(text, list(special_ranges))
        except _codec.CodecError as error:
            raise _refusal(error) from None

    def decode(self, token_ids: bytes) -> str:
        """Returns the text of ids: specials spelled out, nothing for an unknown id."""
        return self.native.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes an id stands for, None for an unknown id."""
        return self.native.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        r"""Returns the text of an id for logprobs: `\xNN` for bytes that are no UTF-8."""
        return self.native.token_text(token_id)

    def is_added(self, token_id: int) -> bool:
        """Returns whether an id is in the added vocabulary."""
        return self.native.is_added(token_id)

    def added_id(self, spelling: str) -> int | None:
        """Returns the id of an added token, None if nothing is spelled so."""
        return self.native.added_id(spelling)

    def counter(self) -> _codec.Counter:
        """Returns a counter of `encode_full` ids for text that arrives in parts."""
        return self.native.counter()


def convert(protocol: Protocol, body: bytes, options: _codec.Options) -> _codec.Converted:
    """Converts and renders a request body. Raises: CodecError."""
    try:
        return _codec.convert(protocol, body, options)
    except _codec.CodecError as error:
        raise _refusal(error) from None


def token_ids_of(converted: _codec.Converted, tokenizer: Tokenizer) -> bytes:
    """Returns the ids of a rendered request, one placeholder per image. Raises: CodecError."""
    try:
        return converted.token_ids(tokenizer.native)
    except _codec.CodecError as error:
        raise _refusal(error) from None


def encode(
    protocol: Protocol,
    body: bytes,
    options: _codec.Options,
    tokenizer: Tokenizer,
    context_limit: int,
    by_model: Mapping[str, Tokenizer] | None = None,
) -> _codec.Encoded:
    """Converts, renders and encodes a request body, image placeholders widened.

    Args:
        by_model: tokenizers of models that have another one than `tokenizer`.
        context_limit: tokens of prompt and completion together.

    Raises: CodecError, whose kind says whether the request, the context length or an image is at
    fault.
    """
    try:
        return _codec.encode(
            protocol,
            body,
            options,
            tokenizer.native,
            context_limit,
            {name: found.native for name, found in (by_model or {}).items()},
        )
    except _codec.CodecError as error:
        raise _refusal(error) from None


def resolve_max_tokens(
    thinking: bool,
    effort: str | None,
    requested: int | None,
    prompt_tokens: int,
    context_limit: int,
) -> int:
    """Returns the limit of the completion. Raises: CodecError when the prompt does not fit.

    Source: recipe.md, section 12.
    """
    try:
        return _codec.resolve_max_tokens(thinking, effort, requested, prompt_tokens, context_limit)
    except _codec.CodecError as error:
        raise _refusal(error) from None


def image_num_tokens(width: int, height: int) -> int:
    """Returns how many tokens an image of this size takes. Raises: CodecError."""
    try:
        return _codec.image_num_tokens(width, height)
    except _codec.CodecError as error:
        raise _refusal(error) from None


def image_target_size(width: int, height: int, detail: str) -> tuple[int, int]:
    """Returns the size in pixels after preprocessing. Raises: CodecError."""
    try:
        return _codec.image_target_size(width, height, detail)
    except _codec.CodecError as error:
        raise _refusal(error) from None


@dataclass(frozen=True)
class StreamSpec:
    """What one output stream is told at its start, besides the request."""

    response_id: str
    created: int  # seconds since the epoch
    call_id_seed: int  # 128 random bits
    model: str | None = None  # the name shown; None for the request's
    eager: bool = False
    separate_usage: bool = False
    signature: str | None = None
    spellings: Sequence[str] | None = None
    writes_events: bool | None = None  # None: if the request asked for a stream
    keeps_response: bool | None = None  # None: if it did not


class Pushed(NamedTuple):  # made for every token of every stream: the cheapest value there is
    """What one step of a stream gave: its events as server-sent events, framed and joined."""

    sse: bytes
    error: str | None
    is_over: bool


class PushedBatch(NamedTuple):
    """What one step of many streams gave; `sse` is cut by `ends`, stream after stream."""

    sse: bytes
    ends: list[int]
    errors: list[tuple[int, str]]
    over: list[int]

    def sse_of(self, index: int) -> bytes:
        """Returns the events of the index-th stream of the call."""
        start = self.ends[index - 1] if index else 0
        return self.sse[start : self.ends[index]]


class Streams:
    """Output streams by handle. Not thread-safe: one table per caller.

    Every method raises KeyError for a handle that no stream has.
    """

    def __init__(self) -> None:
        self._native = _codec.Streams()

    def __len__(self) -> int:
        return len(self._native)

    def open(self, parse_state: bytes, tokenizer: Tokenizer | None, spec: StreamSpec) -> int:
        """Opens a stream and returns its handle. Raises: CodecError for an unreadable state."""
        try:
            return self._native.open(
                parse_state,
                tokenizer.native if tokenizer else None,
                response_id=spec.response_id,
                model=spec.model,
                created=spec.created,
                call_id_seed=spec.call_id_seed,
                eager=spec.eager,
                separate_usage=spec.separate_usage,
                signature=spec.signature,
                spellings=list(spec.spellings) if spec.spellings is not None else None,
                writes_events=spec.writes_events,
                keeps_response=spec.keeps_response,
            )
        except _codec.CodecError as error:
            raise _refusal(error) from None

    def ready(
        self,
        handle: int,
        prompt_tokens: int,
        prompt_cache_hit_tokens: int,
        system_fingerprint: str | None,
        now: int,
    ) -> Pushed:
        """Says what is known of the prompt."""
        return Pushed(
            *self._native.ready(
                handle, prompt_tokens, prompt_cache_hit_tokens, system_fingerprint, now
            )
        )

    def text(self, handle: int, content: str, token_count: int, now: int) -> Pushed:
        """Pushes text that counts as so many tokens."""
        return Pushed(*self._native.text(handle, content, token_count, now))

    def tokens(
        self,
        handle: int,
        token_ids: bytes,
        now: int,
        logprobs: Iterable[tuple[float, Sequence[tuple[int, float]]]] | None = None,
    ) -> Pushed:
        """Pushes ids, with a log probability and alternatives each if there are any."""
        listed = None if logprobs is None else [(own, list(top)) for own, top in logprobs]
        return Pushed(*self._native.tokens(handle, token_ids, listed, now))

    def finish(self, handle: int, reason: FinishReason, now: int) -> Pushed:
        """Pushes the backend's end."""
        return Pushed(*self._native.finish(handle, reason, now))

    def close(self, handle: int, now: int) -> bytes:
        """Ends the input without a finish; returns the last events."""
        return self._native.close(handle, now)

    def fail(self, handle: int, reason: str, message: str, request_id: str) -> bytes:
        """Ends the stream with its protocol's failure frame; returns it."""
        return self._native.fail(handle, reason, message, request_id)

    def push_tokens(self, handles: bytes, counts: bytes, token_ids: bytes, now: int) -> PushedBatch:
        """Pushes ids to many streams in one call: all arguments are little-endian u32.

        `counts[k]` of the ids belong to `handles[k]`. Raises: ValueError when they do not add up.
        """
        return PushedBatch(*self._native.push_tokens(handles, counts, token_ids, now))

    def folded(self, handle: int) -> bytes:
        """Returns the complete response as JSON, as far as it has come."""
        return self._native.folded(handle)

    def num_completion_tokens(self, handle: int) -> int:
        """Returns how many output tokens the stream has counted."""
        return self._native.usage(handle)[2]

    def is_over(self, handle: int) -> bool:
        """Returns whether the stream wrote its finish or failed."""
        return self._native.is_over(handle)

    def remove(self, handle: int) -> bool:
        """Throws a stream away; returns whether there was one."""
        return self._native.remove(handle)
