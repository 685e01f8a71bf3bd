"""Requests to prompts on behalf of the service: the codec asked, its refusals made Failures."""

from __future__ import annotations

import json
import struct

from pelagos.recipe.v1 import recipe_pb2 as pb

from services.common.errors import Failure, Reason
from services.recipe import codec
from services.recipe._codec import Encoded
from services.recipe.codec import CodecError, Protocol
from services.recipe.registry import LoadedTokenizer, Registry

# Where a Failure carries the API's own error body.
BODY_KEY = "body"
# Peers drop trailers above 8 KiB, all of them. An error this long quotes the request: the middle
# of its text is left out.
MAX_TRAILER_BYTES = 6000
# What comes back must fit one message: at worst an id, of 4 bytes, for each byte of a text, and a
# token of 128 bytes for each id.
MAX_TOKENIZE_BYTES = 32 << 20
MAX_DETOKENIZE_IDS = 1_000_000

_PROTOCOLS: dict[int, Protocol] = {
    pb.PROTOCOL_CHAT: "chat",
    pb.PROTOCOL_RESPONSES: "responses",
    pb.PROTOCOL_MESSAGES: "messages",
}
_REASONS = {
    "request": Reason.INVALID_REQUEST,
    "context_length": Reason.CONTEXT_LENGTH,
    "image": Reason.IMAGE_INVALID,
}


class RequestEncoder:
    """Pure functions of a request, given the models; may be called from any thread."""

    def __init__(self, registry: Registry, context_limit: int) -> None:
        self._registry = registry
        self._context_limit = context_limit
        self._by_model = {
            name: model.tokenizer.tokenizer for name, model in registry.models.items()
        }

    def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Converts, renders and encodes. Raises: Failure with the API's error body."""
        encoded, loaded = self._encode(
            request.protocol, request.body, request.tokenizer, request.context_limit
        )
        special_ids = loaded.special_ids
        kind, schema = encoded.constraint or ("", "")
        response = pb.EncodeResponse(
            token_ids=encoded.token_ids(),
            images=[_image(*image) for image in encoded.images()],
            model=encoded.model,
            model_version=encoded.model_version,
            stream=encoded.stream,
            thinking=encoded.thinking,
            max_tokens=encoded.max_tokens,
            temperature=encoded.temperature,
            top_p=encoded.top_p,
            seed=encoded.seed,
            logprobs=encoded.logprobs,
            top_logprobs=encoded.top_logprobs,
            constraint_kind=kind,
            constraint_schema=schema,
            has_tools=encoded.has_tools,
            parse_state=encoded.parse_state().encode("utf-8"),
            stop_token_ids=struct.pack("<I", special_ids["Eos"]) if "Eos" in special_ids else b"",
            end_of_thinking_id=special_ids.get("ThinkingEnd", 0),
            tokenizer_id=loaded.tokenizer_id,
            starts_in_reasoning=encoded.starts_in_reasoning,
        )
        if request.want_prompt_text:
            response.prompt_text = encoded.prompt
        return response

    def count_tokens(self, request: pb.CountTokensRequest) -> pb.CountTokensResponse:
        """Converts, renders and counts, whatever the context's limit. Raises: Failure."""
        encoded, _ = self._encode(request.protocol, request.body, "", 0xFFFF_FFFF)
        return pb.CountTokensResponse(
            num_tokens=encoded.num_token_ids, image_tokens=encoded.num_image_tokens
        )

    def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Encodes plain text. Raises: Failure(NOT_FOUND), Failure(BODY_TOO_LARGE)."""
        _check_size("bytes of text", len(request.text.encode()), MAX_TOKENIZE_BYTES)
        tokenizer = self._registry.tokenizer_of("", request.tokenizer).tokenizer
        encode = tokenizer.encode_full if request.with_special else tokenizer.encode_plain
        return pb.TokenizeResponse(token_ids=encode(request.text))

    def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Decodes ids.

        Raises: Failure of NOT_FOUND, BODY_TOO_LARGE, or INVALID_REQUEST for half an id.
        """
        _check_size("ids", len(request.token_ids) // 4, MAX_DETOKENIZE_IDS)
        tokenizer = self._registry.tokenizer_of("", request.tokenizer).tokenizer
        if len(request.token_ids) % 4:
            raise Failure(Reason.INVALID_REQUEST, "token ids are 4 bytes each")
        return pb.DetokenizeResponse(text=tokenizer.decode(request.token_ids))

    def list_models(self) -> pb.ListModelsResponse:
        """Lists the models, sorted by name."""
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=model.name,
                    version=model.version,
                    tokenizer=model.tokenizer.name,
                    tokenizer_id=model.tokenizer.tokenizer_id,
                    vocab_size=model.tokenizer.tokenizer.num_ids,
                    special_ids=model.tokenizer.special_ids,
                )
                for _, model in sorted(self._registry.models.items())
            ]
        )

    def _encode(
        self, protocol: int, body: bytes, tokenizer_name: str, context_limit: int
    ) -> tuple[Encoded, LoadedTokenizer]:
        if protocol not in _PROTOCOLS:
            raise Failure(Reason.INVALID_REQUEST, f"unknown protocol {protocol}")
        try:
            encoded = codec.encode(
                _PROTOCOLS[protocol],
                body,
                self._registry.options,
                self._registry.tokenizer_of("", tokenizer_name).tokenizer,
                context_limit or self._context_limit,
                # The model decides the tokenizer, and only conversion can read the model's name.
                None if tokenizer_name else self._by_model,
            )
        except CodecError as error:
            raise failure_of(error) from None
        return encoded, self._registry.tokenizer_of(encoded.model, tokenizer_name)


