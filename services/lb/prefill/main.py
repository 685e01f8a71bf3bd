"""`pelagos serve prefill-lb`: wires the prefill balancer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pelagos.lb.v1 import prefill_lb_pb2_grpc as rpc

from services.common.service import Runtime, run_service
from services.lb.autoscaler.client import AutoscalerClient, DemandReporter
from services.lb.autoscaler.client import leader_of as autoscaler_leader_of
from services.lb.leadership import lead
from services.lb.prefill.config import PrefillLbConfig, leader_name
from services.lb.prefill.server import PrefillLbServicer


async def build(runtime: Runtime[PrefillLbConfig]) -> None:
    """Wires one process; it leads its shard or stands by."""
    config = runtime.config
    servicer = PrefillLbServicer(config, runtime.clock, runtime.metrics)
    leadership = lead(runtime, leader_name(config.shard), servicer.begin_term, servicer.end_term)
    servicer.campaign_with(leadership)
    runtime.server.add(rpc.add_PrefillLbServiceServicer_to_server, servicer)
    runtime.spawn(servicer.run_ticks(), "ticks")
    runtime.spawn(servicer.follow_cost_models(runtime.store, runtime.keys), "cost models")
    runtime.spawn(servicer.publish_buckets(runtime.store, runtime.keys), "buckets")
    autoscaler = AutoscalerClient(runtime.channels, autoscaler_leader_of(runtime.view))
    reporter = DemandReporter(
        autoscaler, "prefill", runtime.instance_id, servicer.demand, runtime.clock
    )
    runtime.spawn(reporter.run(), "demand")
    hub = servicer.hub
    runtime.census.register("prefill_lb", "streams", lambda: hub.num_pulls)
    runtime.census.register("prefill_lb", "requests", lambda: hub.num_submissions)
    runtime.census.register(
        "prefill_lb", "queued", lambda: hub.balancer.num_waiting if hub.is_active else 0
    )
    # Submissions go to the next leader when we resign; none of them keeps us.
    runtime.count_in_flight(lambda: 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until it is told to stop."""
    return run_service("prefill-lb", PrefillLbConfig, build, argv)


if __name__ == "__main__":
    sys.exit(main())
