"""The launcher, with a stack of two light services: supervision, state, and no leftovers."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deploy.local import doctor, model, status, up
from deploy.local.plan import MODELS, StackConfig, plan, profile
from deploy.local.process import ProcessState, StartFailed
from deploy.local.stack import Stack, StackRunning, read_state
from services.common.cli import SERVICES
from services.common.config import ConfigError, from_mapping
from services.common.layout import Keys
from services.common.store import StoreUnavailable
from services.common.store_etcd import EtcdStore
from services.engine.model.presets import TINY
from services.engine.model.vocabulary import vocabulary_of

KEPT = {"store", "decode-lb"}
WITHOUT = tuple(name for name in SERVICES if name not in KEPT)


def small(folder: Path, **changes: object) -> StackConfig:
    return StackConfig(folder=folder, without=WITHOUT, drain_grace_s=2.0, **changes)  # type: ignore[arg-type]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    # A path with a space: nothing may depend on there being none.
    async with Stack(small(tmp_path / "a stack")).running() as running:
        yield running


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another process does; the caller bounds it."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


async def test_the_stack_is_registered_described_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a stack"
    async with Stack(small(folder)).running() as stack:
        pids = [stack.etcd.pid, *(process.pid for process in stack)]
        assert [process.name for process in stack] == ["store", "decode-lb"]
        assert all(process.state is ProcessState.READY for process in stack)
        store = EtcdStore(stack.etcd_endpoint)
        members = (await store.list(Keys("local").members)).items
        await store.close()
        assert sorted(item.key.split("/")[-2] for item in members) == ["decode-lb", "store"]
        state = read_state(folder)
        assert state is not None
        assert state["processes"]["store"]["pid"] == stack["store"].pid
        assert state["processes"]["store"]["admin"] == stack["store"].admin
        report = await status.look(state)
        assert all(item["ready"] and item["alive"] for item in report["processes"])
        text = status.render(report)
        assert "2 of 2 ready" in text
        assert str(stack["store"].pid) in text
        for file in folder.glob("logs/*.log"):
            assert file.stat().st_mode & 0o777 == 0o600
    assert not any(is_alive(pid) for pid in pids)
    assert read_state(folder) is None


async def test_a_killed_process_comes_back_under_a_new_instance_id(stack: Stack) -> None:
    process = stack["decode-lb"]
    before = (process.pid, process.ready_document["instance_id"])
    process.signal(signal.SIGKILL)
    async with asyncio.timeout(90):
        await until(lambda: process.num_restarts == 1)
        await process.wait_ready()
    after = (process.pid, process.ready_document["instance_id"])
    assert after[0] != before[0]
    assert after[1] != before[1]
    state = read_state(stack.folder)
    assert state is not None
    assert state["processes"]["decode-lb"]["num_restarts"] == 1


async def test_a_crashed_etcd_comes_back_and_nobody_is_restarted(stack: Stack) -> None:
    pids = {process.name: process.pid for process in stack}
    before = stack.etcd.pid
    os.kill(before, signal.SIGKILL)
    async with asyncio.timeout(90):
        await until(lambda: stack.etcd.pid != before and stack.etcd.is_running)
        store = EtcdStore(stack.etcd_endpoint)
        while True:
            try:
                members = (await store.list(Keys("local").members)).items
                break
            except StoreUnavailable:
                await asyncio.sleep(0.05)
        await store.close()
    assert len(members) == 2
    assert {process.name: process.pid for process in stack} == pids
    census = await stack.census()
    assert set(census) == {"store", "decode-lb"}
    assert census["store"]["process"]["descriptors"] > 0


async def test_a_process_that_was_stopped_stays_stopped(stack: Stack) -> None:
    await stack["decode-lb"].stop(2.0)
    assert stack["decode-lb"].state is ProcessState.STOPPED
    assert stack["decode-lb"].pid == 0
    assert "draining" in stack["decode-lb"].log_tail(100_000)
    with pytest.raises(ProcessLookupError):
        stack["decode-lb"].signal(signal.SIGKILL)


async def test_a_frozen_process_is_ended_too(stack: Stack) -> None:
    process = stack["decode-lb"]
    pid = process.pid
    process.signal(signal.SIGSTOP)
    await asyncio.wait_for(process.stop(2.0), 60)
    assert not is_alive(pid)


async def test_a_second_launcher_is_refused_and_disturbs_nothing(stack: Stack) -> None:
    second = Stack(small(stack.folder))
    with pytest.raises(StackRunning, match="is running in"):
        await second.start()
    await second.stop()
    assert read_state(stack.folder) is not None
    assert stack["store"].pid


async def test_a_wrong_flag_fails_the_start_with_the_process_own_words(tmp_path: Path) -> None:
    config = small(tmp_path, flags={"decode-lb": ["--tick_s=-1"]})
    stack = Stack(config)
    with pytest.raises(StartFailed, match="tick_s must be above 0"):
        await stack.start()
    pids = [process.pid for process in stack if process.pid]
    await stack.stop()
    assert not any(is_alive(pid) for pid in pids)


async def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "services.common.cli", "up", f"--folder={tmp_path}"),
        *(f"--without={','.join(WITHOUT)}", "--drain-grace-s=1"),
    ]
    launcher = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert launcher.stdout is not None
        async with asyncio.timeout(100):
            while b"ready in" not in await launcher.stdout.readline():
                pass
        state = json.loads((tmp_path / "state.json").read_text())
        pids = [state["etcd_pid"], *(item["pid"] for item in state["processes"].values())]
        assert all(is_alive(pid) for pid in pids)
        launcher.kill()
        await launcher.wait()
        async with asyncio.timeout(60):
            await until(lambda: not any(is_alive(pid) for pid in pids))
        assert read_state(tmp_path) is None  # a leftover file is not a running stack
    finally:
        if launcher.returncode is None:
            launcher.kill()
            await launcher.wait()


async def test_ctrl_c_stops_everything_in_order(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "services.common.cli", "up", f"--folder={tmp_path}"),
        *(f"--without={','.join(WITHOUT)}", "--drain-grace-s=1"),
    ]
    launcher = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert launcher.stdout is not None
        async with asyncio.timeout(100):
            while b"ready in" not in await launcher.stdout.readline():
                pass
        state = json.loads((tmp_path / "state.json").read_text())
        launcher.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(launcher.communicate(), 60)
    finally:
        if launcher.returncode is None:
            launcher.kill()
            await launcher.wait()
    assert launcher.returncode == 0
    text = errors.decode()
    assert text.index("stopping decode-lb") < text.index("stopping store")
    assert not any(is_alive(item["pid"]) for item in state["processes"].values())
    assert not is_alive(state["etcd_pid"])


# ---- the plan, without processes ----------------------------------------------------------------


def test_the_default_plan_is_the_stack_of_the_quick_start() -> None:
    names = [spec.name for spec in plan(StackConfig())]
    assert {"prefill-1", "prefill-2", "decode-1", "decode-2", "encoder"} <= set(names)
    assert {"entrypoint-1", "entrypoint-2", "check", "store", "recipe", "so-compiler"} <= set(names)
    assert names.index("store") < names.index("decode-1") < names.index("entrypoint-1")
    assert len(names) == len(set(names))


def test_flags_are_for_every_process_of_a_service_and_the_port_for_one() -> None:
    config = StackConfig(flags={"decode": ["--num_blocks=9"]}, http_port=8123)
    specs = {spec.name: spec for spec in plan(config)}
    for name in ("decode-1", "decode-2"):
        assert "--num_blocks=9" in specs[name].flags
    assert "--http_listen=127.0.0.1:8123" in specs["entrypoint-1"].flags
    assert "--http_listen=127.0.0.1:0" in specs["entrypoint-2"].flags


def test_storage_nodes_belong_to_their_backend() -> None:
    local = StackConfig(num_storage_nodes=3)
    assert not [spec for spec in plan(local) if spec.service == "storage-node"]
    nodes = StackConfig(num_storage_nodes=3, backend="nodes")
    specs = [spec for spec in plan(nodes) if spec.service == "storage-node"]
    assert [spec.name for spec in specs] == [f"storage-node-{i}" for i in (1, 2, 3)]
    assert len({spec.flags[0] for spec in specs}) == 3  # a disk each
    assert all("--profile=2+1" in spec.flags for spec in specs)
    assert profile(12) == "10+2"


def test_a_plan_of_what_does_not_exist_is_refused() -> None:
    for wrong in ({"without": ["nobody"]}, {"num_prefill": -1}, {"num_entrypoints": 0}):
        with pytest.raises(ConfigError):
            from_mapping(StackConfig, wrong)


def test_the_network_comes_alone_in_its_own_vocabulary_under_both_names(tmp_path: Path) -> None:
    config = StackConfig(engine="torch", checkpoint=tmp_path / "mini", expert_ranks=2)
    specs = {spec.name: spec for spec in plan(config)}
    assert {"prefill", "decode", "encoder"} <= set(specs)
    for name in ("prefill", "decode"):
        assert "--model.torch.expert_ranks=2" in specs[name].flags
        assert f"--model.torch.checkpoint={tmp_path / 'mini'}" in specs[name].flags
        assert "--model.model_id=mini" in specs[name].flags
    recipe = specs["recipe"].flags
    assert f"--tokenizers=mini={tmp_path / 'mini' / 'tokenizer.json'}" in recipe
    assert "--models=DeepSeek-V4.1-Flash=v4.1@mini,mini=v4.1@mini" in recipe
    assert not specs["store"].flags[0].startswith("--model")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no model"),
        ({"config.json": "{}"}, "architectures"),
        ({"config.json": None}, "has no tokenizer.json"),
        ({"config.json": None, "tokenizer.json": "{}"}, "is no tokenizer file"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch, files: dict[str, str | None], said: str
) -> None:
    monkeypatch.setattr(model, "has_torch", lambda: True)
    TINY.save(tmp_path)
    for name in ("config.json", "tokenizer.json"):
        text = files.get(name, "")
        if text:
            (tmp_path / name).write_text(text)
        elif name not in files:
            (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(model.ModelUnfit, match=said):
        model.check_model(tmp_path)


def test_the_shipped_tokenizer_is_that_of_the_small_network(monkeypatch) -> None:
    found = vocabulary_of(MODELS / "pelagos-mini")
    assert found is not None
    found.demand_fits(TINY)
    monkeypatch.setattr(model, "has_torch", lambda: False)
    with pytest.raises(model.ModelUnfit, match="make setup-engine"):
        model.check_model(MODELS / "pelagos-mini")


# ---- doctor and status --------------------------------------------------------------------------


def test_doctor_finds_no_fault_with_a_machine_that_runs_the_tests(capsys) -> None:
    findings = doctor.examine()
    assert len(findings) == len(doctor.CHECKS)
    # Whether a stack of the user's own is ill is not this test's business.
    bad = [item for item in findings if item.level == doctor.FAIL and item.name != "stack"]
    assert not bad
    doctor.main([])
    out = capsys.readouterr().out
    for name in ("etcd", "shared memory", "native parts"):
        assert name in out


def test_status_of_nothing_says_how_to_start(tmp_path: Path, capsys) -> None:
    assert status.main([str(tmp_path)]) == 3
    assert "pelagos up" in capsys.readouterr().err


def test_up_says_how_to_talk_to_the_stack_of_its_folder() -> None:
    assert up.commands("pelagos", up.default_folder()) == "pelagos chat      pelagos status"
    said = up.commands("pelagos", Path("/tmp/my stack"))
    assert said == "pelagos chat --folder '/tmp/my stack'      pelagos status '/tmp/my stack'"


def test_up_beside_a_running_stack_says_so_and_nothing_of_its_port(tmp_path: Path, capsys) -> None:
    (tmp_path / "state.json").write_text("{}")
    with (tmp_path / "lock").open("a") as lock, socket.create_server(("127.0.0.1", 0)) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        port = server.getsockname()[1]
        assert up.main([f"--folder={tmp_path}", f"--http_port={port}"]) == 1
    said = f"a stack is running in {tmp_path}; `pelagos status {tmp_path}` shows it\n"
    assert capsys.readouterr().err == said


def test_up_refuses_bad_flags_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.common.cli", "up", "--num-prefil=1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 2
    assert done.stderr == "pelagos up: unknown flag --num-prefil (did you mean num_prefill?)\n"


@pytest.mark.parametrize(
    ("flags", "status_code", "said"),
    [
        (["--http_port", "99999"], 2, "http_port must be in [0, 65535]"),
        (["--folder", "/dev/null/stack"], 1, "failed: "),
    ],
)
def test_a_start_that_cannot_be_says_why_in_a_line(flags, status_code, said, capsys) -> None:
    assert up.main(flags) == status_code
    text = capsys.readouterr().err
    assert said in text
    assert "Traceback" not in text
