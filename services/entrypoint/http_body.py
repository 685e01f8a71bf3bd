"""Reading a body: bounded in size and in time, scanned while it arrives.

Source: reliability-and-security.md, section 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.entrypoint.api.dialect import HTTP_STATUS_KEY, Dialect
from services.entrypoint.body_checks import check_body, has_images, parse_skeleton
from services.entrypoint.json_scan import JsonScanner
from services.entrypoint.limits import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_INLINE_SKELETON_BYTES = 256 * 1024  # a larger one is parsed off the loop


@dataclass(frozen=True)
class Body:
    """A body that passed: the bytes for the codec, and its parsed skeleton for us."""

    data: bytes
    document: Any


class ClientGone(Exception):
    """The client has left before its request was complete."""


async def read_body(
    scope: Scope,
    receive: Receive,
    dialect: Dialect,
    limits: Limits,
    clock: Clock = SYSTEM_CLOCK,
) -> Body:
    """Returns the body, or raises Failure, or ClientGone."""
    headers = dict(scope["headers"])
    _check_encoding(headers)
    max_bytes = dialect.max_body_bytes(limits)
    _check_length(headers, max_bytes)
    scanner = JsonScanner(limits)
    pieces: list[bytes] = []
    num_bytes = 0
    start_s = clock.now_s()
    while True:
        # The clock runs ahead of the slowest rate by the grace.
        due_s = start_s + limits.body_grace_s + num_bytes / limits.min_body_bytes_per_s
        try:
            async with asyncio.timeout(max(0.0, due_s - clock.now_s())):
                message = await receive()
        except TimeoutError:
            raise Failure(
                Reason.INVALID_REQUEST,
                "the request body came too slowly",
                {HTTP_STATUS_KEY: "408", "min_bytes_per_s": str(limits.min_body_bytes_per_s)},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise _too_large(num_bytes, max_bytes)
        scanner.feed(piece)
        pieces.append(piece)
        if not message.get("more_body", False):
            break
    skeleton = scanner.finish()
    if len(skeleton) <= _INLINE_SKELETON_BYTES:
        document = parse_skeleton(skeleton)
    else:
        document = await asyncio.to_thread(parse_skeleton, skeleton)
    check_body(document, dialect.api, limits)
    if num_bytes > limits.max_body_bytes and not has_images(document, dialect.api):
        raise _too_large(num_bytes, limits.max_body_bytes)
    return Body(b"".join(pieces), document)


def _check_encoding(headers: MutableMapping[bytes, bytes]) -> None:
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b""):
        raise Failure(
            Reason.INVALID_REQUEST,
            "compressed request bodies are not accepted",
            {HTTP_STATUS_KEY: "415"},
        )


def _check_length(headers: MutableMapping[bytes, bytes], max_bytes: int) -> None:
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and len(declared) < 20 and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)


def _too_large(num_bytes: int, max_bytes: int) -> Failure:
    return Failure(
        Reason.BODY_TOO_LARGE,
        f"the request body has {num_bytes} bytes, the limit is {max_bytes}",
        {"num_bytes": str(num_bytes), "max_bytes": str(max_bytes)},
    )
