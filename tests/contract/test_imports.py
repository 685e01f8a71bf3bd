"""Who may import whom, and what a light service must not load (style.md, sections 1, 2 and 4)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ROOT / "services"
# Folders that anybody in `services` may import as a whole.
SHARED = {"common"}
# Of a sibling only these modules, at the end of the path, are its front door.
FRONT_DOORS = {"client", "fake"}
ENGINE_USERS = {"prefill", "decode", "encoder"}
LIGHT = ("common", "recipe", "entrypoint", "lb", "kvstore", "so_compiler")
HEAVY_MODULES = ("torch", "triton", "tilelang", "transformers", "xgrammar")
# Cores: no I/O, no clock, no wire. Named for what they decide.
CORES = {
    *("policy.py", "scheduler.py", "speculation.py", "cost_model.py", "hash_chain.py"),
    *("hit_policy.py", "erasure.py", "automaton.py", "patches.py", "placement.py"),
}
ASYNC_TOP_LEVEL = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
ENGINE_CORES = {"step.py", "weights.py", "blocks.py", "layout.py", "transfer.py"}
NOT_IN_CORES = {"grpc", "pelagos", "asyncio", "time", "socket", "threading", "os"}


def sources(folder: Path, with_tests: bool = False) -> Iterator[Path]:
    """Yields the Python files below, tests and benchmarks left out unless asked for."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if with_tests or not {"tests", "benchmarks"} & set(parts):
            yield path


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yields every module a file imports anywhere in it, fully named, with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, node.lineno
            # `from services.decode import scheduler` names a module too.
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno


