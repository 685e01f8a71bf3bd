"""Processes beside the stack: load client, stub workers, peer router; and the CPU each took."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from deploy.local import die_with_parent
from deploy.local.http import http_get
from deploy.local.stack import Stack
from tests.bench.load_client import Load, LoadConfig

ROUTER: Final = "sglang-router==0.3.2"
_ROUTER_FOLDER: Final = Path(".local/bench")
_INSTALL_TIMEOUT_S: Final = 90.0
_START_TIMEOUT_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 5.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class PeerMissing(Exception):
    """The peer router cannot be installed or started here; the text says why."""


@dataclass(frozen=True)
class Target:
    """Something to send load to, and the processes that work for it.

    Args:
        pids: by role; several processes may have one role ("prefill").
    """

    name: str
    address: str
    key: str
    model: str
    pids: tuple[tuple[str, int], ...]


def cpu_s(pid: int) -> float:
    """Returns the CPU time of a process, all threads, user and system; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()  # a program's name may hold spaces
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def cpu_by_role(pids: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Returns CPU time by role, s."""
    found: dict[str, float] = {}
    for role, pid in pids:
        found[role] = found.get(role, 0.0) + cpu_s(pid)
    return found


def machine_cpu_s() -> tuple[float, float]:
    """Returns the CPU time of the whole machine since its start, s: busy, and in total."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        fields = [int(field) / _TICKS_PER_S for field in file.readline().split()[1:9]]
    idle_s = fields[3] + fields[4]
    return sum(fields) - idle_s, sum(fields)


def stack_target(stack: Stack, model: str) -> Target:
    """Returns the stack behind its first entrypoint."""
    pids = [(process.spec.service, process.pid) for process in stack]
    pids.append(("etcd", stack.etcd.pid))
    return Target("pelagos", stack.http_addresses[0], stack.api_key, model, tuple(pids))


async def run_load(config: LoadConfig) -> Load:
    """Runs the load client in its own process. Raises: RuntimeError with the end of its errors."""
    process = await _spawn(
        [sys.executable, "-m", "tests.bench.load_client", json.dumps(asdict(config))],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    finally:
        await _end(process)
    if process.returncode != 0:
        raise RuntimeError(f"the load client failed: {errors.decode(errors='replace')[-2000:]}")
    return Load.from_json(out.decode())


@contextlib.asynccontextmanager
async def stub_workers(num: int, tokens_per_event: int) -> AsyncIterator[list[Target]]:
    """Runs stub workers for as long as the block."""
    async with contextlib.AsyncExitStack() as ending:
        targets = []
        for _ in range(num):
            process = await _spawn(
                [
                    *(sys.executable, "-m", "tests.bench.stub_worker"),
                    *("--tokens-per-event", str(tokens_per_event)),
                ],
                stdout=asyncio.subprocess.PIPE,
            )
            ending.push_async_callback(_end, process)
            assert process.stdout is not None
            async with asyncio.timeout(_START_TIMEOUT_S):
                port = int(await process.stdout.readline())
            pids = (("stub workers", process.pid),)
            targets.append(Target("stub", f"127.0.0.1:{port}", "", "stub", pids))
        yield targets


async def install_router() -> str:
    """Installs the peer into a virtual environment of its own, once; returns its program.

    Raises: PeerMissing.
    """
    program = _ROUTER_FOLDER / "bin" / "sglang-router"
    stamp = _ROUTER_FOLDER / ".installed"
    if program.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == ROUTER:
        return str(program)
    python = str(_ROUTER_FOLDER / "bin" / "python")
    for arguments in (
        ("venv", "-q", "--clear", "--python", sys.executable, str(_ROUTER_FOLDER)),
        ("pip", "install", "-q", "--python", python, ROUTER),
    ):
        process = await _spawn(
            [sys.executable, "-m", "uv", *arguments],
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_INSTALL_TIMEOUT_S):
                _, errors = await process.communicate()
        except TimeoutError:
            raise PeerMissing(f"{ROUTER} did not install in {_INSTALL_TIMEOUT_S:.0f} s") from None
        finally:
            await _end(process)
        if process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise PeerMissing(f"{ROUTER} cannot be installed: {lines[0][:200]}")
    stamp.write_text(ROUTER, encoding="utf-8")
    return str(program)


@contextlib.asynccontextmanager
async def router(program: str, workers: Sequence[Target], folder: Path) -> AsyncIterator[Target]:
    """Runs the peer router in front of workers, with its own defaults. Raises: PeerMissing."""
    port, metrics_port = _free_port(), _free_port()
    command = [
        *(program, "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--log-level", "warn", "--worker-urls"),
        *(f"http://{worker.address}" for worker in workers),
    ]
    log_path = folder / "router.log"
    with log_path.open("wb") as log:
        process = await _spawn(command, stdout=log, stderr=log)
    try:
        address = f"127.0.0.1:{port}"
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while (await http_get(address, "/readiness"))[0] != 200:
                    if process.returncode is not None:
                        raise PeerMissing(f"{ROUTER} ended: {_tail(log_path)}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise PeerMissing(f"{ROUTER} is not ready: {_tail(log_path)}") from None
        pids = [("sglang-router", process.pid)]
        pids += [pair for worker in workers for pair in worker.pids]
        yield Target("sglang-router", address, "", "stub", tuple(pids))
    finally:
        await _end(process)


async def _spawn(command: Sequence[str], **streams: object) -> asyncio.subprocess.Process:
    """Starts a program that does not outlive us, even when we are killed."""
    wrapper = [sys.executable, "-S", "-E", die_with_parent.__file__, str(int(signal.SIGKILL))]
    return await asyncio.create_subprocess_exec(
        *wrapper,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        **streams,  # type: ignore[arg-type]
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _tail(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-500:].strip()
