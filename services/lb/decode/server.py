"""gRPC in front of the decode balancer: message in, hub asked, message out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from pelagos.lb.v1 import decode_lb_pb2 as pb
from pelagos.lb.v1 import decode_lb_pb2_grpc as rpc

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.common.metrics import Metrics
from services.lb.decode import balancer as dec
from services.lb.decode import wire
from services.lb.decode.config import DecodeLbConfig
from services.lb.decode.hub import DecodeHub
from services.lb.leadership import Leadership

log = logging.getLogger(__name__)


class DecodeLbServicer(rpc.DecodeLbServiceServicer):
    """The RPCs. Only the leader serves them."""

    def __init__(self, config: DecodeLbConfig, clock: Clock, metrics: Metrics) -> None:
        self._config = config
        self._clock = clock
        self._leadership: Leadership | None = None
        self.hub = DecodeHub(config.rules, clock, config.tick_s)
        self._metrics = _HubMetrics(metrics, self.hub, clock)

    def campaign_with(self, leadership: Leadership) -> None:
        """Says who decides whether we lead."""
        self._leadership = leadership

    def begin_term(self, term: int) -> None:
        """Starts to serve; the engines report within one interval."""
        log.info("placing decode requests", extra={"term": term})
        self.hub.begin()

    def end_term(self) -> None:
        """Stops to serve; everybody is sent to the next leader."""
        text = "this balancer no longer leads"
        self.hub.end(Failure(Reason.NO_INSTANCE, text, retry_after_s=0.25))

    def _require(self) -> int:
        assert self._leadership is not None, "campaign_with comes first"
        return self._leadership.require()

    # -- RPCs

    async def PickRank(self, request: pb.PickRankRequest, context: Any) -> pb.PickRankResponse:
        self._require()
        placed = await self.hub.pick(
            wire.pick_of(request, self._clock, self._config.default_wait_s)
        )
        return pb.PickRankResponse(
            instance_id=placed.instance_id,
            boot_id=placed.boot_id,
            address=placed.address,
            rank=placed.rank,
            term=self._require(),
        )

    async def ReturnRank(
        self, request: pb.ReturnRankRequest, context: Any
    ) -> pb.ReturnRankResponse:
        self._require()
        key = wire.key_of(request.request_id, request.attempt)
        found = self.hub.give_back(key, request.instance_id, request.instance_fault)
        return pb.ReturnRankResponse(found=found)

    async def Report(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        last: dec.Report | None = None
        try:
            async for request in request_iterator:
                term = self._require()
                report = wire.report_of(request)
                if last is None:
                    log.info("engine reports", extra={"engine": report.instance_id})
                last = report
                self.hub.dispatch(report)
                yield pb.ReportResponse(version=request.version, term=term)
        finally:
            if last is not None:
                self.hub.dispatch(dec.Lost(last.instance_id, last.boot_id))
                log.info("engine's reports ended", extra={"engine": last.instance_id})

    def demand(self) -> float | None:
        """Returns the requests in computation or waiting for it; None for a standby."""
        if self._leadership is None or not self._leadership.term or not self.hub.is_active:
            return None
        loads = self.hub.balancer.rank_loads(self._clock.now_s())
        return float(sum(load.num_requests for load in loads) + self.hub.balancer.num_waiting)

    # -- loops

    async def run_upkeep(self) -> None:
        """Keeps the metrics current, for ever."""
        while True:
            self._metrics.update()
            await self._clock.sleep(0.25)


class _HubMetrics:
    """The metrics of the table; `update` reads the hub's totals."""

    def __init__(self, metrics: Metrics, hub: DecodeHub, clock: Clock) -> None:
        self._hub = hub
        self._clock = clock
        self._wait = metrics.histogram("queue_wait_seconds", "Time between question and rank")
        self._placed = metrics.counter("placed_total", "Requests given a rank")
        self._returned = metrics.counter("returned_total", "Picks given back")
        self._faults = metrics.counter("faults_total", "Picks given back, the instance to blame")
        self._refused = metrics.counter("refused_total", "Refusals", ("reason",))
        self._imbalance = metrics.gauge("imbalance_ratio", "Busiest over mean rank", ("quantity",))
        self._ranks = metrics.gauge("ranks", "Ranks that may take requests")
        metrics.gauge("waiting_requests", "Requests that wait for room").set_function(
            lambda: hub.num_waiting
        )
        self._last: dict[str, float] = {}

    def update(self) -> None:
        """Moves the metrics on to the hub's totals; a new term starts them from zero again."""
        counters = self._hub.counters
        self._raise(self._placed, "placed", counters.placed)
        self._raise(self._returned, "returned", counters.returned)
        self._raise(self._faults, "faults", counters.faults)
        for reason, count in counters.refused.items():
            self._raise(self._refused.labels(reason=reason), f"refused {reason}", count)
        waits, counters.waits_s = counters.waits_s, []
        for wait_s in waits:
            self._wait.observe(wait_s)
        loads = self._hub.balancer.rank_loads(self._clock.now_s()) if self._hub.is_active else []
        self._ranks.set(len(loads))
        tokens = [load.num_kv_tokens for load in loads]
        requests = [load.num_requests for load in loads]
        self._imbalance.labels(quantity="kv_tokens").set(_max_over_mean(tokens))
        self._imbalance.labels(quantity="requests").set(_max_over_mean(requests))

    def _raise(self, metric: Any, key: str, total: float) -> None:
        before = self._last.get(key, 0.0)
        metric.inc(total - before if total >= before else total)
        self._last[key] = total


def _max_over_mean(values: list[int]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0
