"""The children that compile, from the side of the service: one job each at a time, replaceable."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import struct
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import services
from services.common.errors import Failure, Reason
from services.so_compiler.child_process import ChildProcess
from services.so_compiler.config import GrammarLimits

log = logging.getLogger(__name__)

_KILL_WAIT_S = 5.0
_MAX_HAND_OVERS = 3
# The child gets nothing of our environment but where to find the code.
_CHILD_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(services.__file__).resolve().parent.parent), *(path for path in sys.path if path)]
    ),
    "RAYON_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
}


@dataclass(frozen=True)
class Job:
    """What a child is asked to compile."""

    type: int
    source: str
    special_ids: dict[str, int]


@dataclass(frozen=True)
class Artifact:
    """What a child made."""

    data: bytes
    warnings: list[str]
    cpu_ms: int


class WorkerPool:
    """A fixed number of children. A child that dies or hangs is replaced; its job failed."""

    def __init__(self, num_workers: int, limits: GrammarLimits) -> None:
        self._limits = limits
        self._num_workers = num_workers
        self._idle: asyncio.Queue[ChildProcess | None] = asyncio.Queue()
        self._processes: set[ChildProcess] = set()
        for _ in range(num_workers):
            self._idle.put_nowait(None)  # made when first needed
        self.num_lost = 0

    @property
    def num_processes(self) -> int:
        """Returns the children alive."""
        return len(self._processes)

    @property
    def num_busy(self) -> int:
        """Returns the children at work."""
        return self._num_workers - self._idle.qsize()

    async def compile(self, job: Job, wall_s: float) -> Artifact:
        """Returns the artifact, or raises Failure. Cancelling kills the child that is at it."""
        process = await self._idle.get()
        healthy = False
        try:
            try:
                async with asyncio.timeout(min(wall_s, self._limits.wall_s)):
                    for _ in range(_MAX_HAND_OVERS):
                        if process is None or process.returncode is not None:
                            process = await self._start()
                        if await self._has_taken(process, job):
                            break
                        self.num_lost += 1
                        await self._end(process)
                    else:
                        raise Failure(Reason.INTERNAL, "no compiler child stays alive")
                    answer = await _read_frame(process)
            except TimeoutError:
                raise _over(f"compiling took longer than {self._limits.wall_s:g} s") from None
            except (EOFError, OSError):
                self.num_lost += 1
                raise _over("the grammar went over its budget of CPU or memory") from None
            healthy = True
            return _artifact_of(answer)
        finally:
            if not healthy and process is not None:
                await self._end(process)
                process = None
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Ends all children."""
        await asyncio.gather(*(self._end(process) for process in list(self._processes)))

    async def _has_taken(self, process: ChildProcess, job: Job) -> bool:
        """Gives a child the job; False when it has died before it says that it has it.

        Such an end, unlike a later one, is no fault of the grammar.
        """
        frame = json.dumps({**asdict(job), "limits": asdict(self._limits)}).encode()
        assert process.stdin is not None
        try:
            process.stdin.write(struct.pack("<I", len(frame)) + frame)
            await process.stdin.drain()
            await _read_frame(process)
        except (EOFError, OSError, RuntimeError):  # uvloop: RuntimeError for a closed pipe
            return False
        return True

    async def _start(self) -> ChildProcess:
        process = await ChildProcess.start(
            [sys.executable, "-m", "services.so_compiler.child"], _CHILD_ENVIRONMENT
        )
        self._processes.add(process)
        return process

    async def _end(self, process: ChildProcess) -> None:
        self._processes.discard(process)
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_WAIT_S):
                await process.wait()


async def _read_frame(process: ChildProcess) -> dict[str, Any]:
    assert process.stdout is not None
    (length,) = struct.unpack("<I", await process.stdout.readexactly(4))
    answer: dict[str, Any] = json.loads(await process.stdout.readexactly(length))
    return answer


def _artifact_of(answer: dict[str, Any]) -> Artifact:
    if "reason" in answer:
        reason = Reason(answer["reason"])
        raise Failure(reason, answer["message"], answer.get("metadata"))
    return Artifact(base64.b64decode(answer["data"]), answer["warnings"], answer["cpu_ms"])


def _over(text: str) -> Failure:
    return Failure(Reason.GRAMMAR_BUDGET, text, {"path": "$"})
