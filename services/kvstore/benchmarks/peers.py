"""The peers of `make bench-kv`: an environment of their own, never in our locks.

SGLang and LMCache are taken without their dependencies (serving, kernels, cloud clients), then what
their cache modules import is added. A peer that cannot be had is left out with a message. On
Linux torch is the CUDA build, about 3 GB to load unless the engine extra has loaded it before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
VENV: Final = ROOT / ".local" / "bench-kv" / "venv"

# Name, whether without dependencies, packages. The order is that of installation.
# What the cache modules of SGLang and LMCache import, out of all that the packages would bring.
_SGLANG_IMPORTS: Final = """
aiohttp apache-tvm-ffi compressed-tensors dill gguf ipython msgspec orjson packaging pillow psutil
pybase64 pydantic pyzmq requests sentencepiece starlette torchvision==0.29.2 tqdm transformers
"""
_LMCACHE_IMPORTS: Final = """
aiofile aiofiles cachetools cryptography numba opentelemetry-api opentelemetry-sdk
prometheus_client py-cpuinfo sortedcontainers
"""

# Name, arguments of the installer. The order is that of installation.
_PEERS: Final = (
    ("Redis's client", "redis[hiredis]==8.1.0"),
    ("pyeclib", "pyeclib==1.8.0"),
    ("torch, for the two below", "torch==2.15.0 numpy"),
    ("SGLang", "--no-deps sglang==0.5.23"),
    ("what SGLang's radix cache needs", _SGLANG_IMPORTS),
    ("LMCache", "--no-deps lmcache==0.5.6"),
    ("what LMCache's file adapters need", _LMCACHE_IMPORTS),
)


def install() -> Path:
    """Returns the Python of the peers' environment, set up as far as it can be."""
    uv = str(Path(sys.executable).with_name("uv"))
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(VENV)], check=True)
    stamp = VENV / "installed"
    wanted = repr(_PEERS)
    if stamp.exists() and stamp.read_text("utf-8") == wanted:
        return python
    print("bench-kv: installing the peers (torch: about 3 GB unless it is cached)", file=sys.stderr)
    for name, arguments in _PEERS:
        command = [uv, "pip", "install", "-q", "--python", str(python), *arguments.split()]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            print(f"bench-kv: {name} cannot be installed here; left out", file=sys.stderr)
    stamp.write_text(wanted, "utf-8")
    return python
