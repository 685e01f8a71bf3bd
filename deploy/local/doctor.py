"""`pelagos doctor`: what is wrong with this machine, in one line per check."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.local.etcd import EtcdMissing, find_etcd
from deploy.local.stack import read_state
from deploy.local.up import DEFAULT_HTTP_PORT, default_folder
from services.common.shm_ring import PREFIX, SHM_FOLDER, SlotRing

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

_MIN_DESCRIPTORS: Final = 4096
_MIN_SHM_BYTES: Final = 256 << 20
_MIN_DISK_BYTES: Final = 2 << 30
_MIN_MEMORY_BYTES: Final = 3 << 30


@dataclass(frozen=True)
class Finding:
    """What one check found; `advice` says what to do about it."""

    name: str
    level: str
    text: str
    advice: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints every finding. 0: the stack can run; 1: something must be mended first."""
    if argv:
        print("usage: pelagos doctor")
        return 0 if argv[0] in ("-h", "--help") else 2
    findings = examine()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.level:<4}  {finding.name:<{width}}  {finding.text}")
        if finding.advice:
            print(f"{'':<4}  {'':<{width}}  -> {finding.advice}")
    return 1 if any(finding.level == FAIL for finding in findings) else 0


def examine() -> list[Finding]:
    """Returns the findings of every check; a check that fails itself is a finding."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.append(check())
        except Exception as error:
            name = check.__name__.removeprefix("check_")
            findings.append(Finding(name, FAIL, f"{type(error).__name__}: {error}"))
    return findings


def check_python() -> Finding:
    """Which Python runs; set-up has refused one that is too old."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", OK, text)


def check_native() -> Finding:
    """Both native modules load."""
    missing = [
        name
        for name in ("services.recipe._codec", "services.kvstore._native")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        return Finding("native parts", FAIL, f"not built: {', '.join(missing)}", "run `make setup`")
    for name in ("services.recipe._codec", "services.kvstore._native"):
        importlib.import_module(name)
    return Finding("native parts", OK, "codec and store load")


def check_etcd() -> Finding:
    """An etcd that starts."""
    try:
        program = find_etcd()
    except EtcdMissing as error:
        return Finding("etcd", FAIL, str(error), "run `make setup`, or install etcd-server")
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=20, check=False
    )
    version = (done.stdout.splitlines() or ["?"])[0].removeprefix("etcd Version: ")
    if done.returncode != 0:
        return Finding("etcd", FAIL, f"{program} does not run", "install etcd-server 3.4 or newer")
    return Finding("etcd", OK, f"{version} ({program})")


def check_shared_memory() -> Finding:
    """Room for rings, and none left behind."""
    total = os.statvfs(SHM_FOLDER)
    free_bytes = total.f_bavail * total.f_frsize
    SlotRing.create("doctor", 4096, 1).close()
    text = f"{free_bytes / 1e6:.0f} MB free in {SHM_FOLDER}"
    left = len(list(SHM_FOLDER.glob(f"{PREFIX}*")))
    if left:
        text += f", {left} rings in use"
    if free_bytes < _MIN_SHM_BYTES:
        advice = "give the container more (--shm-size), or transfers between engines go by gRPC"
        return Finding("shared memory", WARN, text, advice)
    return Finding("shared memory", OK, text)


def check_descriptors() -> Finding:
    """Enough open files for ten thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files allowed (at most {hard})"
    if soft < _MIN_DESCRIPTORS:
        return Finding(
            "descriptors", WARN, text, f"ulimit -n {min(hard, 65536)} before `pelagos up`"
        )
    return Finding("descriptors", OK, text)


def check_memory() -> Finding:
    """Memory for some twenty processes."""
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    available = _meminfo_available() or pages * size
    text = f"{available / 1e9:.1f} GB available, {os.cpu_count()} cores"
    if available < _MIN_MEMORY_BYTES:
        return Finding(
            "memory", WARN, text, "try fewer: `pelagos up --num-prefill 1 --num-decode 1`"
        )
    return Finding("memory", OK, text)


def check_disk() -> Finding:
    """Room for the store, logs and etcd, in a folder that can be written."""
    folder = default_folder().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    text = f"{usage.free / 1e9:.1f} GB free for {default_folder()}"
    if not os.access(existing, os.W_OK):
        return Finding("disk", FAIL, f"{existing} cannot be written", "choose another --folder")
    if usage.free < _MIN_DISK_BYTES:
        return Finding("disk", WARN, text, "the store evicts early; make room or set --folder")
    return Finding("disk", OK, text)


def check_loopback() -> Finding:
    """Two sockets on loopback reach each other, and no proxy is in between."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname(), timeout=5):
            pass
    for name in ("http_proxy", "grpc_proxy", "all_proxy"):
        if os.environ.get(name) and "127.0.0.1" not in os.environ.get("no_proxy", ""):
            advice = "export no_proxy=localhost,127.0.0.1"
            return Finding("loopback", WARN, f"{name} is set without no_proxy", advice)
    return Finding("loopback", OK, "reachable, no proxy in between")


def check_port() -> Finding:
    """The default HTTP port; any other does too."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_HTTP_PORT))
        except OSError:
            if read_state(default_folder()) is not None:
                return Finding("http port", OK, f"{DEFAULT_HTTP_PORT}, by the stack that runs")
            text = f"{DEFAULT_HTTP_PORT} is taken"
            return Finding("http port", WARN, text, "`pelagos up` takes a free one and says which")
    return Finding("http port", OK, f"{DEFAULT_HTTP_PORT} is free")


def check_engine() -> Finding:
    """Whether the torch engine can run; the simulated one always can."""
    if importlib.util.find_spec("torch") is None:
        return Finding("engines", OK, "sim (for torch: `make setup-engine`, about 3 GB to load)")
    return Finding("engines", OK, "sim, torch")


def check_stack() -> Finding:
    """Whether a stack runs, and whether all of it does."""
    state = read_state(default_folder())
    if state is None:
        return Finding("stack", OK, "none is running")
    bad = [name for name, item in state["processes"].items() if item["state"] != "ready"]
    if bad:
        folder = Path(default_folder()) / "logs"
        return Finding("stack", FAIL, f"not ready: {', '.join(bad)}", f"see {folder}")
    return Finding("stack", OK, f"running, {len(state['processes'])} processes are ready")


CHECKS: Final[tuple[Callable[[], Finding], ...]] = (
    *(check_python, check_native, check_etcd, check_shared_memory, check_descriptors),
    *(check_memory, check_disk, check_loopback, check_port, check_engine, check_stack),
)


def _meminfo_available() -> int:
    """Returns what Linux says a new program may use; 0 where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0
