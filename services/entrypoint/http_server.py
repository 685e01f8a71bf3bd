"""The HTTP listener: our own accept loop around uvicorn's protocol.

uvicorn's server object is left out: it owns signals and its own idea of a stop. Here the stop is
the process's drain: the listener goes on during the notice, then closes; answers in progress go
on; kept-alive connections close after their answer.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from services.common.config import ConfigError
from services.entrypoint.http_protocol import Connections, LimitedHttpProtocol
from services.entrypoint.limits import Limits

_BACKLOG = 2048


class HttpServer:
    """Serves one ASGI application on one address."""

    def __init__(self, app: Any, listen: str, limits: Limits) -> None:
        self._listen = listen
        self.connections = Connections(limits)
        self._state = ServerState()
        self._config = Config(
            app,
            http=LimitedHttpProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            server_header=False,
            date_header=False,
            log_config=None,
            timeout_keep_alive=int(limits.keep_alive_timeout_s),
        )
        self._config.load()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> str:
        """Binds and serves; returns host:port. Raises ConfigError when the address is taken."""
        host, _, port = self._listen.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._protocol, host.strip("[]"), int(port), backlog=_BACKLOG
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot listen on {self._listen}: {error}") from None
        for listener in self._server.sockets:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound = self._server.sockets[0].getsockname()
        self.address = f"{host}:{bound[1]}"
        return self.address

    @property
    def num_requests(self) -> int:
        """Returns the requests in progress; what a drain waits for."""
        return len(self._state.tasks)

    def drain(self) -> None:
        """Takes no new connections; those that are open close after their answer."""
        self.connections.is_draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()

    async def close(self) -> None:
        """Ends everything that is left."""
        self.drain()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        for connection in list(self._state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        await asyncio.sleep(0)

    def _protocol(self) -> asyncio.BaseProtocol:
        return LimitedHttpProtocol(self._config, self._state, {}, self.connections)