def service_of(path: Path) -> str:
    return path.relative_to(SERVICES).parts[0]


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def report(path: Path, line: int, name: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_a_service_imports_of_a_sibling_only_its_client_and_its_fake() -> None:
    wrong = []
    for path in sources(SERVICES):
        if path.parent == SERVICES:
            continue
        own = service_of(path)
        for name, line in imports(path):
            parts = name.split(".")
            if parts[0] != "services" or len(parts) < 3 or parts[1] in {own, *SHARED, "engine"}:
                continue
            # A name out of a front door is fine, and so is a name that is not a module.
            doors = FRONT_DOORS & set(parts[2:])
            if not doors and (is_module(name) or not is_front_door_package(parts)):
                wrong.append(report(path, line, name))
    assert not wrong, "\n".join(wrong)


def is_front_door_package(parts: list[str]) -> bool:
    """Returns whether the rest of the name leads to a client below, as in services.lb.decode."""
    folder = ROOT.joinpath(*parts)
    return any((folder / f"{door}.py").exists() for door in FRONT_DOORS)


def test_only_engines_import_the_engine_and_only_it_imports_kernels() -> None:
    wrong = []
    for path in sources(SERVICES):
        if path.parent == SERVICES:
            continue
        own = service_of(path)
        for name, line in imports(path):
            top = name.split(".")[:2]
            if top == ["services", "engine"] and own not in {"engine", *ENGINE_USERS}:
                wrong.append(report(path, line, name))
            if top[0] == "kernels" and own != "engine":
                wrong.append(report(path, line, name))
    assert not wrong, "\n".join(wrong)


def is_engine_core(path: Path) -> bool:
    """Returns whether the file is network, device or block code: what must run without a wire.

    Beside it the folder holds what the three engines share of their shells (attach, hand-off,
    persisting), which are made of messages.
    """
    parts = path.relative_to(SERVICES / "engine").parts
    if parts == ("sim", "prompt.py"):
        return False  # makes a whole hand-off, message included, for examples and conformance
    return parts[0] in {"model", "sim"} or parts[-1] in ENGINE_CORES


def test_the_engine_core_knows_no_grpc_and_common_no_service() -> None:
    wrong = []
    for path in filter(is_engine_core, sources(SERVICES / "engine")):
        for name, line in imports(path):
            if name.split(".")[0] in {"grpc", "pelagos", "grpc_health"}:
                wrong.append(report(path, line, name))
    for path in sources(SERVICES / "common"):
        for name, line in imports(path):
            parts = name.split(".")
            if parts[0] in HEAVY_MODULES or (parts[0] == "services" and parts[1:2] != ["common"]):
                wrong.append(report(path, line, name))
    assert not wrong, "\n".join(wrong)


def test_cores_have_no_wire_no_clock_and_no_loop() -> None:
    wrong = []
    for path in sources(SERVICES):
        if path.name in CORES and "sim" not in path.parts:
            for name, line in imports(path):
                if name.split(".")[0] in NOT_IN_CORES:
                    wrong.append(report(path, line, name))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("service", LIGHT)
def test_light_services_load_no_torch(service: str) -> None:
    """Imports every module of the service in a fresh interpreter and looks at what that loaded."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sources(SERVICES / service)
        if path.name != "__main__.py"
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"print([name for name in {HEAVY_MODULES!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == "[]"


# ---- what must never read untrusted bytes (S-07) ------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def unsafe(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields what can run code out of data: unpickling, eval, unsafe YAML and tensor loading."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in FORBIDDEN_MODULES:
                    yield f"import {alias.name}", node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "") in FORBIDDEN_MODULES:
            yield f"from {node.module} import", node.lineno
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS:
                yield f"{name}(...)", node.lineno
            if name == "torch.load" and "weights_only=True" not in ast.unparse(node):
                yield "torch.load without weights_only=True", node.lineno


def test_ur_79_nothing_here_can_run_code_out_of_data() -> None:
    wrong = []
    for folder in (SERVICES, ROOT / "deploy", ROOT / "kernels"):
        for path in sources(folder):
            for text, line in unsafe(ast.parse(path.read_text(encoding="utf-8"))):
                wrong.append(f"{path.relative_to(ROOT)}:{line} {text}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from marshal import loads", "eval(x)", "yaml.load(f)", "torch.load(f)"],
)
def test_the_search_for_unsafe_loading_finds_it(code: str) -> None:
    assert list(unsafe(ast.parse(code)))
    assert not list(unsafe(ast.parse("yaml.safe_load(f); torch.load(f, weights_only=True)")))


# ---- streams are read through one helper -------------------------------------------------------


def stub_calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields calls of a stub's method: `stub.X(...)`, `self._stub.X(...)`, `XStub(...).Y(...)`."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        base = node.func.value
        name = ""
        if isinstance(base, ast.Name):
            name = base.id
        elif isinstance(base, ast.Attribute):
            name = base.attr
        elif isinstance(base, ast.Call):
            target = base.func
            name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        # RPC methods are in upper camel case; `stub.close()` is none.
        if name.lower().endswith("stub") and node.func.attr[:1].isupper():
            yield f"{name}.{node.func.attr}(...)", node.lineno


def test_no_stub_is_called_outside_of_call_and_stream_call() -> None:
    """Leaving `async for x in stub.X(...)` early does not cancel the call: the handler hangs."""
    adapters = {SERVICES / "common/store_etcd3.py"}  # the stub of another package, on a thread
    wrong = []
    for folder in (SERVICES, ROOT / "deploy"):
        for path in sources(folder):
            if path not in adapters:
                for text, line in stub_calls(ast.parse(path.read_text(encoding="utf-8"))):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} {text}: use call or stream_call")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "async for x in stub.Run(r): pass",
        "it = self._stub.Run(r)",
        "await rpc.DecodeServiceStub(channel).Run(r)",
    ],
)
def test_the_check_finds_what_it_is_for(code: str) -> None:
    assert list(stub_calls(ast.parse(f"async def f(self):\n    {code}\n")))


def test_the_check_lets_the_helpers_pass() -> None:
    code = "await call(stub.Run, r)\nasync with stream_call(stub.Run): pass\nstub.close()"
    assert not list(stub_calls(compile(code, "x", "exec", ASYNC_TOP_LEVEL)))
