"""The scaffold: start, readiness, the admin plane, the planned stop, and ends of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import cli
from services.common.admin import AdminServer, Heartbeats
from services.common.census import Census
from services.common.clock import VirtualClock
from services.common.config import ConfigError, from_mapping
from services.common.drain import Drain, DrainPhase, DrainTimes
from services.common.election import Election
from services.common.membership import MemberState
from services.common.metrics import Metrics
from services.common.rpc_client import call
from services.common.service import Runtime, RuntimeConfig, running
from services.common.store_memory import MemoryStore
from services.common.tests.echo_service import EchoConfig, build

PROGRAM = Path(__file__).with_name("echo_service.py")
QUICK = ("--runtime.drain.notice_s=0.05", "--runtime.drain.grace_s=0.2")


async def http_get(address: str, path: str, *headers: str, method: str = "GET") -> tuple[int, str]:
    """Returns status and body of one request to the admin listener."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", *headers, ""))
    writer.write(head.encode())
    answer = (await asyncio.wait_for(reader.read(), 30)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


@dataclass
class Process:
    """A running echo service."""

    child: asyncio.subprocess.Process
    ready_file: Path

    async def ready(self) -> dict[str, object]:
        async with asyncio.timeout(60):
            while not self.ready_file.exists():
                assert self.child.returncode is None, await self.output()
                await asyncio.sleep(0.02)
        return json.loads(self.ready_file.read_text())

    async def output(self) -> str:
        assert self.child.stderr is not None
        return (await self.child.stderr.read()).decode()

    async def finish(self) -> tuple[int, list[dict[str, object]]]:
        """Returns the exit status and the log."""
        text = await asyncio.wait_for(self.output(), 60)
        status = await asyncio.wait_for(self.child.wait(), 60)
        return status, [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@contextlib.asynccontextmanager
async def process(folder: Path, *flags: str, **environ: str) -> AsyncIterator[Process]:
    ready_file = folder / "ready.json"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), f"--runtime.ready_file={ready_file}", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environ},
    )
    try:
        yield Process(child, ready_file)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


# ---- in one process ---------------------------------------------------------------------------


async def test_a_service_is_registered_healthy_and_known_by_its_view() -> None:
    store = MemoryStore()
    async with running("echo", EchoConfig(), build, role="echoes", store=store) as runtime:
        async with asyncio.timeout(30):
            await runtime.view.wait_for(lambda view: len(view.members("echoes")) == 1)
        (member,) = runtime.view.members("echoes")
        assert member.address == runtime.address
        assert member.capacity == {"max_chars": 10.0}
        assert member.labels["admin"] == runtime.admin_address
        assert member.incarnation == runtime.boot_id
        stub = health_pb2_grpc.HealthStub(runtime.channels.get(runtime.address))
        answer = await call(stub.Check, health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await store.list(runtime.keys.members)).items == ()
    await store.close()


async def test_a_service_without_etcd_runs_alone() -> None:
    async with running("echo", EchoConfig(), build) as runtime:
        assert runtime.is_ready
        assert isinstance(runtime.store, MemoryStore)


async def test_the_admin_plane_answers_and_hides_secrets() -> None:
    config = from_mapping(EchoConfig, {"runtime": {"admin_token": "s3cret"}})
    async with running("echo", config, build) as runtime:
        address = runtime.admin_address
        assert (await http_get(address, "/census"))[0] == 401
        assert (await http_get(address, "/census", "Authorization: Bearer s3cre"))[0] == 401
        authorized = "Authorization: Bearer s3cret"
        runtime.metrics.counter("calls_total", "Calls").inc()
        for path, expected in (
            ("/census", '"rpc_server"'),
            ("/metrics", "pelagos_echo_calls_total 1.0"),
            ("/metrics", "pelagos_echo_ready 1.0"),
            ("/metrics", "pelagos_echo_cluster_view_age_seconds 0.0"),
            ("/config", '"max_chars": 10'),
            ("/healthz", '"event_loop"'),
            ("/readyz", '"ready": true'),
        ):
            status, body = await http_get(address, path, authorized)
            assert (status, expected in body) == (200, True), (path, body)
            assert "s3cret" not in body
        assert (await http_get(address, "/nope", authorized))[0] == 404
        assert (await http_get(address, "/census", authorized, method="POST"))[0] == 405
        await runtime.set_ready(False)
        assert (await http_get(address, "/readyz", authorized))[0] == 503


