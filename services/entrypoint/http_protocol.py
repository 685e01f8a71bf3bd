"""uvicorn's HTTP/1.1 protocol with the limits that must hold before any request exists.

Request line, headers and their count (431), time to complete headers (408), connections per
address (429) and in all (503), requests sent ahead of their answers. Bodies are limited where they
are read (`http_body.py`). Source: reliability-and-security.md, section 3.
"""

from __future__ import annotations

import asyncio
import http
import json
from collections import Counter
from collections.abc import MutableMapping
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.common.errors import Reason
from services.common.ids import new_request_id
from services.entrypoint.limits import Limits

# ASGI extension under which a handler finds how to break its connection.
ABORT_EXTENSION: Final = "pelagos.abort"
_UNKNOWN: Final = "unknown"
_REASONS: Final = {429: Reason.QUOTA, 503: Reason.OVERLOADED}  # of what is not the request's fault


class _Refused(Exception):
    """Stops the parser in the middle of what was received."""


class Connections:
    """Who is connected; shared by all protocols of one listener."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._by_address: Counter[str] = Counter()
        self.num_refused = 0
        self.is_draining = False

    @property
    def num_open(self) -> int:
        """Returns the open connections."""
        return self._by_address.total()

    def enter(self, address: str) -> int:
        """Takes a place; returns 0, or the HTTP status of the refusal."""
        if self.num_open >= self.limits.max_connections:
            self.num_refused += 1
            return 503
        if self._by_address[address] >= self.limits.max_connections_per_address:
            self.num_refused += 1
            return 429
        self._by_address[address] += 1
        return 0

    def leave(self, address: str) -> None:
        """Gives the place back."""
        self._by_address[address] -= 1
        if self._by_address[address] <= 0:
            del self._by_address[address]


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        connections_in_use: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._in_use = connections_in_use
        self._limits = connections_in_use.limits
        self._address: str | None = None
        self._refused = False
        self._in_headers = False
        self._num_header_bytes = 0  # as received
        self._num_field_bytes = 0  # of the complete fields among them
        self._running: RequestResponseCycle | None = None
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a place, or answers with the refusal and closes."""
        super().connection_made(transport)
        address = self.client[0] if self.client else _UNKNOWN
        status = self._in_use.enter(address)
        if status:
            text = "too many connections"
            self._refuse(status, "rate_limit_error" if status == 429 else "server_error", text)
            return
        self._address = address
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the place back; the running request learns of it, the waiting ones never run."""
        self._stop_header_timer()
        # uvicorn tells the newest request alone, which may be one that waits behind this one.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        if self._address is not None:
            self._in_use.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts header bytes until they are complete."""
        if self._refused:
            return
        if self._header_timer is None and not self._in_headers and self._is_between_requests:
            self._start_header_timer()
        super().data_received(data)
        if self._in_headers:
            # Also for a header that never ends: nothing of it has reached on_header yet.
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self._limits.max_header_bytes * 2:
                self._refuse(431, "invalid_request_error", "the request headers are too large")

    def on_message_begin(self) -> None:
        """Starts a request's counts."""
        super().on_message_begin()
        self._in_headers = True
        self._num_header_bytes = self._num_field_bytes = 0
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self._abort, "bytes": self._queued}}

    def on_url(self, url: bytes) -> None:
        """Checks the length of the request line."""
        super().on_url(url)
        if len(self.url) > self._limits.max_request_line_bytes:
            self._refuse(431, "invalid_request_error", "the request line is too long")
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        """Checks size and number of the headers."""
        super().on_header(name, value)
        self._num_field_bytes += len(name) + len(value) + 4
        if (
            self._num_field_bytes > self._limits.max_header_bytes
            or len(self.headers) > self._limits.max_headers
        ):
            self._refuse(431, "invalid_request_error", "the request headers are too large")
            raise _Refused  # what was received may hold tens of thousands more

    def on_headers_complete(self) -> None:
        """Hands the request over, unless it was refused."""
        self._in_headers = False
        self._stop_header_timer()
        if self._refused:
            return
        super().on_headers_complete()
        if self._in_use.is_draining:
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            _end_with_the_connection(self.cycle)
        if len(self.pipeline) > self._limits.max_pipelined:
            self._refuse(400, "invalid_request_error", "too many requests wait for their answers")
            raise _Refused
        if self.pipeline:
            # uvicorn reads no more until the answer is out, and so would not see the client leave.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Passes a piece of the body on."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the request's body."""
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, unless it is the refusal that stopped the parser."""
        self._refuse(400, "invalid_request_error", "the request is not valid HTTP")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_header_timer(self) -> None:
        self._stop_header_timer()
        self._header_timer = self.loop.call_later(
            self._limits.header_timeout_s, self._on_header_timeout
        )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        self._refuse(408, "invalid_request_error", "the request headers came too slowly")

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Answers with an error and closes; what else was received is dropped.

        While another answer is in progress an error has no place on the wire: the connection ends.
        """
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_header_timer()
        if self._running is not None and not self._running.response_complete:
            self.transport.abort()
            return
        error = {"message": message, "type": kind, "param": None, "code": kind}
        body = json.dumps({"error": error}, separators=(",", ":")).encode()
        phrase = http.HTTPStatus(status).phrase
        retry = "retry-after: 1\r\n" if status in (429, 503) else ""
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-should-retry: {str(bool(retry)).lower()}\r\n"
            f"x-request-id: {new_request_id()}\r\n"
            f"x-error-reason: {_REASONS.get(status, Reason.INVALID_REQUEST).value}\r\n"
            f"{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _abort(self) -> None:
        self.transport.abort()

    def _queued(self) -> int:
        return self.transport.get_write_buffer_size()


def _end_with_the_connection(cycle: RequestResponseCycle) -> None:
    """Makes an answer to HTTP/1.0 of unknown length end by closing: chunks are 1.1 (RFC 9112)."""
    send = cycle.send
    has_length = True

    async def send_unframed(message: MutableMapping[str, Any]) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    cycle.send = send_unframed  # type: ignore[method-assign,assignment]
