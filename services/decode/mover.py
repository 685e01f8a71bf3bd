"""Moves requests from this engine to another: asks the balancer, reserves, delivers, commits.

Source: engine.md, section 2.8; kvcache-and-balancing.md, section 13 ("Draining instance").
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from pelagos.engine.v1 import records_pb2
from pelagos.lb.v1 import decode_lb_pb2, decode_lb_pb2_grpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call
from services.decode.client import DecodeClient
from services.decode.engine import Target
from services.engine.records import key_from_proto
from services.engine.transfer_client import Outgoing

log = logging.getLogger(__name__)

_MAX_TRIES = 3
_PICK_TIMEOUT_S = 5.0


class BalancedMover:
    """`balancer` returns the address of the decode balancer's leader, or None."""

    def __init__(
        self,
        channels: Channels,
        balancer: Callable[[], str | None],
        own_instance_id: str,
        layout_signature: str,
    ) -> None:
        self._channels = channels
        self._balancer = balancer
        self._own = own_instance_id
        self._signature = layout_signature
        self._client = DecodeClient(channels)

    async def move(
        self,
        record: records_pb2.HandoffRecord,
        pieces: list[Outgoing],
        address: str | None,
        num_tokens: int,
    ) -> Target:
        excluded = [self._own]
        last = Failure(Reason.NO_INSTANCE, "no engine was asked")
        for _ in range(1 if address else _MAX_TRIES):
            rank, instance_id, picked = 0, address or "", address
            if picked is None:
                pick = await self._pick(record, num_tokens, excluded)
                rank, instance_id, picked = pick.rank, pick.instance_id, pick.address
            try:
                await self._deliver(record, pieces, picked, rank, num_tokens)
                return Target(instance_id, picked)
            except Failure as failure:
                last = failure
                excluded.append(instance_id)
                log.info(
                    "move refused",
                    extra={"request_id": record.key.request_id, "reason": failure.reason.value},
                )
        raise last

    async def _pick(
        self, record: records_pb2.HandoffRecord, num_tokens: int, excluded: list[str]
    ) -> decode_lb_pb2.PickRankResponse:
        balancer = self._balancer()
        if balancer is None:
            raise Failure(Reason.NO_INSTANCE, "no decode balancer is known")
        stub = decode_lb_pb2_grpc.DecodeLbServiceStub(self._channels.get(balancer))
        request = decode_lb_pb2.PickRankRequest(
            request_id=record.key.request_id,
            # A move is another pick than the one that brought the request here.
            attempt=record.key.attempt * 1000 + record.key.epoch,
            num_tokens=num_tokens + self._left(record),
            handoff=True,
            exclude_instances=excluded,
            layout_signature=self._signature,
            tenant=record.spec.namespace.tenant,
        )
        answer: decode_lb_pb2.PickRankResponse = await call(
            stub.PickRank, request, timeout_s=_PICK_TIMEOUT_S
        )
        if answer.instance_id in excluded:
            raise Failure(Reason.NO_INSTANCE, "the balancer knows no other engine")
        return answer

    def _left(self, record: records_pb2.HandoffRecord) -> int:
        """Output the request may still make."""
        said = record.spec.num_resumed_tokens + len(record.output_tokens) // 4
        return max(1, record.spec.sampling.max_tokens - said)

    async def _deliver(
        self,
        record: records_pb2.HandoffRecord,
        pieces: list[Outgoing],
        address: str,
        rank: int,
        num_tokens: int,
    ) -> None:
        key = key_from_proto(record.key)
        held = await self._client.reserve(
            address,
            key,
            num_tokens=num_tokens,
            expected_output=self._left(record),
            layout_signature=self._signature,
            rank=rank,
        )
        try:
            transfer_id = await self._client.push(
                address, key, held.reservation_id, self._signature, num_tokens, pieces
            )
            await self._client.run(address, held.reservation_id, record, transfer_id)
        except BaseException:
            with suppress(Failure):
                await self._client.release(address, held.reservation_id)
            raise
