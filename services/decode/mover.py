"""Moves requests from this engine to another: asks the balancer, reserves, delivers, commits.

Source: engine.md, section 2.8; kvcache-and-balancing.md, section 13 ("Draining instance").
"""

from __future__ import annotations

import logging
from contextlib import suppress

from pelagos.engine.v1 import records_pb2

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels
from services.decode.client import DecodeClient, lease_kept
from services.decode.engine import Target
from services.engine.records import key_from_proto
from services.engine.transfer_client import Outgoing
from services.lb.decode.client import DecodeRanks, PickedRank, PickRequest, pick_rank

log = logging.getLogger(__name__)

_MAX_TRIES = 3
_PICK_WAIT_S = 2.0
_PICK_TIMEOUT_S = 5.0


def pick_number(epoch: int, num_excluded: int) -> int:
    """Returns what names a move's pick at the balancer, in 32 bits.

    The epoch is new with every move but may be any 32-bit number. The highest bit keeps moves apart
    from the picks of hand-offs, which count up from the attempt.
    """
    return 1 << 31 | (epoch * (_MAX_TRIES + 1) + num_excluded) & 0x7FFF_FFFF


class BalancedMover:
    """Finds a target through the decode balancer, as a request that moves goes before the queue."""

    def __init__(
        self,
        channels: Channels,
        ranks: DecodeRanks,
        own_instance_id: str,
        layout_signature: str,
    ) -> None:
        self._ranks = ranks
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
        """Delivers a request. Raises: the last refusal when nobody takes it."""
        if address is not None:
            await self._deliver(record, pieces, address, 0, num_tokens)
            return Target(address, address)
        excluded = [self._own]
        last = Failure(Reason.NO_INSTANCE, "no engine was asked")
        for _ in range(_MAX_TRIES):
            pick = await self._pick(record, num_tokens, excluded)
            try:
                await self._deliver(record, pieces, pick.address, pick.rank, num_tokens)
                return Target(pick.instance_id, pick.address)
            except Failure as failure:
                last = failure
                excluded.append(pick.instance_id)
                log.info(
                    "move refused",
                    extra={"request_id": record.key.request_id, "reason": failure.reason.value},
                )
        raise last

    async def _pick(
        self, record: records_pb2.HandoffRecord, num_tokens: int, excluded: list[str]
    ) -> PickedRank:
        request = PickRequest(
            request_id=record.key.request_id,
            num_tokens=num_tokens + self._left(record),
            attempt=pick_number(record.key.epoch, len(excluded)),
            is_handoff=True,
            max_wait_s=_PICK_WAIT_S,
            exclude_instances=tuple(excluded),
            layout_signature=self._signature,
            tenant=record.spec.namespace.tenant,
        )
        picked = await pick_rank(self._ranks, request, timeout_s=_PICK_TIMEOUT_S)
        if picked.instance_id in excluded:
            raise Failure(Reason.NO_INSTANCE, "the balancer knows no other engine")
        return picked

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
            async with lease_kept(self._client, address, held.reservation_id, held.lease_s):
                transfer_id = await self._client.push(
                    address, key, held.reservation_id, self._signature, num_tokens, pieces
                )
                await self._client.run(address, held.reservation_id, record, transfer_id)
        except BaseException:
            with suppress(Failure):
                await self._client.release(address, held.reservation_id)
            raise
