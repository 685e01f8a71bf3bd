"""Requests, events and hand-off records from and to their protobuf messages.

Protobuf messages only, no gRPC: prefill and decode share it, and so may an adapter.
Source: engine.md, section 7.4; protos/pelagos/engine/v1/records.proto.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.engine.keys import KEY_BYTES, NO_ROOT, MediaSpan
from services.engine.layout import Geometry, KvLayout
from services.engine.requests import (
    FinishReason,
    Image,
    RequestKey,
    Sampling,
    TokenOut,
    Tokens,
    Usage,
    u32_array,
)

MIN_LOGPROB = -9999.0  # how -inf is sent


def key_from_proto(message: pb.RequestKey) -> RequestKey:
    """Raises: Failure when the request has no id."""
    if not message.request_id:
        raise Failure(Reason.INVALID_REQUEST, "the request has no id")
    return RequestKey(message.request_id, message.branch, message.epoch, message.attempt)


def key_to_proto(key: RequestKey) -> pb.RequestKey:
    return pb.RequestKey(**asdict(key))


def sampling_from_proto(message: pb.Sampling) -> Sampling:
    """Zero values mean what the proto says they mean; ranges are checked at intake."""
    temperature = message.temperature
    return Sampling(
        temperature=temperature if math.isfinite(temperature) else -1.0,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        end_of_thinking_id=message.end_of_thinking_id,
        starts_in_reasoning=message.starts_in_reasoning,
    )


def images_from_proto(spec: pb.RequestSpec) -> tuple[Image, ...]:
    return tuple(
        Image(MediaSpan(m.start, m.num_tokens, m.digest), m.width, m.height, m.data)
        for m in spec.media
    )


def tokens_from_spec(spec: pb.RequestSpec, geometry: Geometry) -> Tokens:
    """The prompt with its cache identity. A root of the wrong size is no identity."""
    media = tuple(MediaSpan(m.start, m.num_tokens, m.digest) for m in spec.media)
    root = spec.namespace.root if len(spec.namespace.root) == KEY_BYTES else NO_ROOT
    return Tokens(geometry, u32_array(spec.prompt_tokens), media, root)


def stored_keys_agree(spec: pb.RequestSpec, tokens: Tokens) -> bool:
    """Whether the keys that came with the match are those of these very ids (UR-33).

    The engine computes its own chain, so a match made for other ids is no hit.
    """
    if tokens.root == NO_ROOT:
        return False
    given = spec.hit.block_keys
    num = min(len(given) // KEY_BYTES, len(tokens) // tokens.geometry.block_tokens)
    if num * tokens.geometry.block_tokens < spec.hit.stored_tokens:
        return False
    return b"".join(tokens.key(i) for i in range(num)) == given[: num * KEY_BYTES]


def tokens_event(first_index: int, tokens: Sequence[TokenOut], logprobs: bool) -> pb.Tokens:
    """Tokens of one step, ids and log-probabilities packed."""
    message = pb.Tokens(
        first_index=first_index,
        token_ids=array("I", [token.token_id for token in tokens]).tobytes(),
    )
    if logprobs:
        message.logprobs = pack_logprobs(token.logprob for token in tokens)
        if any(token.top for token in tokens):
            message.top.extend(top_to_proto(token.top) for token in tokens)
    return message


def pack_logprobs(values: Iterable[float]) -> bytes:
    return array("f", [v if v > MIN_LOGPROB else MIN_LOGPROB for v in values]).tobytes()


def top_to_proto(top: Sequence[tuple[int, float]]) -> pb.TopLogprobs:
    return pb.TopLogprobs(
        token_ids=array("I", [token_id for token_id, _ in top]).tobytes(),
        logprobs=pack_logprobs(logprob for _, logprob in top),
    )


def tokens_from_event(message: pb.Tokens) -> list[TokenOut]:
    """The tokens of an event. Raises: Failure when its parts do not belong together."""
    ids = u32_array(message.token_ids)
    logprobs = array("f")
    logprobs.frombytes(message.logprobs)
    if len(logprobs) not in (0, len(ids)) or len(message.top) not in (0, len(ids)):
        raise Failure(Reason.INVALID_REQUEST, "tokens and log-probabilities differ in number")
    return [
        TokenOut(
            token_id,
            logprobs[i] if logprobs else 0.0,
            _top_from_proto(message.top[i]) if message.top else (),
        )
        for i, token_id in enumerate(ids)
    ]


def _top_from_proto(message: pb.TopLogprobs) -> tuple[tuple[int, float], ...]:
    logprobs = array("f")
    logprobs.frombytes(message.logprobs)
    return tuple(zip(u32_array(message.token_ids), logprobs, strict=True))


def output_of_record(record: pb.HandoffRecord) -> list[TokenOut]:
    """Output tokens of this attempt so far, with what was said about them."""
    return tokens_from_event(
        pb.Tokens(
            token_ids=record.output_tokens,
            logprobs=record.output_logprobs,
            top=record.output_top,
        )
    )


def usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(**asdict(usage))


def usage_from_proto(message: pb.Usage) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.cached_tokens,
        message.replayed_tokens,
        message.output_tokens,
        message.reasoning_tokens,
        message.drafted_tokens,
        message.accepted_tokens,
    )


def finish_to_proto(reason: FinishReason) -> pb.FinishReason.ValueType:
    return pb.FinishReason.Value(f"FINISH_REASON_{reason.name}")


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    geometry = layout.geometry
    return pb.KvLayout(
        block_tokens=geometry.block_tokens,
        block_bytes=layout.block_bytes,
        parts=[
            pb.KvPart(
                name="main_kv",
                layer=section.source_layer,
                offset_bytes=section.offset_bytes,
                length_bytes=section.length_bytes,
                format=section.element_format,
                compress_ratio=section.compress_ratio,
            )
            for section in layout.sections
        ],
        state_bytes=layout.state_bytes,
        ring_tokens=geometry.ring,
        window_tokens=geometry.window,
        byte_order=layout.byte_order,
    )