def _check_size(what: str, num: int, most: int) -> None:
    if num > most:
        numbers = {"num": str(num), "max": str(most)}
        raise Failure(Reason.BODY_TOO_LARGE, f"{num} {what}, the limit is {most}", numbers)


def failure_of(error: CodecError) -> Failure:
    """Returns the Failure for a refusal, the API's error body in its metadata."""
    if error.status != 400:
        return Failure(Reason.INTERNAL, error.message)
    message, body = _within_trailers(error.message, error.body)
    return Failure(_REASONS[error.kind], message, {BODY_KEY: body})


def _within_trailers(message: str, body: str) -> tuple[str, str]:
    """Returns an error's text and body, both short enough to travel, whatever they quote."""
    if _trailer_bytes(message, body) <= MAX_TRAILER_BYTES:
        return message, body
    parsed = json.loads(body)
    num_kept = min(len(message), MAX_TRAILER_BYTES)
    while True:
        # The start says what is wrong, the end often what was expected.
        num_kept = num_kept * 3 // 4
        num_head, num_tail = num_kept * 2 // 3, num_kept // 3
        num_left_out = len(message) - num_head - num_tail
        tail = message[len(message) - num_tail :]
        cut = f"{message[:num_head]} … ({num_left_out} characters) … {tail}"
        parsed["error"]["message"] = cut
        # As the codec writes it: no spaces, nothing escaped that need not be.
        written = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
        if _trailer_bytes(cut, written) <= MAX_TRAILER_BYTES:
            return cut, written


def _trailer_bytes(message: str, body: str) -> int:
    """Returns what an error takes on the wire: a percent-encoded text, and both as base64."""
    text = message.encode("utf-8")
    num_encoded = sum(not 0x20 <= byte <= 0x7E for byte in text[: MAX_TRAILER_BYTES + 1])
    return len(text) + 2 * num_encoded + (len(text) + len(body.encode("utf-8"))) * 4 // 3


def _image(
    start: int,
    num_tokens: int,
    width: int,
    height: int,
    url: str,
    data: bytes,
    detail: str,
    path: str,
) -> pb.Image:
    return pb.Image(
        start=start,
        num_tokens=num_tokens,
        width=width,
        height=height,
        url=url,
        data=data,
        detail=detail,
        path=path,
    )