async def test_s_10_the_admin_plane_refuses_to_leave_loopback_without_a_token() -> None:
    def make(listen: str, token: str) -> AdminServer:
        return AdminServer(
            listen,
            metrics=Metrics("x"),
            census=Census(),
            heartbeats=Heartbeats(),
            is_ready=lambda: True,
            config_document={},
            token=token,
        )

    with pytest.raises(ConfigError, match="needs admin_token"):
        make("0.0.0.0:0", "")
    make("0.0.0.0:0", "t")  # nothing is bound before start


async def test_garbage_on_the_admin_port_disturbs_nobody() -> None:
    async with running("echo", EchoConfig(), build) as runtime:
        host, _, port = runtime.admin_address.rpartition(":")
        for garbage in (b"\x00\xff" * 10, b"GET", b"x" * 20_000, b"\r\n\r\n", b"GET /\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            if writer.can_write_eof():
                writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 30)
            writer.close()
        assert (await http_get(runtime.admin_address, "/healthz"))[0] == 200


async def test_p_20_a_stuck_loop_is_not_alive_and_a_busy_one_is() -> None:
    clock = VirtualClock()
    heartbeats = Heartbeats(clock)
    step_s = 0.0
    heartbeats.register("rank 0", lambda: clock.now_s() - step_s, 60.0)
    task = asyncio.ensure_future(heartbeats.run())
    await clock.advance(59)
    assert heartbeats.is_alive
    await clock.advance(2)
    assert not heartbeats.is_alive
    assert heartbeats.ages_s()["rank 0"] == 61.0
    step_s = clock.now_s()
    assert heartbeats.is_alive
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await clock.advance(4)
    assert not heartbeats.is_alive  # the event loop's own


async def test_a_leader_resigns_when_it_drains() -> None:
    store = MemoryStore()
    elections: list[Election] = []

    async def leading(runtime: Runtime[EchoConfig]) -> None:
        elections.append(runtime.elect("decode-lb"))

    config = from_mapping(EchoConfig, {"runtime": {"drain": {"notice_s": 0, "grace_s": 0}}})
    async with running("echo", config, leading, store=store) as runtime:
        async with asyncio.timeout(30):
            await elections[0].wait_leader()
            await runtime.stop()
        assert not elections[0].is_leader
        assert (await store.list(runtime.keys.leaders)).items == ()
    await store.close()


async def test_a_build_that_fails_lets_go_of_everything() -> None:
    store = MemoryStore()

    async def bad(runtime: Runtime[EchoConfig]) -> None:
        raise ConfigError("model: no such folder")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with running("echo", EchoConfig(), bad, store=store):
            raise AssertionError("never ready")
    assert caught.group_contains(ConfigError)
    assert (await store.list("/")).items == ()
    await store.close()


# ---- the drain, on a virtual clock --------------------------------------------------------------


@dataclass
class Stop:
    """A drain with its steps recorded."""

    clock: VirtualClock
    drain: Drain
    steps: list[tuple[float, str]]
    in_flight: int = 0

    async def record(self, name: str) -> None:
        self.steps.append((round(self.clock.now_s(), 2), name))

    async def run(self) -> None:
        await self.drain.run(
            mark_draining=lambda: self.record("mark"),
            refuse_new=lambda: self.record("refuse"),
            num_in_flight=lambda: self.in_flight,
            hand_over=lambda: self.record("hand over"),
        )


def stop_with(in_flight: int) -> Stop:
    clock = VirtualClock()
    return Stop(clock, Drain(DrainTimes(2, 60, 10), clock), [], in_flight)


async def test_p_04_a_drain_marks_waits_refuses_and_hands_over_at_the_end_of_the_grace() -> None:
    stop = stop_with(in_flight=3)
    task = asyncio.ensure_future(stop.run())
    await stop.clock.advance(1.9)
    assert (stop.steps, stop.drain.phase) == ([(0.0, "mark")], DrainPhase.NOTICE)
    await stop.clock.advance(50)
    assert stop.steps[1:] == [(2.0, "refuse")]
    assert stop.drain.phase is DrainPhase.REFUSING
    await stop.clock.advance(15)
    await task
    assert stop.steps[2][1] == "hand over"
    assert 62.0 <= stop.steps[2][0] <= 62.1
    assert stop.drain.phase is DrainPhase.DONE


async def test_p_04_a_drain_ends_as_soon_as_nothing_is_in_flight() -> None:
    stop = stop_with(in_flight=1)
    task = asyncio.ensure_future(stop.run())
    await stop.clock.advance(10)
    stop.in_flight = 0
    await stop.clock.advance(0.1)
    await task
    assert stop.clock.now_s() < 11


