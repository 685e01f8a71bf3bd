"""A child of a process that serves gRPC: started by vfork and exec, spoken to through pipes.

A plain fork, which is what uvloop does, runs the RPC library's handlers in the child before exec;
now and then one of them ends the child there. `subprocess` uses vfork, which runs none.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence


class ChildProcess:
    """The part of `asyncio.subprocess.Process` that the pool needs."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        read_end: asyncio.BaseTransport,
    ) -> None:
        self._process = process
        self.stdin = stdin
        self.stdout = stdout
        self._read_end = read_end

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str]) -> ChildProcess:
        """Starts a command. Raises: OSError."""
        loop = asyncio.get_running_loop()
        process = await asyncio.to_thread(
            subprocess.Popen,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(env),
            bufsize=0,
        )
        stdout = asyncio.StreamReader()
        read_end, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stdout), process.stdout
        )
        write_end, flow = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop), process.stdin
        )
        return cls(process, asyncio.StreamWriter(write_end, flow, None, loop), stdout, read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Returns how it ended, None while it lives."""
        return self._process.poll()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    async def wait(self) -> None:
        """Waits for its end and lets go of its pipes."""
        try:
            await asyncio.to_thread(self._process.wait)
        finally:
            self.stdin.close()
            self._read_end.close()
