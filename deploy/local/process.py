"""One supervised process of the stack: start, readiness, restart after a crash, end."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.plan import ProcessSpec, StackConfig, common_flags, log_file, ready_file
from services.common.errors import Failure
from services.common.rpc_client import Channels, call

START_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.05
_KILL_AFTER_S: Final = 10.0
# A process that ends again and again is started ever more rarely.
_FIRST_RESTART_S: Final = 0.2
_MAX_RESTART_S: Final = 10.0
_STABLE_S: Final = 30.0


class ProcessState(enum.Enum):
    """Where a process is, as `pelagos status` shows it."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    CRASHED = "crashed"
    STOPPING = "stopping"


class StartFailed(Exception):
    """A process did not become ready; the text has the end of its log."""


@dataclass
class Supervised:
    """A process and what is known of it. `supervise` keeps it running until `stop`."""

    spec: ProcessSpec
    config: StackConfig
    etcd: str
    channels: Channels
    on_change: Callable[[], None] = lambda: None
    on_event: Callable[[str], None] = lambda text: None
    restart: bool = True
    state: ProcessState = ProcessState.STOPPED
    num_restarts: int = 0
    ready_document: Mapping[str, Any] = field(default_factory=dict)
    _process: asyncio.subprocess.Process | None = None
    _wanted: bool = False
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """Returns its name in the stack."""
        return self.spec.name

    @property
    def pid(self) -> int:
        """Returns the process id; 0 when it does not run."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    @property
    def address(self) -> str:
        """Returns its RPC address; "" before it is ready."""
        return str(self.ready_document.get("address", ""))

    @property
    def admin(self) -> str:
        """Returns its admin address; "" before it is ready."""
        return str(self.ready_document.get("admin", ""))

    @property
    def labels(self) -> Mapping[str, str]:
        """Returns what it announced ("http")."""
        return dict(self.ready_document.get("labels", {}))

    async def start(self) -> None:
        """Starts it and waits until it serves. Raises StartFailed."""
        self._wanted = True
        await self._spawn()
        await self._wait_ready()

    async def supervise(self) -> None:
        """Starts it again whenever it ends by itself; runs until it is stopped."""
        loop = asyncio.get_running_loop()
        wait_s = _FIRST_RESTART_S
        while self._process is not None:
            started_s = loop.time()
            status = await self._process.wait()
            if not self._wanted:
                return
            self._change(ProcessState.CRASHED)
            self.on_event(f"{self.name} ended with status {status}")
            if not self.restart:
                return
            if loop.time() - started_s > _STABLE_S:
                wait_s = _FIRST_RESTART_S
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_RESTART_S)
            if not self._wanted:
                return
            self.num_restarts += 1
            await self._spawn()
            try:
                await self._wait_ready()
            except StartFailed as error:
                self.on_event(str(error))

    async def stop(self, grace_s: float) -> None:
        """Ends it by SIGTERM, and by SIGKILL when that takes longer than its drain may."""
        self._wanted = False
        process = self._process
        if process is None or process.returncode is not None:
            self._change(ProcessState.STOPPED)
            return
        self._change(ProcessState.STOPPING)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # a frozen one would not hear the rest
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s + _KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            self.on_event(f"{self.name} outlasted its grace and is killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._change(ProcessState.STOPPED)

    def signal(self, number: int) -> None:
        """Sends a signal; for fault tests. Raises ProcessLookupError when it does not run."""
        if not self.pid:
            raise ProcessLookupError(self.name)
        os.kill(self.pid, number)

    async def wait_ended(self) -> int:
        """Waits for the running process to end and returns its status."""
        assert self._process is not None, "never started"
        return await self._process.wait()

    async def wait_ready(self) -> None:
        """Waits until it serves, also over a restart; bound it with asyncio.timeout."""
        await self._ready.wait()

    def log_tail(self, num_bytes: int = 2000) -> str:
        """Returns the end of its log."""
        with contextlib.suppress(OSError), log_file(self.config, self.name).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            return file.read().decode(errors="replace")
        return ""

    async def _spawn(self) -> None:
        ready_file(self.config, self.name).unlink(missing_ok=True)
        self.ready_document = {}
        self._change(ProcessState.STARTING)
        command = [
            *(sys.executable, "-m", "services.common.cli", "serve", self.spec.service),
            *common_flags(self.config, self.spec, self.etcd),
            *self.spec.flags,
        ]
        path = log_file(self.config, self.name)
        # Straight into its file, not through us: it goes on logging when we are gone.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,  # Ctrl-C reaches us alone; we end them in order
                env=_environment(),
            )
        finally:
            os.close(descriptor)

    async def _wait_ready(self) -> None:
        """Waits for the ready file and for health SERVING. Raises StartFailed."""
        path = ready_file(self.config, self.name)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._is_serving(path):
                    if not self.pid:
                        raise StartFailed(f"{self.name} ended:\n{self.log_tail()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StartFailed(
                f"{self.name} is not ready after {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}"
            ) from None
        self._change(ProcessState.READY)

    async def _is_serving(self, path: Path) -> bool:
        document = _read_ready_file(path)
        if document is None or document["pid"] != self.pid:
            return False  # not there yet, or of an earlier life
        self.ready_document = document
        stub = health_pb2_grpc.HealthStub(self.channels.get(self.address))
        try:
            answer = await call(stub.Check, health_pb2.HealthCheckRequest(), timeout_s=2)
        except Failure:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _change(self, state: ProcessState) -> None:
        self.state = state
        if state is ProcessState.READY:
            self._ready.set()
        else:
            self._ready.clear()
        self.on_change()


def _read_ready_file(path: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return document


def _environment() -> dict[str, str]:
    """Returns our environment, less what would configure the services behind the stack's back."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PELAGOS_")}
    # Sixteen processes on a laptop: no library may start a thread per core in each of them.
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
