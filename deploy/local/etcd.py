"""An etcd of our own on loopback: the local stack's, and the one that tests stop and break.

async with running_etcd(folder) as etcd:
    store = EtcdStore(etcd.endpoint)
    await etcd.kill(); await etcd.start()         # same ports, same data
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

START_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05
_PORT_TRIES: Final = 5
_ARCH: Final = {"aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
_ROOT: Final = Path(__file__).resolve().parents[2]
_WRAPPER: Final = Path(__file__).with_name("die_with_parent.py")


class EtcdMissing(Exception):
    """No etcd on this machine; `make setup` brings one."""


class EtcdFailed(Exception):
    """etcd did not start; the end of its log says why."""


def find_etcd() -> str:
    """Returns the program: of the machine, else of the checkout. Raises EtcdMissing."""
    found = shutil.which("etcd")
    for local in (_ROOT / ".local/etcd/etcd", _ROOT / ".local/bin/etcd"):
        if found is None and os.access(local, os.X_OK):
            found = str(local)
    if found is None:
        raise EtcdMissing("etcd is neither in PATH nor in .local/: run `make setup`")
    return found


class EtcdProcess:
    """One single-member etcd with a data folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._ports: tuple[int, int] | None = None
        self._wanted = False

    @property
    def endpoint(self) -> str:
        """Returns host:port for clients."""
        assert self._ports is not None, "not started"
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """Returns the process id of the running etcd."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Returns whether the process lives."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts it, on the ports it had before if it had any, and waits until it serves.

        Raises: EtcdMissing; EtcdFailed.
        """
        self._wanted = True
        program = find_etcd()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep = self._ports is not None
        for attempt in range(_PORT_TRIES):
            if not keep:
                self._ports = _free_ports()
            await self._spawn(program)
            if await self._wait_serving():
                return
            # Somebody took a port between our look and etcd's bind: look again.
            if attempt + 1 == _PORT_TRIES or not self._is_port_taken():
                await self.kill()
                raise EtcdFailed(self.log_tail())
            await asyncio.sleep(_POLL_S * (attempt + 1))

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends it in order, by SIGTERM, then by SIGKILL."""
        await self._end(signal.SIGTERM, timeout_s)

    async def kill(self) -> None:
        """Ends it by SIGKILL."""
        await self._end(signal.SIGKILL, 10.0)

    async def wait_crashed(self) -> int:
        """Waits until it has ended although nobody ended it; returns its status."""
        while True:
            process = self._process
            if process is not None:
                status = await process.wait()
                if self._wanted and process is self._process:
                    return status
            await asyncio.sleep(_POLL_S)

    def pause(self) -> None:
        """Freezes it: its port stays open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a frozen one go on."""
        os.kill(self.pid, signal.SIGCONT)

    async def wipe(self) -> None:
        """Kills it and deletes its data; `start` then brings up an empty one."""
        await self.kill()
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def log_tail(self, num_bytes: int = 2000) -> str:
        """Returns the end of its log."""
        with contextlib.suppress(OSError):
            return (self._folder / "etcd.log").read_bytes()[-num_bytes:].decode(errors="replace")
        return ""

    async def _spawn(self, program: str) -> None:
        assert self._ports is not None
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports)
        command = [
            *(sys.executable, "-S", "-E", str(_WRAPPER), str(int(signal.SIGKILL)), program),
            *("--name", "pelagos", "--data-dir", str(self._folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"pelagos={peer}"),
            # Below our clients' ping interval, or etcd closes their connections.
            *("--grpc-keepalive-min-time", "500ms"),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
            *("--logger", "zap", "--log-level", "warn"),
        ]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(),
            )

    async def _wait_serving(self) -> bool:
        """Returns whether it serves; False when it has ended or the time is over."""
        from services.common.store import StoreUnavailable
        from services.common.store_etcd import EtcdStore

        store = EtcdStore(self.endpoint, timeout_s=1.0)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while self.is_running:
                    with contextlib.suppress(StoreUnavailable):
                        await store.get("ready?")
                        return True
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            pass
        finally:
            await store.close()
        return False

    async def _end(self, number: signal.Signals, timeout_s: float) -> None:
        self._wanted = False
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _is_port_taken(self) -> bool:
        return "address already in use" in self.log_tail()


@contextlib.asynccontextmanager
async def running_etcd(folder: Path) -> AsyncIterator[EtcdProcess]:
    """Runs an etcd for as long as the block."""
    etcd = EtcdProcess(folder)
    await etcd.start()
    try:
        yield etcd
    finally:
        await etcd.stop()


def _environment() -> dict[str, str]:
    """Returns our environment without ETCD_*, which would override the flags of this etcd."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    return kept if os.uname().machine == "x86_64" else {**kept, "ETCD_UNSUPPORTED_ARCH": _ARCH}


def _free_ports() -> tuple[int, int]:
    """Returns two ports that were free a moment ago."""
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
