"""`pelagos serve autoscaler`: wires the autoscaler."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pelagos.lb.v1 import autoscaler_pb2_grpc as rpc

from services.common.service import Runtime, run_service
from services.lb.autoscaler.config import LEADER, AutoscalerConfig
from services.lb.autoscaler.controller import Controller
from services.lb.autoscaler.orchestrator import RecordingOrchestrator
from services.lb.autoscaler.server import AutoscalerServicer


async def build(runtime: Runtime[AutoscalerConfig]) -> None:
    """Wires one process; it leads or stands by."""
    servicer = AutoscalerServicer(runtime.clock, runtime.metrics)
    controller = Controller(
        runtime.config,
        runtime.elect(LEADER),
        runtime.view,
        runtime.store,
        runtime.keys,
        RecordingOrchestrator(),
        runtime.clock,
        servicer.decided,
    )
    servicer.serve(controller)
    runtime.server.add(rpc.add_AutoscalerServiceServicer_to_server, servicer)
    runtime.spawn(servicer.run_looks(runtime.config.look_s), "looks")
    runtime.census.register("autoscaler", "streams", lambda: servicer.num_watchers)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until it is told to stop."""
    return run_service("autoscaler", AutoscalerConfig, build, argv)


if __name__ == "__main__":
    sys.exit(main())
