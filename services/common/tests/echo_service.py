"""A small service for the tests of the scaffold; run as a program by them."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import require
from services.common.service import Runtime, RuntimeConfig, run_service


@dataclass(frozen=True)
class EchoConfig:
    listen: str = "127.0.0.1:0"
    max_chars: int = 10
    fail_after_s: float | None = None
    start_takes_s: float = 0.0
    busy_until_released: bool = False
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.max_chars > 0, "max_chars must be above 0")


class Probe(health_pb2_grpc.HealthServicer):
    """Any generated servicer will do for a service that only has to be there."""

    async def Check(self, request, context):
        return health_pb2.HealthCheckResponse()


async def build(runtime: Runtime[EchoConfig]) -> None:
    config = runtime.config
    await runtime.clock.sleep(config.start_takes_s)
    runtime.announce(capacity={"max_chars": config.max_chars}, labels={"http": "127.0.0.1:1"})
    if config.busy_until_released:
        work = {"n": 1}
        runtime.count_in_flight(lambda: work["n"])

        async def finish() -> None:
            work["n"] = 0

        runtime.on_hand_over(finish)
    if config.fail_after_s is not None:
        runtime.spawn(_fail(config.fail_after_s), "failing")


async def _fail(after_s: float) -> None:
    await asyncio.sleep(after_s)
    raise OSError("the disk is gone")


if __name__ == "__main__":
    sys.exit(run_service("echo", EchoConfig, build, sys.argv[1:]))
