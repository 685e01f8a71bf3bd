"""Hands a prefilled sequence to a decode engine: room, bytes, record, commit.

The order is fixed: room is reserved before the first token, KV and state follow it, decode
verifies and commits, and only then the prefill lets go. An engine that refuses or dies is asked no
more for this request; another one is, a few times.
Source: engine.md, sections 1.10 and 7.5.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from pelagos.engine.v1 import records_pb2 as pb

from services.common.call import Call, calling
from services.common.errors import Failure, Reason
from services.decode.client import DecodeCalls, keep_lease
from services.engine import records
from services.engine.handoff import outgoing_pieces, request_without_pixels
from services.engine.requests import RequestKey
from services.engine.runner import ModelRunner
from services.engine.transfer_client import Outgoing, checksum
from services.lb.decode.client import DecodeRanks, PickRequest, pick_rank
from services.prefill.work import Work

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """A reservation on a decode rank."""

    instance_id: str
    address: str
    key: RequestKey
    reservation_id: str = ""
    lease_s: float = 0.0


def blames_the_instance(failure: Failure) -> bool:
    """Whether another engine should be asked: this one is gone, full, leaving or different.

    A reservation that lapsed or bytes that did not agree may do better at the same one.
    """
    return failure.reason in (
        Reason.BACKEND_LOST,
        Reason.ENGINE_FULL,
        Reason.DRAINING,
        Reason.LAYOUT_MISMATCH,
        Reason.WRONG_ROLE,
        Reason.INTERNAL,
    )


def as_final(failure: Failure) -> Failure:
    """Returns what a request fails with whose last hand-off failed: who runs it again must know.

    Of a reservation that is gone the decode engine says NOT_FOUND or STALE_EPOCH, which mean
    something else to whoever asked for the request.
    """
    if failure.reason in (Reason.NOT_FOUND, Reason.STALE_EPOCH):
        return Failure(Reason.BACKEND_LOST, "the room on the decode engine was lost")
    return failure


class Handoff:
    """Asks the decode balancer for ranks and delivers sequences to them."""

    def __init__(
        self,
        client: DecodeCalls,
        ranks: DecodeRanks,
        *,
        instance_id: str,
        boot_id: str,
        attempts: int,
        pick_wait_s: float,
    ) -> None:
        self._ranks = ranks
        self._instance_id = instance_id
        self._boot_id = boot_id
        self._attempts = attempts
        self._pick_wait_s = pick_wait_s
        self._client = client

    async def reserve(self, work: Work, signature: str, excluded: list[str]) -> Room:
        """Asks the balancer for a rank and reserves it, elsewhere again when it refuses.

        Raises: Failure; NOT_FITTING at once, for no other engine would differ.
        """
        # Epoch of the next owner: whoever emits under an older one is not heard (2.8).
        key = replace(work.key, epoch=work.key.epoch + 1)
        left = max(1, work.sampling.max_tokens - work.num_resumed)
        last = Failure(Reason.NO_INSTANCE, "no decode engine was asked")
        for _ in range(self._attempts):
            work.num_picks += 1
            request = PickRequest(
                request_id=work.key.request_id,
                num_tokens=work.num_tokens + left,
                # Picks are idempotent per number: a try after a refusal is another pick.
                attempt=work.key.attempt * 1000 + work.num_picks,
                max_wait_s=self._pick_wait_s,
                exclude_instances=tuple(excluded),
                layout_signature=signature,
                tenant=work.spec.namespace.tenant,
            )
            pick = await pick_rank(self._ranks, request, timeout_s=self._pick_wait_s + 2)
            room = Room(pick.instance_id, pick.address, key)
            try:
                held = await self._client.reserve(
                    pick.address,
                    key,
                    num_tokens=work.num_tokens,
                    expected_output=left,
                    layout_signature=signature,
                    rank=pick.rank,
                )
                return replace(room, reservation_id=held.reservation_id, lease_s=held.lease_s)
            except Failure as failure:
                last = failure
                if blames_the_instance(failure):
                    excluded.append(pick.instance_id)
                await self._return(request, pick.instance_id, failure)
                if failure.reason is Reason.NOT_FITTING:
                    raise
            except asyncio.CancelledError:
                # The reservation may have been made while nobody waited for the answer.
                await self.give_back(room)
                raise
        raise last

    async def _return(self, request: PickRequest, instance_id: str, failure: Failure) -> None:
        log.info(
            "decode engine refused",
            extra={"request_id": request.request_id, "reason": failure.reason.value},
        )
        with suppress(Failure):
            await self._ranks.return_rank(
                request.request_id,
                request.attempt,
                instance_id,
                instance_fault=failure.reason is Reason.BACKEND_LOST,
            )

    async def keep(self, room: Room, may_hold: Callable[[], bool]) -> None:
        """Renews the lease of a room until it is cancelled, or the room is gone (2.1)."""
        # Without the request's deadline: its end lets go of the room by itself.
        with calling(Call(request_id=room.key.request_id)):
            await keep_lease(
                self._client, room.address, room.reservation_id, room.lease_s, may_hold
            )

    async def deliver(self, work: Work, runner: ModelRunner, room: Room) -> None:
        """Sends bytes and record and has them committed. Raises: Failure; the room is given back
        then, so that nothing of this request stays there."""
        try:
            pieces = outgoing_pieces(runner, work.seq_id, work.num_tokens, work.table)
            record = self._record(work, runner, room, pieces)
            transfer_id = await self._client.push(
                room.address,
                room.key,
                room.reservation_id,
                record.layout_signature,
                work.num_tokens,
                pieces,
                block_keys=record.block_keys,
            )
            await self._client.run(room.address, room.reservation_id, record, transfer_id)
        except BaseException:
            await self.give_back(room)
            raise

    async def give_back(self, room: Room) -> None:
        """Takes back whatever a decode engine holds for this request; safe in any state."""
        # Without the request's deadline: letting go is due when it has passed, too.
        with calling(Call(request_id=room.key.request_id)), suppress(Failure):
            await self._client.abort(room.address, room.key)

    def _record(
        self, work: Work, runner: ModelRunner, room: Room, pieces: list[Outgoing]
    ) -> pb.HandoffRecord:
        assert work.first is not None, "the first token is sampled before the hand-off"
        layout = runner.layout
        num_full = work.num_tokens // layout.geometry.block_tokens
        durable = work.resume.write_from // layout.geometry.block_tokens
        first = records.tokens_event(0, [work.first], work.sampling.logprobs)
        return pb.HandoffRecord(
            key=records.key_to_proto(room.key),
            spec=request_without_pixels(work.spec),
            output_tokens=first.token_ids,
            output_logprobs=first.logprobs,
            output_top=first.top,
            num_cached=work.num_tokens,
            usage=records.usage_to_proto(work.usage),
            block_keys=b"".join(work.tokens.key(i) for i in range(num_full)),
            durable_blocks=b"\1" * durable + bytes(num_full - durable),
            state_bytes=layout.state_bytes,
            state_position=work.num_tokens,
            layout_signature=layout.signature,
            kv_checksum=checksum(pieces),
            coverage_tokens=work.num_tokens,
            created_by_instance=self._instance_id,
            created_by_boot=self._boot_id,
            approximate_from=work.approximate_from,
        )
