"""Raw ASGI answers: one JSON body, or server-sent events.

A client that takes nothing for the progress timeout is cut off; how much waits for it is bounded
by its `OutputBuffer` (P-12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from services.common.clock import SYSTEM_CLOCK, Clock
from services.entrypoint.api.dialect import Headers
from services.entrypoint.client_left import ClientLeft
from services.entrypoint.http_protocol import ABORT_EXTENSION

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

KEEP_ALIVE_COMMENT: Final = b": keep-alive\n\n"
# Against proxies that collect a response before they pass it on (UR-22).
STREAM_HEADERS: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
SECURITY_HEADERS: Final[Headers] = [(b"x-content-type-options", b"nosniff")]


class Answer:
    """One HTTP response in progress."""

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        send: Send,
        progress_timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._send = send
        self._timeout_s = progress_timeout_s
        self._clock = clock
        connection = scope.get("extensions", {}).get(ABORT_EXTENSION, {})
        self._abort: Callable[[], None] = connection.get("abort", lambda: None)
        self._num_queued: Callable[[], int] = connection.get("bytes", lambda: 0)
        self.started = False
        self.finished = False
        self.last_sent_s = clock.now_s()

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a complete answer."""
        await self.start(status, headers)
        await self.write(body, more=False)

    async def start(self, status: int, headers: Headers) -> None:
        """Sends the status line and headers."""
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *SECURITY_HEADERS],
            }
        )

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends bytes; waits while the client is slow.

        Raises: ClientLeft when it makes no progress for the timeout.
        """
        message = {"type": "http.response.body", "body": data, "more_body": more}
        num_queued = self._num_queued()
        if num_queued == 0:
            await self._send(message)  # nothing in the way: no timer per event
        else:
            await self._send_slowly(message, num_queued)
        self.finished = not more
        self.last_sent_s = self._clock.now_s()

    async def _send_slowly(self, message: MutableMapping[str, Any], num_queued: int) -> None:
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._send(message)  # it waits for room before it writes anything
                    return
            except TimeoutError:
                still_queued = self._num_queued()
                if still_queued >= num_queued:
                    self.abort()
                    raise ClientLeft("the client does not read") from None
                num_queued = still_queued

    def abort(self) -> None:
        """Breaks the connection: what waits in it is dropped."""
        self._abort()
