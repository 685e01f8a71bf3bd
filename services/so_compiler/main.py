"""`pelagos serve so-compiler`: wires the compiler and its children."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pelagos.so_compiler.v1 import so_compiler_pb2_grpc as rpc

from services.common.service import Runtime, run_service
from services.so_compiler.compiler import Compiler
from services.so_compiler.config import SoCompilerConfig
from services.so_compiler.grammar import BACKEND, BACKEND_VERSION
from services.so_compiler.server import SoCompilerServicer
from services.so_compiler.worker_pool import WorkerPool


async def build(runtime: Runtime[SoCompilerConfig]) -> None:
    """Wires one process."""
    config = runtime.config
    pool = WorkerPool(config.num_workers, config.grammar)
    compiler = Compiler(config, pool, BACKEND_VERSION, runtime.clock)
    runtime.server.add(
        rpc.add_SoCompilerServiceServicer_to_server,
        SoCompilerServicer(compiler, BACKEND, BACKEND_VERSION),
        while_draining=("Fetch",),
    )
    runtime.census.register("so_compiler", "tasks", lambda: compiler.num_flights)
    runtime.census.register("so_compiler", "slots", lambda: pool.num_busy)
    runtime.census.register("so_compiler.cache", "entries", lambda: len(compiler.cache))
    runtime.metrics.gauge("cache_bytes", "Bytes of compiled artifacts").set_function(
        lambda: compiler.cache.num_bytes
    )
    runtime.metrics.gauge("workers_lost", "Children that went over their budget").set_function(
        lambda: pool.num_lost
    )
    runtime.announce(fingerprint={"backend": f"{BACKEND}@{BACKEND_VERSION}"})
    runtime.on_stop(compiler.close)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit status."""
    return run_service("so-compiler", SoCompilerConfig, build, argv)


if __name__ == "__main__":
    sys.exit(main())
