"""A peer that is frozen or gone is noticed by its open streams, without any traffic on them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, RetryPolicy, call, stream_call

PROGRAM = Path(__file__).resolve().parents[2] / "services/common/tests/echo_service.py"


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    ready_file = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), f"--runtime.ready_file={ready_file}"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            while True:
                if ready_file.exists():
                    break
                await asyncio.sleep(0.02)
        yield process, json.loads(ready_file.read_text())["address"]
    finally:
        # One that was killed may be gone before the event loop has heard of it.
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_p_20_a_silent_stream_ends_when_its_peer_is_killed_or_frozen(
    peer: tuple[asyncio.subprocess.Process, str], number: signal.Signals
) -> None:
    process, address = peer
    channels = Channels()
    stub = health_pb2_grpc.HealthStub(channels.get(address))
    async with stream_call(stub.Watch, health_pb2.HealthCheckRequest(), timeout_s=None) as stream:
        assert (await stream.read()).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(process.pid, number)
        # Pings every 2 s that must be answered in 1 s; without the options of rpc_client a frozen
        # peer is noticed after a minute, or never.
        with pytest.raises(Failure) as caught:
            await asyncio.wait_for(stream.read(), 30)
        assert caught.value.reason is Reason.BACKEND_LOST
    await channels.close()


async def test_a_peer_that_thaws_serves_again_on_the_same_channel(
    peer: tuple[asyncio.subprocess.Process, str],
) -> None:
    process, address = peer
    channels = Channels()
    stub = health_pb2_grpc.HealthStub(channels.get(address))
    await call(stub.Check, health_pb2.HealthCheckRequest(), timeout_s=20)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(Failure):
        await call(stub.Check, health_pb2.HealthCheckRequest(), timeout_s=1)
    os.kill(process.pid, signal.SIGCONT)
    # The first try may still meet the connection that the pings have given up.
    policy = RetryPolicy(max_attempts=20)
    await call(stub.Check, health_pb2.HealthCheckRequest(), timeout_s=20, retry=policy)
    await channels.close()
