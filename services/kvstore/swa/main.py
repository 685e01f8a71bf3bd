"""`pelagos serve swa`: a directory shard alone; usually an entrypoint hosts it."""

from __future__ import annotations

from collections.abc import Sequence

from pelagos.kvstore.v1 import swa_pb2_grpc

from services.common.clock import Clock
from services.common.service import Runtime, run_service
from services.kvstore.config import SwaConfig
from services.kvstore.swa.directory import SwaDirectory
from services.kvstore.swa.server import SwaDirectoryServicer

_SWEEP_S = 30.0


async def build(runtime: Runtime[SwaConfig]) -> None:
    """Wires the process."""
    directory = SwaDirectory(runtime.config.max_entries)
    servicer = SwaDirectoryServicer(directory, runtime.clock)
    runtime.server.add(swa_pb2_grpc.add_SwaDirectoryServiceServicer_to_server, servicer)
    runtime.spawn(sweep(directory, runtime.clock), "sweep")
    runtime.census.register("swa.directory", "entries", lambda: len(directory))
    hits = runtime.metrics.gauge("lookups", "Look-ups since the start", ("result",))
    hits.labels(result="hit").set_function(lambda: directory.num_hits)
    hits.labels(result="miss").set_function(lambda: directory.num_misses)
    hits.labels(result="stale").set_function(lambda: directory.num_stale)


async def sweep(directory: SwaDirectory, clock: Clock) -> None:
    """Forgets what has expired, so that memory follows what is in use."""
    while True:
        await clock.sleep(_SWEEP_S)
        directory.sweep(clock.now_s())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the process until it is told to stop."""
    return run_service("swa", SwaConfig, build, argv)
