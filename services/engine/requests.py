"""What an engine knows of a request: values, intake checks, and the growing sequence.

No I/O, no clock, no protobuf: `records.py` converts from and to the wire.
Source: engine.md, sections 1.3, 7.4 and 7.7.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.common.errors import Failure, Reason
from services.engine.keys import NO_ROOT, MediaSpan, encoded_extra, next_key
from services.engine.layout import Geometry

GREEDY_BELOW = 1e-5
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, order=True)
class RequestKey:
    """One attempt of one request; (request_id, branch) names the request itself."""

    request_id: str
    branch: int = 0
    epoch: int = 0
    attempt: int = 0

    @property
    def stream(self) -> tuple[str, int]:
        return self.request_id, self.branch


@dataclass(frozen=True)
class Sampling:
    """How output tokens are drawn. `seed` is resolved: noise depends on it and on positions."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0
    end_of_thinking_id: int = 0
    starts_in_reasoning: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Image:
    """One media item: where it lies in the prompt, and its bytes if they came along."""

    span: MediaSpan
    width: int
    height: int
    data: bytes = b""


@dataclass(frozen=True)
class TokenOut:
    """A token, its log-probability, and the most likely alternatives (id, logprob)."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(enum.Enum):
    """Why a request ended; the names are those of the proto enum."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    INSUFFICIENT_SYSTEM_RESOURCE = "insufficient_system_resource"
    PREEMPTED_RESUMABLE = "preempted_resumable"
    GRAMMAR_ERROR = "grammar_error"
    VISION_ERROR = "vision_error"


@dataclass
class Usage:
    """Counters of one request, absolute over all its attempts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Limits:
    """What an engine can hold; checked before a request is queued."""

    max_model_len: int
    vocab_size: int
    num_blocks: int  # pool size, the padding block included
    image_token_id: int = -1


def check_intake(
    token_ids: SequenceOf[int],
    sampling: Sampling,
    media: SequenceOf[MediaSpan],
    limits: Limits,
    geometry: Geometry,
    num_resumed: int = 0,
) -> None:
    """Refuses what could never be served, before it is queued (1.3).

    Raises: Failure with INVALID_REQUEST, CONTEXT_LENGTH or NOT_FITTING.
    """
    num = len(token_ids)
    if num == 0:
        raise Failure(Reason.INVALID_REQUEST, "the prompt is empty")
    if num_resumed >= num:
        raise Failure(Reason.INVALID_REQUEST, "a resumed request has no prompt of its own")
    if num > limits.max_model_len:
        raise Failure(
            Reason.CONTEXT_LENGTH,
            f"{num} tokens, the limit is {limits.max_model_len}",
            {"num_tokens": str(num), "max_tokens": str(limits.max_model_len)},
        )
    highest = max(token_ids)
    if highest >= limits.vocab_size:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"token id {highest} is not below {limits.vocab_size}",
            {"token_id": str(highest), "vocab_size": str(limits.vocab_size)},
        )
    _check_media(token_ids, media, limits)
    _check_sampling(sampling)
    # A pool that cannot hold the prompt and one step of output never will (UR-59).
    needed = geometry.num_blocks(num + geometry.max_draft + geometry.back)
    if needed >= limits.num_blocks:
        raise Failure(
            Reason.NOT_FITTING,
            f"the request needs {needed} blocks, the pool has {limits.num_blocks - 1}",
            {"num_blocks": str(needed), "max_blocks": str(limits.num_blocks - 1)},
        )


def _check_sampling(sampling: Sampling) -> None:
    def refuse(text: str) -> None:
        raise Failure(Reason.INVALID_REQUEST, text)

    if sampling.max_tokens < 1:
        refuse("max_tokens is at least 1")
    if not (math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= 2):
        refuse("temperature is in [0, 2]")
    if not 0 < sampling.top_p <= 1:
        refuse("top_p is in (0, 1]")
    if sampling.top_k < -1:
        refuse("top_k is -1, 0 or at least 1")
    if not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        refuse(f"top_logprobs is in [0, {MAX_TOP_LOGPROBS}]")
    if sampling.top_logprobs and not sampling.logprobs:
        refuse("top_logprobs needs logprobs")
    if not 0 <= sampling.seed < 1 << 64:
        refuse("seed is an unsigned 64-bit number")


def _check_media(token_ids: SequenceOf[int], media: SequenceOf[MediaSpan], limits: Limits) -> None:
    image_id = limits.image_token_id
    if image_id < 0:
        return
    at, in_spans = 0, 0
    for span in sorted(media, key=lambda m: m.start):
        if span.start < at or span.end > len(token_ids) or span.num_tokens < 1:
            raise Failure(Reason.INVALID_REQUEST, "image spans overlap or leave the prompt")
        if any(token_ids[i] != image_id for i in range(span.start, span.end)):
            raise Failure(Reason.INVALID_REQUEST, "an image span holds other token ids")
        if len(span.digest) != 32:
            raise Failure(Reason.INVALID_REQUEST, "an image digest has 32 bytes")
        at = span.end
        in_spans += span.num_tokens
    count = token_ids.count(image_id)
    if count != in_spans:
        raise Failure(Reason.INVALID_REQUEST, "an image token lies outside every image span")


@dataclass
class Tokens:
    """A sequence's ids and the keys of its complete blocks, both growing at the end."""

    geometry: Geometry
    ids: array[int]  # type code "I": u32 little-endian on every machine we run on
    media: tuple[MediaSpan, ...] = ()
    root: bytes = NO_ROOT
    keys: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, token_ids: SequenceOf[int]) -> None:
        self.ids.extend(token_ids)

    def block_ids(self, block: int) -> bytes:
        """Ids of a block as bytes; fewer than a block's worth for the tail."""
        size = self.geometry.block_tokens
        return self.ids[block * size : (block + 1) * size].tobytes()

    def extra(self, block: int) -> bytes:
        """Encoded media list of a block."""
        if not self.media:
            return b""
        return encoded_extra(block, self.geometry.block_tokens, self.media)

    def key(self, block: int) -> bytes:
        """Key of a complete block; keys up to it are computed on the way."""
        size = self.geometry.block_tokens
        while len(self.keys) <= block:
            at = len(self.keys)
            if (at + 1) * size > len(self.ids):
                raise IndexError(f"block {at} is not complete")
            self.keys.append(next_key(self.parent(at), self.block_ids(at), self.extra(at)))
        return self.keys[block]

    def parent(self, block: int) -> bytes:
        """Key that the block's own is chained from."""
        return self.root if block == 0 else self.key(block - 1)


def u32_array(data: bytes) -> array[int]:
    """Ids from little-endian u32 bytes. Raises: Failure when a word is cut."""
    if len(data) % 4:
        raise Failure(Reason.INVALID_REQUEST, "token ids are whole 32-bit words")
    ids = array("I")
    ids.frombytes(data)
    return ids
