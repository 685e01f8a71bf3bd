"""`pelagos serve eplb`: wires the expert balancer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pelagos.lb.v1 import expert_lb_pb2_grpc as rpc

from services.common.service import Runtime, run_service
from services.lb.expert.config import LEADER, EplbConfig
from services.lb.expert.server import ExpertLbServicer
from services.lb.leadership import lead


async def build(runtime: Runtime[EplbConfig]) -> None:
    """Wires one process; it leads or stands by."""
    servicer = ExpertLbServicer(runtime.config, runtime.clock, runtime.metrics)
    servicer.campaign_with(lead(runtime, LEADER, servicer.begin_term, servicer.end_term))
    runtime.server.add(rpc.add_ExpertLbServiceServicer_to_server, servicer)
    runtime.census.register("eplb", "requests", lambda: servicer.num_planning)
    runtime.census.register("eplb", "entries", lambda: servicer.book.num_pools)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until it is told to stop."""
    return run_service("eplb", EplbConfig, build, argv)


if __name__ == "__main__":
    sys.exit(main())
