"""The admin listener: metrics, census, health and configuration, on loopback (S-10).

Routes: /metrics (Prometheus), /census, /config (secrets left out), /healthz (the process's own
loops advance), /readyz (it can serve now). A few lines of HTTP/1.1, one request per connection:
a web framework here would be a dependency of every light service.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from services.common.census import Census
from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.config import ConfigError
from services.common.metrics import Metrics
from services.common.rpc_server import is_loopback

MAX_HEADER_BYTES: Final = 8192
HEADER_TIMEOUT_S: Final = 5.0
MAX_CONNECTIONS: Final = 32
_HEARTBEAT_S: Final = 0.25


@dataclass(frozen=True)
class Reply:
    """What a route answers."""

    status: int
    body: bytes
    content_type: str = "application/json"


Route = Callable[[], Awaitable[Reply]]


class Heartbeats:
    """Ages of the loops that must advance. A busy loop is fine, a stuck one is not (P-20)."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._loops: dict[str, tuple[Callable[[], float], float]] = {}
        self._event_loop_s = clock.now_s()
        self.register("event_loop", lambda: clock.now_s() - self._event_loop_s, 3.0)

    def register(self, name: str, age_s: Callable[[], float], max_age_s: float) -> None:
        """Adds a loop: how old its last turn is, and how old it may be."""
        self._loops[name] = (age_s, max_age_s)

    def ages_s(self) -> dict[str, float]:
        """Returns each loop's age."""
        return {name: round(age_s(), 3) for name, (age_s, _) in self._loops.items()}

    @property
    def is_alive(self) -> bool:
        """Returns whether every loop has turned recently enough."""
        return all(age_s() <= max_age_s for age_s, max_age_s in self._loops.values())

    async def run(self) -> None:
        """Stamps the event loop's own heartbeat until cancelled."""
        while True:
            self._event_loop_s = self._clock.now_s()
            await self._clock.sleep(_HEARTBEAT_S)


class AdminServer:
    """Serves the admin routes; every one of them needs the token if there is one."""

    def __init__(
        self,
        listen: str,
        *,
        metrics: Metrics,
        census: Census,
        heartbeats: Heartbeats,
        is_ready: Callable[[], bool],
        config_document: dict[str, Any],
        token: str = "",
    ) -> None:
        if not is_loopback(listen) and not token:
            raise ConfigError(f"admin_listen: {listen} is off loopback and needs admin_token")
        self._listen = listen
        self._token = token
        self._server: asyncio.Server | None = None
        self._num_connections = 0
        self._routes: dict[str, Route] = {
            "/metrics": _constant(
                lambda: Reply(200, metrics.render(), "text/plain; version=0.0.4; charset=utf-8")
            ),
            "/census": _constant(lambda: _json(200, census.snapshot())),
            "/config": _constant(lambda: _json(200, config_document)),
            "/healthz": _constant(
                lambda: _json(200 if heartbeats.is_alive else 503, {"ages_s": heartbeats.ages_s()})
            ),
            "/readyz": _constant(lambda: _json(200 if is_ready() else 503, {"ready": is_ready()})),
        }

    def add(self, path: str, route: Route) -> None:
        """Adds a service's own route, such as a scheduler's state. GET only."""
        self._routes[path] = route

    @property
    def paths(self) -> tuple[str, ...]:
        """Returns every route, for the generated inventory."""
        return tuple(sorted(self._routes))

    async def start(self) -> str:
        """Starts to listen and returns the address. Raises ConfigError."""
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=MAX_HEADER_BYTES
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"admin_listen: cannot listen on {self._listen}: {error}") from None
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections > MAX_CONNECTIONS:
                return
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            reply = await self._answer(head.decode("latin-1"))
            writer.write(_encode(reply))
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # slow, broken or too long: there is nobody to tell
        finally:
            self._num_connections -= 1
            writer.close()

    async def _answer(self, head: str) -> Reply:
        first, *lines = head.split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if self._token and not self._is_authorized(lines):
            return _json(401, {"error": "a bearer token is needed"})
        if method not in ("GET", "HEAD"):
            return _json(405, {"error": "only GET"})
        route = self._routes.get(path)
        if route is None:
            return _json(404, {"error": "no such route", "routes": list(self.paths)})
        return await route()

    def _is_authorized(self, lines: list[str]) -> bool:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == "authorization":
                return hmac.compare_digest(value.strip().encode(), f"Bearer {self._token}".encode())
        return False


def _constant(make: Callable[[], Reply]) -> Route:
    async def route() -> Reply:
        return make()

    return route


def _json(status: int, document: Any) -> Reply:
    return Reply(status, json.dumps(document, indent=2).encode() + b"\n")


def _encode(reply: Reply) -> bytes:
    phrase = {200: "OK", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
    head = (
        f"HTTP/1.1 {reply.status} {phrase.get(reply.status, 'Service Unavailable')}\r\n"
        f"Content-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + reply.body
