"""gRPC in front of the autoscaler's controller."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from pelagos.lb.v1 import autoscaler_pb2 as pb
from pelagos.lb.v1 import autoscaler_pb2_grpc as rpc

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.common.metrics import Metrics
from services.lb.autoscaler.controller import Controller, Decided
from services.lb.autoscaler.scaler import PoolView

_MAX_DECISIONS = 256


class _Watcher:
    """One reader of decisions; one that is far behind is ended, not buffered for ever."""

    def __init__(self) -> None:
        self.decisions: deque[Decided] = deque()
        self.woken = asyncio.Event()
        self.ended = False

    def put(self, decided: Decided) -> None:
        if len(self.decisions) >= _MAX_DECISIONS:
            self.ended = True
        else:
            self.decisions.append(decided)
        self.woken.set()


class AutoscalerServicer(rpc.AutoscalerServiceServicer):
    """The RPCs. Only the leader serves them."""

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._controller: Controller | None = None
        self._watchers: list[_Watcher] = []
        self._gauges = {
            name: metrics.gauge(name, text, ("pool",))
            for name, text in (
                ("occupancy_ratio", "Demand over capacity of the last 5 s"),
                ("need_instances", "What demand asks for"),
                ("want_instances", "Need and spare, within bounds"),
                ("desired_instances", "What was decided"),
                ("online_instances", "What serves"),
            )
        }
        self._changes = metrics.counter("changes_total", "Counts changed", ("pool", "direction"))
        self._held = metrics.counter("held_total", "Looks that changed nothing", ("pool", "why"))

    def serve(self, controller: Controller) -> None:
        """Says what to serve."""
        self._controller = controller

    @property
    def controller(self) -> Controller:
        """Returns what is served."""
        assert self._controller is not None, "serve comes first"
        return self._controller

    @property
    def num_watchers(self) -> int:
        """Returns the readers of decisions."""
        return len(self._watchers)

    def decided(self, decided: Decided) -> None:
        """Tells the watchers of a change."""
        change = decided.change
        direction = "up" if change.after > change.before else "down"
        self._changes.labels(pool=change.pool, direction=direction).inc()
        for watcher in self._watchers:
            watcher.put(decided)

    async def run_looks(self, look_s: float) -> None:
        """Looks at the pools, for ever."""
        while True:
            await self.controller.look()
            for view in self.controller.pools():
                self._show(view)
            await self._clock.sleep(look_s)

    # -- RPCs

    async def GetPools(self, request: pb.GetPoolsRequest, context: Any) -> pb.GetPoolsResponse:
        term = self.controller.require()
        pools = [_to_proto(view) for view in self.controller.pools()]
        return pb.GetPoolsResponse(pools=pools, term=term)

    async def SetBounds(self, request: pb.SetBoundsRequest, context: Any) -> pb.SetBoundsResponse:
        view = await self.controller.set_bounds(request.pool, request.min, request.max)
        return pb.SetBoundsResponse(pool=_to_proto(view))

    async def ReportDemand(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> pb.ReportDemandResponse:
        num_samples = 0
        async for request in request_iterator:
            self.controller.require()
            if not request.source:
                raise Failure(Reason.INVALID_REQUEST, "a sample needs its source")
            self.controller.scaler.demand(
                request.pool, request.source, request.demand, self._clock.now_s()
            )
            num_samples += 1
        return pb.ReportDemandResponse(samples=num_samples)

    async def WatchDecisions(
        self, request: pb.WatchDecisionsRequest, context: Any
    ) -> AsyncIterator[Any]:
        self.controller.require()
        watcher = _Watcher()
        self._watchers.append(watcher)
        try:
            while True:
                while watcher.decisions:
                    decided = watcher.decisions.popleft()
                    change = decided.change
                    response = pb.WatchDecisionsResponse(
                        pool=change.pool,
                        to=change.after,
                        plan_number=change.plan_number,
                        term=decided.term,
                    )
                    setattr(response, "from", change.before)  # a keyword in Python
                    yield response
                if watcher.ended:
                    raise Failure(Reason.OVERLOADED, "the reader is too far behind")
                watcher.woken.clear()
                await watcher.woken.wait()
        finally:
            self._watchers.remove(watcher)

    def _show(self, view: PoolView) -> None:
        decision = view.decision
        values = {
            "occupancy_ratio": decision.occupancy,
            "need_instances": decision.need,
            "want_instances": decision.want,
            "desired_instances": decision.desired,
            "online_instances": view.num_online,
        }
        for name, value in values.items():
            self._gauges[name].labels(pool=view.pool).set(value)
        if decision.held_by:
            self._held.labels(pool=view.pool, why=decision.held_by).inc()


def _to_proto(view: PoolView) -> pb.PoolState:
    decision = view.decision
    return pb.PoolState(
        pool=view.pool,
        online=view.num_online,
        need=decision.need,
        want=decision.want,
        desired=decision.desired,
        occupancy=decision.occupancy,
        min=view.config.min_instances,
        max=view.config.max_instances,
        plan_number=view.plan_number,
        held_by=decision.held_by,
    )
