"""`pelagos serve decode-lb`: wires the decode balancer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pelagos.lb.v1 import decode_lb_pb2_grpc as rpc

from services.common.service import Runtime, run_service
from services.lb.autoscaler.client import AutoscalerClient, DemandReporter
from services.lb.autoscaler.client import leader_of as autoscaler_leader_of
from services.lb.decode.config import LEADER, DecodeLbConfig
from services.lb.decode.server import DecodeLbServicer
from services.lb.leadership import lead


async def build(runtime: Runtime[DecodeLbConfig]) -> None:
    """Wires one process; it leads the cluster's decode ranks or stands by."""
    servicer = DecodeLbServicer(runtime.config, runtime.clock, runtime.metrics)
    servicer.campaign_with(lead(runtime, LEADER, servicer.begin_term, servicer.end_term))
    runtime.server.add(
        rpc.add_DecodeLbServiceServicer_to_server, servicer, while_draining=("ReturnRank",)
    )
    autoscaler = AutoscalerClient(runtime.channels, autoscaler_leader_of(runtime.view))
    reporter = DemandReporter(
        autoscaler, "decode", runtime.instance_id, servicer.demand, runtime.clock
    )
    runtime.spawn(reporter.run(), "demand")
    hub = servicer.hub
    runtime.spawn(hub.run_batches(), "batches")
    runtime.spawn(hub.run_lapses(), "lapses")
    runtime.spawn(servicer.run_upkeep(), "upkeep")
    runtime.census.register("decode_lb", "requests", lambda: hub.num_waiting)
    runtime.census.register(
        "decode_lb", "queued", lambda: hub.balancer.num_waiting if hub.is_active else 0
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until it is told to stop."""
    return run_service("decode-lb", DecodeLbConfig, build, argv)


if __name__ == "__main__":
    sys.exit(main())
