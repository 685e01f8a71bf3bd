"""`pelagos up`: starts the local stack, says how to talk to it, stops it on Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from deploy.local.etcd import EtcdFailed, EtcdMissing
from deploy.local.model import ModelUnfit
from deploy.local.plan import StackConfig
from deploy.local.process import StartFailed
from deploy.local.stack import Stack, StackRunning, read_state
from services.common.config import ConfigError, load, require, usage

DEFAULT_HTTP_PORT: Final = 8000
# A quick start must not fail on a port that is taken.
_MESSAGE: Final = """
ready in {seconds:.0f} s: {count} processes, engine {engine}, model {model}

  address   {url}
  key       {key_file}
  logs      {logs}

try it (in another terminal):

  curl -s {url}/v1/chat/completions \\
    -H "Authorization: Bearer $(cat '{key_file}')" -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "{hello}"}}],
         "temperature": 0, "thinking": {{"type": "disabled"}}}}'

  {commands}      Ctrl-C stops everything
"""


@dataclass(frozen=True)
class UpConfig(StackConfig):
    """The stack, and what only the command needs."""

    http_port: int = DEFAULT_HTTP_PORT
    exit_when_ready: bool = False  # start, print, stop: a smoke test

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.http_port <= 65_535, "http_port must be in [0, 65535]")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stack until it is told to stop. 0: stopped as asked; 1: it failed; 2: bad flags."""
    args = list(argv or ())
    if "--help" in args or "-h" in args:
        print(usage(UpConfig, "up").replace("pelagos serve up", "pelagos up"))
        return 0
    try:
        loaded = load(UpConfig, "up", args, os.environ)
    except ConfigError as error:
        print(f"pelagos up: {error}", file=sys.stderr)
        return 2
    if loaded.check_only:
        return 0
    return asyncio.run(_up(loaded.config))


async def _up(config: UpConfig) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    if read_state(config.folder) is None:  # else it is that stack that has the port
        config = replace(config, http_port=free_port_or_any(config.http_port))
    phase = "starting "
    stack = Stack(config, on_progress=lambda text: _say(f"{phase}{text}"))
    started_s = loop.time()
    try:
        start = asyncio.ensure_future(stack.start())
        asked = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({start, asked}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            await start  # raises what went wrong
            _announce(stack, config, loop.time() - started_s)
            phase = ""
            if not config.exit_when_ready:
                await asked
        else:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        asked.cancel()
        return 0
    except StackRunning as error:
        where = "" if config.folder == default_folder() else f" {shlex.quote(str(config.folder))}"
        _say(f"{error}; `pelagos status{where}` shows it")
        return 1
    except ModelUnfit as error:
        _say(f"pelagos up: {error}")
        return 1
    except (StartFailed, EtcdMissing, EtcdFailed, OSError) as error:
        _say(f"failed: {error}")
        _say("`pelagos doctor` looks for what is wrong with this machine")
        return 1
    finally:
        phase = "stopping "
        await stack.stop()


def _announce(stack: Stack, config: UpConfig, seconds: float) -> None:
    print(
        _MESSAGE.format(
            commands=commands(_program(), config.folder),
            seconds=seconds,
            count=len(list(stack)) + 1,
            engine=config.engine,
            url=stack.base_url,
            key_file=stack.api_key_file,
            logs=stack.folder / "logs",
            model=config.model,
            hello="Hello, ocean" if config.engine == "sim" else "Who are you?",
        ),
        flush=True,
    )


def commands(program: str, folder: Path) -> str:
    """Returns what to type to talk to the stack in a folder and to look at it."""
    if folder == default_folder():
        return f"{program} chat      {program} status"
    where = shlex.quote(str(folder))
    return f"{program} chat --folder {where}      {program} status {where}"


def _program() -> str:
    """Returns what to type for this command: its name where the shell finds it, else its path."""
    if shutil.which("pelagos"):
        return "pelagos"
    path, here = Path(sys.argv[0]), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def free_port_or_any(port: int) -> int:
    """Returns the port when nobody listens on it, else 0 for any free one."""
    if port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                _say(f"port {port} is taken, using a free one")
                return 0
    return port


def default_folder() -> Path:
    """Returns where the stack of this checkout lies."""
    return StackConfig().folder


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
