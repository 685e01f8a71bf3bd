"""gRPC in front of one machine's vision balancer: message in, policy asked, message out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from pelagos.lb.v1 import vision_lb_pb2 as pb
from pelagos.lb.v1 import vision_lb_pb2_grpc as rpc

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.common.metrics import Metrics
from services.lb.vision.config import VisionLbConfig
from services.lb.vision.policy import CardReport, Refused, VisionBalancer

log = logging.getLogger(__name__)

_MAX_PATCHES = 1 << 24


class VisionLbServicer(rpc.VisionLbServiceServicer):
    """The RPCs of one machine; there is no leader, the machine is the unit."""

    def __init__(
        self, config: VisionLbConfig, boot_id: str, clock: Clock, metrics: Metrics
    ) -> None:
        self._clock = clock
        self.balancer = VisionBalancer(config.rules, boot_id)
        self._calls: dict[str, int] = {}  # the newest Register call of each card
        self._picks = metrics.counter("picks_total", "Images given a card")
        self._refused = metrics.counter("refused_total", "Refusals", ("reason",))
        self._faults = metrics.counter("card_faults_total", "Images that a card failed")
        self._patches = metrics.gauge("patches", "Patches in progress", ("card",))
        metrics.gauge("cards", "Cards registered").set_function(lambda: self.balancer.num_cards)

    async def PickCard(self, request: pb.PickCardRequest, context: Any) -> pb.PickCardResponse:
        if not 1 <= request.num_patches <= _MAX_PATCHES:
            raise Failure(
                Reason.INVALID_REQUEST,
                f"num_patches is {request.num_patches}, outside 1 to {_MAX_PATCHES}",
                {"num_patches": str(request.num_patches), "max_patches": str(_MAX_PATCHES)},
            )
        picked = self.balancer.pick(
            request.num_patches, set(request.exclude_instances), self._clock.now_s()
        )
        self._show_loads()
        if isinstance(picked, Refused):
            self._refused.labels(reason=picked.reason.value).inc()
            raise Failure(picked.reason, picked.message, retry_after_s=picked.retry_after_s)
        self._picks.inc()
        return pb.PickCardResponse(
            instance_id=picked.instance_id, address=picked.address, ticket=picked.ticket
        )

    async def ReleaseCard(
        self, request: pb.ReleaseCardRequest, context: Any
    ) -> pb.ReleaseCardResponse:
        released = self.balancer.release(request.ticket, request.card_fault, self._clock.now_s())
        if released and request.card_fault:
            self._faults.inc()
        self._show_loads()
        return pb.ReleaseCardResponse(released=released)

    async def Register(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        card_id = ""
        call_number = 0
        try:
            async for request in request_iterator:
                if not request.instance_id or not request.address:
                    raise Failure(Reason.INVALID_REQUEST, "a card needs instance_id and address")
                if not card_id:
                    card_id = request.instance_id
                    call_number = self._calls[card_id] = self._calls.get(card_id, 0) + 1
                    log.info("card registered", extra={"card": card_id})
                if request.instance_id != card_id or self._calls.get(card_id) != call_number:
                    raise Failure(Reason.STALE_EPOCH, "a newer call of this card has begun")
                report = CardReport(
                    card_id,
                    request.address,
                    request.patches,
                    request.max_patches,
                    request.accepting,
                )
                self.balancer.report(report, self._clock.now_s())
                self._show_loads()
                yield pb.RegisterResponse(num_cards=self.balancer.num_cards)
        finally:
            # A card that has called again stays: only its newest call speaks for it.
            if card_id and self._calls.get(card_id) == call_number:
                del self._calls[card_id]
                self.balancer.lost(card_id)
                self._patches.remove(card=card_id)
                log.info("card gone", extra={"card": card_id})

    def _show_loads(self) -> None:
        for card_id, load in self.balancer.loads().items():
            self._patches.labels(card=card_id).set(load)
