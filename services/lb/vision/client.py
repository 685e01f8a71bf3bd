"""The vision balancers as siblings see them: prefill asks for a card, cards register.

    async with cards.card(num_patches=4070, request_id="req-1") as card:      # prefill
        ...encode at card.address...
    async with machine.register(report) as session:                           # encoder
        await session.send(report)

`EncoderCards` draws the machine at random, skips one that does not answer for 5 s and tries at
most three: it chooses the instance, so it is the one that retries.
Source: kvcache-and-balancing.md, section 14.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from pelagos.lb.v1 import vision_lb_pb2 as pb
from pelagos.lb.v1 import vision_lb_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.rpc_client import Channels, call, stream_call
from services.lb.vision.config import ROLE
from services.lb.vision.policy import CardReport as CardReport
from services.lb.vision.policy import MachineDraw

ANSWER_S = 0.2
MAX_MACHINES = 3


@dataclass(frozen=True)
class Card:
    """The card that encodes an image. `ticket` names the charge on it."""

    instance_id: str
    address: str
    ticket: str


class CardSession(Protocol):
    """A card's open call."""

    async def send(self, report: CardReport) -> int:
        """Sends one report and returns how many cards the machine has."""
        ...


class VisionMachine(Protocol):
    """One machine's balancer: what the client and the fake offer."""

    async def pick(
        self, num_patches: int, request_id: str = "", exclude: frozenset[str] = frozenset()
    ) -> Card:
        """Charges the least loaded card."""
        ...

    async def release(self, ticket: str, card_fault: bool = False) -> bool:
        """Gives a charge back; returns whether it was held. Idempotent."""
        ...

    def register(self) -> AbstractAsyncContextManager[CardSession]:
        """Opens a card's call; the card is down once it has ended."""
        ...


class VisionLbClient:
    """One machine's balancer over gRPC; an answer takes `answer_s` at most."""

    def __init__(self, channels: Channels, address: str, answer_s: float = ANSWER_S) -> None:
        self._channels = channels
        self._address = address
        self._answer_s = answer_s

    async def pick(
        self, num_patches: int, request_id: str = "", exclude: frozenset[str] = frozenset()
    ) -> Card:
        """Charges the least loaded card of this machine."""
        message = pb.PickCardRequest(
            request_id=request_id, num_patches=num_patches, exclude_instances=sorted(exclude)
        )
        reply = await call(self._stub().PickCard, message, timeout_s=self._answer_s)
        return Card(reply.instance_id, reply.address, reply.ticket)

    async def release(self, ticket: str, card_fault: bool = False) -> bool:
        """Gives a charge back."""
        message = pb.ReleaseCardRequest(ticket=ticket, card_fault=card_fault)
        reply = await call(self._stub().ReleaseCard, message, timeout_s=self._answer_s)
        return bool(reply.released)

    @asynccontextmanager
    async def register(self) -> AsyncIterator[CardSession]:
        """Opens a card's call."""
        async with stream_call(self._stub().Register) as stream:
            yield _GrpcCardSession(stream)

    def _stub(self) -> Any:
        return rpc.VisionLbServiceStub(self._channels.get(self._address))


class _GrpcCardSession:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send(self, report: CardReport) -> int:
        await self._stream.write(
            pb.RegisterRequest(
                instance_id=report.instance_id,
                address=report.address,
                patches=report.num_patches,
                max_patches=report.max_patches,
                accepting=report.accepting,
            )
        )
        reply = await self._stream.read()
        if reply is None:
            raise Failure(Reason.BACKEND_LOST, "the balancer has ended the call")
        return int(reply.num_cards)


def machines_of(
    view: ClusterView, channels: Channels, answer_s: float = ANSWER_S
) -> Callable[[], Mapping[str, VisionMachine]]:
    """Returns how to find the live machines in the membership view."""
    return lambda: {
        member.instance_id: VisionLbClient(channels, member.address, answer_s)
        for member in view.members(ROLE)
    }


class EncoderCards:
    """Cards of all machines, for those who have an image to encode."""

    def __init__(
        self,
        find_machines: Callable[[], Mapping[str, VisionMachine]],
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
        skip_s: float = 5.0,
    ) -> None:
        self._find_machines = find_machines
        self._clock = clock
        self._rng = rng or random.Random()
        self._draw = MachineDraw(skip_s)

    @asynccontextmanager
    async def card(
        self, num_patches: int, request_id: str = "", exclude: frozenset[str] = frozenset()
    ) -> AsyncIterator[Card]:
        """Charges a card for as long as the block runs.

        A Failure that leaves the block and is to be blamed on an instance counts against the card.
        Raises Failure(NO_INSTANCE) after three machines in vain, ENGINE_FULL when they are full.
        """
        machine, card = await self._pick(num_patches, request_id, exclude)
        fault = False
        try:
            yield card
        except Failure as failure:
            fault = failure.reason.facts.blame.name == "INSTANCE"
            raise
        finally:
            # A charge that cannot be given back lapses by itself.
            with suppress(Failure):
                await machine.release(card.ticket, fault)

    async def _pick(
        self, num_patches: int, request_id: str, exclude: frozenset[str]
    ) -> tuple[VisionMachine, Card]:
        machines = self._find_machines()
        tried: set[str] = set()
        last: Failure | None = None
        while len(tried) < MAX_MACHINES:
            machine_id = self._draw.draw(list(machines), tried, self._clock.now_s(), self._rng)
            if machine_id is None:
                break
            tried.add(machine_id)
            machine = machines[machine_id]
            try:
                return machine, await machine.pick(num_patches, request_id, exclude)
            except Failure as failure:
                if not failure.retryable and failure.reason is not Reason.DEADLINE:
                    raise  # the request's own fault: it would be refused everywhere
                if failure.reason is not Reason.ENGINE_FULL:
                    self._draw.failed(machine_id, self._clock.now_s())
                last = failure
        if last is not None and last.reason is Reason.ENGINE_FULL:
            raise last
        text = f"no encoder machine answered, {len(tried)} tried"
        raise Failure(Reason.NO_INSTANCE, text, {"tried": str(len(tried))}, retry_after_s=1.0)
