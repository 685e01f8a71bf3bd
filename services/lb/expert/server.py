"""gRPC in front of the expert balancer; planning runs in threads, beside the event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pelagos.lb.v1 import expert_lb_pb2 as pb
from pelagos.lb.v1 import expert_lb_pb2_grpc as rpc

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.common.metrics import Metrics
from services.lb.expert import wire
from services.lb.expert.book import Placed, PlacementBook, plan_or_refuse
from services.lb.expert.config import EplbConfig
from services.lb.leadership import Leadership

log = logging.getLogger(__name__)


class ExpertLbServicer(rpc.ExpertLbServiceServicer):
    """The RPCs. Only the leader serves them; without one, engines keep their placement."""

    def __init__(self, config: EplbConfig, clock: Clock, metrics: Metrics) -> None:
        self._config = config
        self._clock = clock
        self._leadership: Leadership | None = None
        self.book = PlacementBook(config.max_pools)
        self._slots = asyncio.Semaphore(config.max_plans)
        self.num_planning = 0
        self._plans = metrics.counter("plans_total", "Plans made", ("changed",))
        self._seconds = metrics.histogram("plan_seconds", "Time a plan took")
        self._balance = metrics.gauge("moe_lb", "Busiest over mean rank", ("pool", "when"))
        self._last_step = metrics.gauge("last_plan_step", "Step of the last plan", ("pool",))

    def campaign_with(self, leadership: Leadership) -> None:
        """Says who decides whether we lead."""
        self._leadership = leadership

    def begin_term(self, term: int) -> None:
        """Starts to plan, knowing nothing: every request brings its current placement along."""
        log.info("planning expert placements", extra={"term": term})
        self.book.clear()

    def end_term(self) -> None:
        """Stops to plan."""
        self.book.clear()

    def _require(self) -> int:
        assert self._leadership is not None, "campaign_with comes first"
        return self._leadership.require()

    async def PlanPlacement(
        self, request: pb.PlanPlacementRequest, context: Any
    ) -> pb.PlanPlacementResponse:
        self._require()
        given = wire.input_of(request)
        placed = self.book.answered(request.pool, request.step)
        if placed is None:
            if self.num_planning >= self._config.max_plans + self._config.max_waiting:
                raise Failure(Reason.OVERLOADED, "too many plans wait", retry_after_s=1.0)
            self.num_planning += 1
            try:
                async with self._slots:
                    started_s = self._clock.now_s()
                    planned = await asyncio.to_thread(plan_or_refuse, given)
                    self._seconds.observe(self._clock.now_s() - started_s)
            finally:
                self.num_planning -= 1
            # A plan that outlived its term must not be given out under the next.
            term = self._require()
            placed = self.book.record(request.pool, request.step, term, planned)
            self._show(request.pool, request.step, placed)
        return pb.PlanPlacementResponse(
            placement=_to_proto(placed),
            changed=placed.plan.changed,
            moe_lb_before=placed.plan.moe_lb_before,
            moe_lb_after=placed.plan.moe_lb_after,
        )

    async def GetPlacement(
        self, request: pb.GetPlacementRequest, context: Any
    ) -> pb.GetPlacementResponse:
        self._require()
        return pb.GetPlacementResponse(placement=_to_proto(self.book.placement(request.pool)))

    def _show(self, pool: str, step: int, placed: Placed) -> None:
        plan = placed.plan
        self._plans.labels(changed=str(plan.changed).lower()).inc()
        self._balance.labels(pool=pool, when="before").set(plan.moe_lb_before)
        self._balance.labels(pool=pool, when="after").set(plan.moe_lb_after)
        self._last_step.labels(pool=pool).set(step)
        log.info(
            "placement planned",
            extra={
                "pool": pool,
                "step": step,
                "version": placed.version,
                "changed": plan.changed,
                "moe_lb_before": round(plan.moe_lb_before, 4),
                "moe_lb_after": round(plan.moe_lb_after, 4),
            },
        )


def _to_proto(placed: Placed) -> pb.Placement:
    return pb.Placement(
        version=placed.version, term=placed.term, slots=wire.slots_to_bytes(placed.plan.slots)
    )
