"""The local stack: etcd and every service as supervised processes on loopback.

    async with Stack(StackConfig(folder=tmp_path, num_decode=1)).running() as stack:
        url, key = stack.base_url, stack.api_key
        stack["decode"].signal(signal.SIGKILL)          # supervised: it comes back

`pelagos up` and the end-to-end tests run this same class.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

from deploy.local.etcd import EtcdProcess
from deploy.local.http import http_get
from deploy.local.model import check_model, codec_flags
from deploy.local.plan import ProcessSpec, StackConfig, plan
from deploy.local.process import StartFailed, Supervised
from services.common.rpc_client import Channels
from services.common.shm_ring import reclaim_orphans
from services.common.trace_cli import read_spans, select

STATE_FILE: Final = "state.json"
FRONT_TIMEOUT_S: Final = 60.0
_FRONT_POLL_S: Final = 0.1
_ETCD_RESTART_S: Final = 0.5


class StackRunning(Exception):
    """Another launcher holds the folder."""


class Stack:
    """All processes of one stack, in one folder."""

    def __init__(
        self, config: StackConfig, *, on_progress: Callable[[str], None] = lambda text: None
    ) -> None:
        folder = config.folder.absolute()
        self.config = _with_folder(config, folder)
        self.folder = folder
        self.channels = Channels()
        self._on_progress = on_progress
        self._etcd = EtcdProcess(folder / "etcd")
        self._processes: dict[str, Supervised] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._etcd_task: asyncio.Task[None] | None = None
        self._lock: IO[str] | None = None
        self._started_s = time.time()

    # ---- what runs ----------------------------------------------------------------------------

    @property
    def etcd(self) -> EtcdProcess:
        """Returns the stack's own etcd."""
        return self._etcd

    @property
    def etcd_endpoint(self) -> str:
        """Returns host:port of the etcd in use."""
        return self.config.etcd or self._etcd.endpoint

    def __getitem__(self, name: str) -> Supervised:
        """Returns a process by its name ("decode-1")."""
        return self._processes[name]

    def __iter__(self) -> Iterator[Supervised]:
        """Yields every process, in the order of their start."""
        return iter(tuple(self._processes.values()))

    def of(self, service: str) -> list[Supervised]:
        """Returns the processes of a service."""
        return [process for process in self if process.spec.service == service]

    @property
    def http_addresses(self) -> list[str]:
        """Returns host:port of every entrypoint's HTTP side."""
        return [process.labels["http"] for process in self.of("entrypoint") if process.labels]

    @property
    def base_url(self) -> str:
        """Returns the first entrypoint's URL, without a path; "" when there is none."""
        return f"http://{self.http_addresses[0]}" if self.http_addresses else ""

    @property
    def api_key_file(self) -> Path:
        """Returns where the first key lies."""
        return self.folder / "keys" / "api-key"

    @property
    def api_key(self) -> str:
        """Returns the first key."""
        return self.api_key_file.read_text(encoding="utf-8").strip()

    async def census(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns the resource census of every process that answers, by name."""
        ready = [process for process in self if process.admin]
        pages = await asyncio.gather(*(http_get(item.admin, "/census") for item in ready))
        return {
            process.name: json.loads(body)
            for process, (status, body) in zip(ready, pages, strict=True)
            if status == 200
        }

    def spans(self, wanted: str) -> list[dict[str, Any]]:
        """Returns the exported spans of a request id or trace id, oldest first. Exporters write
        twice a second; ask again until what must be there is."""
        return select(read_spans(self.folder / "traces"), wanted)

    # ---- life ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Stack]:
        """Runs the stack for as long as the block."""
        try:
            await self.start()
            yield self
        finally:
            await self.stop()

    async def start(self) -> None:
        """Starts everything, tier by tier, and waits until a request can be served.

        Raises: StackRunning; StartFailed; ModelUnfit; EtcdMissing; EtcdFailed.
        """
        if self.config.engine == "torch":
            check_model(self.config.checkpoint)
            own = codec_flags(self.config.checkpoint)
            flags = {**self.config.flags, "recipe": [*own, *self.config.flags.get("recipe", [])]}
            self.config = replace(self.config, flags=flags)
        self._take_folder()
        reclaim_orphans()
        if not self.config.etcd:
            self._on_progress("etcd")
            await self._etcd.start()
            self._etcd_task = asyncio.get_running_loop().create_task(
                self._supervise_etcd(), name="etcd"
            )
        specs = plan(self.config)
        for tier in sorted({spec.tier for spec in specs}):
            names = [spec for spec in specs if spec.tier == tier]
            self._on_progress(", ".join(spec.name for spec in names))
            await _all(*(self.add(spec) for spec in names))
        await self._wait_front()
        self._write_state()

    async def add(self, spec: ProcessSpec) -> Supervised:
        """Starts one process, supervised from then on. Raises StartFailed."""
        process = Supervised(
            spec,
            self.config,
            self.etcd_endpoint,
            self.channels,
            on_change=self._write_state,
            on_event=self._on_progress,
        )
        self._processes[spec.name] = process
        await process.start()
        task = asyncio.get_running_loop().create_task(process.supervise(), name=spec.name)
        self._tasks.add(task)
        task.add_done_callback(self._supervision_ended)
        return process

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._on_progress(f"{task.get_name()} is no longer supervised: {task.exception()!r}")

    async def remove(self, name: str) -> None:
        """Stops one process by its drain and forgets it."""
        await self._processes[name].stop(self.config.drain_grace_s)
        del self._processes[name]
        self._write_state()

    async def stop(self) -> None:
        """Stops everything in reverse order and leaves no process behind."""
        for tier in sorted({process.spec.tier for process in self}, reverse=True):
            ending = [process for process in self if process.spec.tier == tier]
            self._on_progress(", ".join(process.name for process in ending))
            grace_s = self.config.drain_notice_s + self.config.drain_grace_s
            await asyncio.gather(*(process.stop(grace_s) for process in ending))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._etcd_task is not None:
            self._etcd_task.cancel()
            await asyncio.gather(self._etcd_task, return_exceptions=True)
        await self._etcd.stop()
        await self.channels.close()
        reclaim_orphans()
        if self._lock is not None:
            (self.folder / STATE_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    async def _supervise_etcd(self) -> None:
        """Starts etcd again, on its ports and data, when it ends by itself."""
        while True:
            status = await self._etcd.wait_crashed()
            self._on_progress(f"etcd ended with status {status}")
            await asyncio.sleep(_ETCD_RESTART_S)
            await self._etcd.start()
            self._write_state()

    async def _wait_front(self) -> None:
        """Waits until every entrypoint knows an engine to serve its requests. StartFailed."""
        if self.of("entrypoint"):
            self._on_progress("first engines in view")
        for process in self.of("entrypoint"):
            try:
                async with asyncio.timeout(FRONT_TIMEOUT_S):
                    await _until_ready(process.labels["http"])
            except TimeoutError:
                raise StartFailed(
                    f"{process.name} sees no engine after {FRONT_TIMEOUT_S:.0f} s:\n"
                    f"{process.log_tail()}"
                ) from None

    def _take_folder(self) -> None:
        """Makes the folders and locks them. Raises StackRunning."""
        for name in ("", "logs", "ready", "keys", "kv", "traces"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (self.folder / "lock").open("a", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise StackRunning(f"a stack is running in {self.folder}") from None
        self._lock = lock
        for log_path in (self.folder / "logs").glob("*.log"):
            log_path.replace(log_path.with_suffix(".old"))

    def _write_state(self) -> None:
        """Writes what `pelagos status` and other tools read; all of it or nothing."""
        if self._lock is None:
            return
        document = {
            "pid": os.getpid(),
            "started_s": self._started_s,
            "cluster": self.config.cluster,
            "etcd": self.etcd_endpoint,
            "etcd_pid": self._etcd.pid if self._etcd.is_running else 0,
            "engine": self.config.engine,
            "model": self.config.model,
            "expert_ranks": self.config.expert_ranks,
            "api_key_file": str(self.api_key_file),
            "traces": str(self.folder / "traces"),
            "processes": {process.name: describe(process) for process in self},
        }
        temporary = self.folder / f"{STATE_FILE}.{os.getpid()}"
        temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
        temporary.replace(self.folder / STATE_FILE)


def describe(process: Supervised) -> dict[str, Any]:
    """Returns a process's part of the state file."""
    return {
        "service": process.spec.service,
        "state": process.state.value,
        "pid": process.pid,
        "address": process.address,
        "admin": process.admin,
        "labels": dict(process.labels),
        "instance_id": process.ready_document.get("instance_id", ""),
        "num_restarts": process.num_restarts,
    }


def read_state(folder: Path) -> dict[str, Any] | None:
    """Returns the state file of a running stack; None when none runs in that folder."""
    try:
        document: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        with (folder / "lock").open("a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return document  # its launcher holds the lock, so it is not a leftover
    except (OSError, ValueError):
        pass
    return None


async def _until_ready(address: str) -> None:
    while True:
        status, _ = await http_get(address, "/readyz")
        if status == 200:
            return
        await asyncio.sleep(_FRONT_POLL_S)


async def _all(*starts: Any) -> None:
    """Waits for all of them; the first failure is raised once the others have ended too."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _with_folder(config: StackConfig, folder: Path) -> StackConfig:
    return replace(config, folder=folder, checkpoint=config.checkpoint.absolute())
