"""`pelagos serve gc`: the worker beside one storage node, for the groups that its node leads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio
from pelagos.kvstore.v1 import gc_pb2 as pb
from pelagos.kvstore.v1 import gc_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.service import Runtime, run_service
from services.kvstore.config import GcConfig
from services.kvstore.gc.metrics import export_gc_metrics
from services.kvstore.gc.worker import RefreshedCollector, passes_over, run_passes
from services.kvstore.storage.keeper import ROLE, MapView
from services.kvstore.storage.links import Links, NodeLink


class GcServicer(rpc.GcServiceServicer):
    """Control and view of the worker."""

    def __init__(self, passes: RefreshedCollector, clock: Clock = SYSTEM_CLOCK) -> None:
        self._passes = passes
        self._clock = clock

    async def Collect(
        self, request: pb.CollectRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CollectResponse:
        """Runs a pass now."""
        await self._passes.collect(with_orphans=True)
        done = self._passes.collector.last
        return pb.CollectResponse(
            expired=done.expired, by_waterline=done.by_waterline, orphans=done.orphans
        )

    async def GetGcStatus(
        self, request: pb.GetGcStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetGcStatusResponse:
        """Shows the last pass."""
        collector = self._passes.collector
        since_s = collector.last_success_s
        age_ms = 0 if since_s is None else int((self._clock.now_s() - since_s) * 1000)
        return pb.GetGcStatusResponse(
            used_share=collector.used_share,
            last_success_age_ms=age_ms,
            effective_retention_s=int(collector.retention_s or 0),
            evicted_total=collector.num_evicted,
        )


async def build(runtime: Runtime[GcConfig]) -> None:
    """Wires the process."""
    config = runtime.config
    view = MapView(runtime.store, runtime.keys, runtime.view, runtime.clock)
    links = Links(runtime.channels, view.address_of, runtime.clock)

    def node_address() -> str | None:
        here = (m for m in runtime.view.members(ROLE) if m.labels["machine"] == runtime.machine)
        node = next(here, None)
        return config.node or (node.address if node is not None else None)

    await runtime.view.wait_for(lambda _: node_address() is not None)
    address = node_address()
    assert address is not None
    link = NodeLink(runtime.channels, address, runtime.clock)
    passes = passes_over(link, links, view, config, runtime.clock)
    collector = passes.collector
    runtime.server.add(rpc.add_GcServiceServicer_to_server, GcServicer(passes, runtime.clock))
    runtime.spawn(view.run(), "placement map")
    runtime.spawn(run_passes(passes, config, runtime.clock), "gc")
    export_gc_metrics(runtime.metrics, collector, runtime.clock)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the process until it is told to stop."""
    return run_service("gc", GcConfig, build, argv)
