"""Real servers for tests, each a process of its own: redis-server, and S3 by moto."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REGION = "us-east-1"
_START_S = 60.0


@dataclass
class Server:
    """A server on loopback that can be frozen, killed and started again."""

    command: Sequence[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it accepts connections."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError(f"no answer on port {self.port}")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def redis_server(folder: Path, *more: str) -> Iterator[Server]:
    """Runs a redis-server that keeps what it acknowledged over a kill."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    flags += ["--save", "", "--appendonly", "yes", "--appendfsync", "no", "--daemonize", "no"]
    server = Server([program, *flags, *more], port, folder / "redis.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def s3_server(folder: Path) -> Iterator[Server]:
    """Runs moto's S3. Its objects are in its memory."""
    pytest.importorskip("moto")
    pytest.importorskip("flask")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = Server(command, port, folder / "moto.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


def make_bucket(server: Server, name: str) -> None:
    """Makes a bucket."""
    s3_client(server).create_bucket(Bucket=name)


def s3_client(server: Server):
    """Returns a plain client."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
