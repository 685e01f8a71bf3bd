"""Compiles every GPU kernel ahead of time, without a GPU: `python -m kernels.testing.compile 90`.

Prints one JSON object: by kernel and architecture the bytes of its binary, and the bytes of local
memory it spills to. A kernel that does not compile ends the program with its error.
"""

from __future__ import annotations

import inspect
import json
import sys
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton import attention, engram, experts, hyper, index, norm, stores

MODULES: tuple[ModuleType, ...] = (attention, engram, experts, hyper, index, norm, stores)
# Arguments that are no pointers: floats by name, the rest are 32-bit integers.
_FLOATS = {"eps", "hc_eps", "norm_eps", "scale"}


def sources() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Returns kernels by op: function, types of pointers, compile-time values."""
    return {name: found for module in MODULES for name, found in module.SOURCES.items()}


def signature(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    """Returns the types of a kernel's arguments; a pointer that is not named is of float32."""
    kinds = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            kinds[name] = "constexpr"
        elif name.endswith("_ptr"):
            kinds[name] = "*" + pointers.get(name, "fp32")
        else:
            kinds[name] = "fp32" if name in _FLOATS else "i32"
    return kinds


def compile_for(name: str, arch: int) -> dict[str, int]:
    """Compiles one kernel to a binary; returns its sizes."""
    kernel, pointers, constants = sources()[name]
    kinds = signature(kernel, pointers, constants)
    source = ASTSource(kernel, kinds, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    return {"cubin": len(built.asm["cubin"]), "shared": int(built.metadata.shared)}


def main(arches: list[str]) -> int:
    found = {
        f"{name} sm_{arch}": compile_for(name, int(arch))
        for name in sources()
        for arch in arches or ["80", "90"]
    }
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
