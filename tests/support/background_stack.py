"""The local stack for tests that speak to it from outside: in a thread, with its own event loop.

Official SDKs are blocking or bring their own loop, and a stack shared by a whole module must not
live in one test's loop. `BackgroundStack` gives both: `stack.run(coroutine)` works on the stack's
loop, everything else talks HTTP like any client.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from deploy.local.http import http_get
from deploy.local.plan import StackConfig
from deploy.local.stack import Stack

T = TypeVar("T")
START_TIMEOUT_S = 100.0


class BackgroundStack:
    """Starts on entering, stops on leaving; processes are ended by id, in order."""

    def __init__(self, config: StackConfig) -> None:
        self.stack = Stack(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)

    def __enter__(self) -> BackgroundStack:
        self._thread.start()
        try:
            self.run(self.stack.start(), START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.run(self.stack.stop(), START_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        """Runs a coroutine on the stack's loop and returns what it gave."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Returns the loop that the stack's processes are watched on."""
        return self._loop

    @property
    def url(self) -> str:
        """Returns the first entrypoint's address, without a path."""
        return self.stack.base_url

    @property
    def key(self) -> str:
        """Returns the key of the first start."""
        return self.stack.api_key

    def admin(self, process: str, path: str) -> str:
        """Returns what a process's admin listener answers."""
        status, body = self.run(http_get(self.stack[process].admin, path))
        assert status == 200, (process, path, status, body)
        return body

    def census(self, process: str) -> dict[str, dict[str, int]]:
        """Returns what a process holds, by owner and kind."""
        return json.loads(self.admin(process, "/census"))

    def spans(self) -> list[dict[str, Any]]:
        """Returns every span exported so far, of all processes."""
        folder = self.stack.folder / "traces"
        lines = (line for path in sorted(folder.glob("*")) for line in path.open())
        return [json.loads(line) for line in lines if line.strip()]


def scripted_flags(scripts: Path, **settings: object) -> dict[str, list[str]]:
    """Returns the flags that make both engines play scripts of a folder."""
    flags = ["--model.sim.mode=scripted", f"--model.sim.scripts={scripts}"]
    flags += [f"--model.sim.{name}={value}" for name, value in settings.items()]
    return {"prefill": flags, "decode": flags}


def write_script(scripts: Path, request_id: str, script: Mapping[str, object]) -> None:
    """Registers what the engines say to one request; whole or not at all."""
    temporary = scripts / f".{request_id}.tmp"
    temporary.write_text(json.dumps(script), encoding="utf-8")
    temporary.replace(scripts / f"{request_id}.json")