async def test_asking_twice_changes_nothing() -> None:
    stop = stop_with(in_flight=0)
    stop.drain.request()
    stop.drain.request()
    assert stop.drain.is_requested
    await stop.drain.wait_requested()
    task = asyncio.ensure_future(stop.run())
    await stop.clock.advance(2.5)
    await task
    assert [name for _, name in stop.steps] == ["mark", "refuse", "hand over"]


# ---- as a process -----------------------------------------------------------------------------


async def test_p_04_sigterm_once_or_twice_ends_a_process_in_order(tmp_path: Path) -> None:
    async with process(tmp_path, *QUICK, "--busy-until-released") as echo:
        ready = await echo.ready()
        assert ready["pid"] == echo.child.pid
        assert ready["labels"]["http"] == "127.0.0.1:1"  # type: ignore[index]
        assert (await http_get(str(ready["admin"]), "/readyz"))[0] == 200
        echo.child.send_signal(signal.SIGTERM)
        echo.child.send_signal(signal.SIGTERM)
        status, lines = await echo.finish()
    assert status == 0
    messages = [line["message"] for line in lines]
    assert messages.count("draining") == 1
    assert messages.index("serving") < messages.index("draining")


async def test_sigterm_while_it_starts_ends_it_at_once(tmp_path: Path) -> None:
    flags = ("--start-takes-s=600", "--runtime.log_level=debug")
    async with process(tmp_path, *flags, PELAGOS_ECHO_RUNTIME_UVLOOP="false") as echo:
        assert echo.child.stderr is not None
        await asyncio.wait_for(echo.child.stderr.readline(), 60)  # its handlers are in place
        echo.child.send_signal(signal.SIGTERM)
        status, _ = await echo.finish()
    assert status == 0
    assert not echo.ready_file.exists()


async def test_a_background_task_that_fails_ends_the_process_and_says_why(tmp_path: Path) -> None:
    async with process(tmp_path, *QUICK, "--fail-after-s=0.05") as echo:
        status, lines = await echo.finish()
    assert status == 1
    (error,) = [line for line in lines if line["level"] == "error"]
    assert error["message"] == "service failed"
    assert "the disk is gone" in str(error["error"])


@pytest.mark.parametrize(
    ("flags", "environ", "status", "text"),
    [
        (("--max-chars=0",), {}, 2, "max_chars must be above 0"),
        (("--listen=0.0.0.0:0",), {}, 2, "not on loopback"),
        (("--max-char=1",), {}, 2, "did you mean max_chars?"),
        ((), {"PELAGOS_ECHO_MAX_CHARS": "many"}, 2, "'many' is not int"),
        (("--check-config",), {}, 0, ""),
        (("--check-config", "--max-chars=0"), {}, 2, "max_chars"),
        (("--print-config",), {}, 0, ""),
    ],
)
async def test_a_configuration_that_is_wrong_stops_the_start_with_one_line(
    flags: tuple[str, ...], environ: dict[str, str], status: int, text: str, tmp_path: Path
) -> None:
    async with process(tmp_path, *flags, **environ) as echo:
        output = await asyncio.wait_for(echo.output(), 60)
        assert await echo.child.wait() == status
    assert text in output
    assert output.count("\n") == (1 if text else 0)


async def test_a_process_whose_parent_dies_follows_it(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    command = [sys.executable, str(PROGRAM), f"--runtime.ready_file={ready_file}", *QUICK]
    command.append("--runtime.die_with_parent")
    # The parent in between only starts the service and waits to be killed.
    script = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *command, stderr=asyncio.subprocess.PIPE
    )
    echo = Process(parent, ready_file)
    ready = await echo.ready()
    parent.kill()
    # The pipe ends when the last process that holds it has ended.
    output = await asyncio.wait_for(echo.output(), 60)
    assert "draining" in output
    assert _has_ended(int(str(ready["pid"])))
    await parent.wait()


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# ---- the command ------------------------------------------------------------------------------


def test_the_command_explains_itself_and_refuses_what_it_does_not_know(capsys) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    for name in (*cli.SERVICES, *cli.COMMANDS):
        assert name in out
    assert cli.main(["serve", "prefil"]) == 2
    assert "did you mean prefill" in capsys.readouterr().err
    assert cli.main(["dokter"]) == 2
    assert "did you mean doctor" in capsys.readouterr().err
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("0.")


def test_defaults_of_the_runtime_are_safe() -> None:
    config = RuntimeConfig()
    assert config.admin_listen.startswith("127.0.0.1")
    assert not config.rpc.plaintext_off_loopback_is_insecure
    assert config.drain.grace_s == 60
    assert MemberState.READY.value == "ready"
