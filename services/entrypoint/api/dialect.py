"""What a dialect is, and how a failure reads in it before a stream has begun.

Source: reliability-and-security.md, section 4; recipe.md, section 10.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Final

from services.common.errors import Api, Failure, Reason
from services.entrypoint.limits import Limits

Headers = list[tuple[bytes, bytes]]

# Metadata key under which the codec sends the body that an API wants verbatim.
CODEC_BODY_KEY: Final = "body"
# An HTTP status that the table of reasons does not have (408, 415), or the codec's own.
HTTP_STATUS_KEY: Final = "http_status"
_UNSHOWN_TEXT: Final = "The server had an error while processing your request."


@dataclass(frozen=True)
class Dialect:
    """One API as clients know it.

    Args:
        paths: where it is served; the first is the one in documents.
        takes_images: whether bodies with images may be as large as three times the plain limit.
    """

    api: Api
    paths: tuple[str, ...]
    takes_images: bool

    def max_body_bytes(self, limits: Limits) -> int:
        """Returns the largest body this API takes."""
        return limits.max_body_with_images_bytes if self.takes_images else limits.max_body_bytes


@dataclass(frozen=True)
class ErrorResponse:
    """A whole HTTP answer for a failure."""

    status: int
    headers: Headers
    body: bytes


def error_response(
    failure: Failure, api: Api, request_id: str, rng: random.Random
) -> ErrorResponse:
    """Returns the answer for a failure that came before the response headers.

    A body made by the codec passes unchanged; everything else gets the API's own shape. The finer
    reason travels in `x-error-reason`.
    """
    shown = failure.reason.shown_as
    facts = shown.facts
    status = _status(failure, shown.http_status(api))
    codec_body = failure.metadata.get(CODEC_BODY_KEY)
    body = codec_body.encode() if codec_body else error_body(failure, api, request_id)
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
        (b"x-error-reason", shown.value.encode()),
        (b"x-should-retry", b"true" if facts.sdk_should_retry else b"false"),
    ]
    if api is Api.MESSAGES:
        headers.append((b"request-id", request_id.encode()))
    if facts.sdk_should_retry:
        headers.append((b"retry-after", str(retry_after_s(failure, rng)).encode()))
    if status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    if shown is Reason.UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    return ErrorResponse(status, headers, body)


def error_body(failure: Failure, api: Api, request_id: str) -> bytes:
    """Returns the JSON body of a failure that the entrypoint itself reports."""
    shown = failure.reason.shown_as
    kind = shown.http_type(api)
    message = public_message(failure)
    if api is Api.MESSAGES:
        document: dict[str, object] = {
            "type": "error",
            "error": {"type": kind, "message": message},
            "request_id": request_id,
        }
    else:
        # As the codec does: 4xx carry its one code, 5xx repeat their type.
        code = "invalid_request_error" if shown.http_status(api) < 500 else kind
        document = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def public_message(failure: Failure) -> str:
    """Returns the text a client may see: ours for what is its own doing, a fixed one for faults."""
    shown = failure.reason.shown_as
    if shown is Reason.INTERNAL or shown is not failure.reason or not failure.message:
        return _TEXTS.get(shown, _UNSHOWN_TEXT)
    if shown in _TEXTS:
        return _TEXTS[shown]  # the message names instances, the client does not
    return failure.message


# Failures of instances: what happened inside is in the trace, not in the text. Codec, compiler and
# balancers can be lost or missing as engines can, so no text says which it was.
_TEXTS: Final[dict[Reason, str]] = {
    Reason.OVERLOADED: "The server is overloaded. Please try again later.",
    Reason.QUEUE_TIMEOUT: "The request waited too long for a free engine. Please try again later.",
    Reason.DRAINING: "The server is restarting. Please try again.",
    Reason.NO_INSTANCE: "The server cannot run this request at the moment. Please try again later.",
    Reason.BACKEND_LOST: "The server lost what ran this request. Please try again.",
    Reason.DEADLINE: "The request's deadline has passed.",
}


def retry_after_s(failure: Failure, rng: random.Random) -> int:
    """Returns the `Retry-After` of a failure: jittered, whole seconds, 1 to 30."""
    base_s = 1.0 if failure.retry_after_s is None else failure.retry_after_s
    return max(1, min(30, math.ceil(base_s * rng.uniform(1.0, 1.5))))


def failure_frames(
    failure: Failure, api: Api, request_id: str, response_id: str, num_frames: int
) -> bytes:
    """Returns how a stream ends that has begun and whose codec stream is lost too.

    Normally the codec words this (`ParseFail`); this is for when it cannot. No success frame
    follows, and no clean close without a terminal frame (UR-20).

    Args:
        num_frames: events sent so far; the next sequence number of a Responses stream.
    """
    body = json.loads(error_body(failure, api, request_id))
    error = body["error"]
    if api is Api.CHAT:
        error["request_id"] = request_id
        return _frame(None, body) + b"data: [DONE]\n\n"
    if api is Api.MESSAGES:
        return _frame("error", body)
    response = {
        "id": response_id,
        "object": "response",
        "status": "failed",
        "error": {"code": error["code"], "message": error["message"]},
        "metadata": {"request_id": request_id},
    }
    event = {"type": "response.failed", "sequence_number": num_frames, "response": response}
    return _frame("response.failed", event)


def _frame(name: str | None, document: dict[str, object]) -> bytes:
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return (
        (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + data + b"\n\n"
    )


def _status(failure: Failure, status: int) -> int:
    text = failure.metadata.get(HTTP_STATUS_KEY, "")
    return int(text) if text.isdigit() and 400 <= int(text) < 600 else status
