"""`pelagos serve vision-lb`: wires the vision balancer of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pelagos.lb.v1 import vision_lb_pb2_grpc as rpc

from services.common.service import Runtime, run_service
from services.lb.autoscaler.client import AutoscalerClient, DemandReporter
from services.lb.autoscaler.client import leader_of as autoscaler_leader_of
from services.lb.vision.config import VisionLbConfig
from services.lb.vision.server import VisionLbServicer


async def build(runtime: Runtime[VisionLbConfig]) -> None:
    """Wires one process; its cards find it by the machine's name in the membership."""
    servicer = VisionLbServicer(runtime.config, runtime.boot_id, runtime.clock, runtime.metrics)
    runtime.server.add(
        rpc.add_VisionLbServiceServicer_to_server,
        servicer,
        while_draining=("ReleaseCard", "Register"),
    )
    balancer = servicer.balancer
    autoscaler = AutoscalerClient(runtime.channels, autoscaler_leader_of(runtime.view))
    reporter = DemandReporter(
        autoscaler,
        "vision",
        runtime.instance_id,
        lambda: float(sum(balancer.loads().values())),
        runtime.clock,
    )
    runtime.spawn(reporter.run(), "demand")
    runtime.census.register("vision_lb", "leases", lambda: balancer.census()["tickets"])
    runtime.census.register("vision_lb", "entries", lambda: balancer.census()["cards"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until it is told to stop."""
    return run_service("vision-lb", VisionLbConfig, build, argv)


if __name__ == "__main__":
    sys.exit(main())
