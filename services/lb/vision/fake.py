"""One machine's vision balancer in memory, with the same contract as the client.

machine = FakeVisionLb()
async with machine.register() as session:
    await session.send(CardReport("card-0", "127.0.0.1:1", 0, 0, True))
    card = await machine.pick(4070)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.lb.vision import client
from services.lb.vision.policy import BalancerConfig, CardReport, Refused, VisionBalancer


class FakeVisionLb:
    """It runs the real rules, so that what siblings test against is what they will meet."""

    def __init__(self, rules: BalancerConfig | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.balancer = VisionBalancer(rules or BalancerConfig(), "fake")
        self._sessions: dict[str, object] = {}  # the newest call of each card

    async def pick(
        self, num_patches: int, request_id: str = "", exclude: frozenset[str] = frozenset()
    ) -> client.Card:
        """Charges the least loaded card."""
        if num_patches < 1:
            raise Failure(Reason.INVALID_REQUEST, f"num_patches is {num_patches}")
        picked = self.balancer.pick(num_patches, exclude, self._clock.now_s())
        if isinstance(picked, Refused):
            raise Failure(picked.reason, picked.message, retry_after_s=picked.retry_after_s)
        return client.Card(picked.instance_id, picked.address, picked.ticket)

    async def release(self, ticket: str, card_fault: bool = False) -> bool:
        """Gives a charge back; returns whether it was held. Idempotent."""
        return self.balancer.release(ticket, card_fault, self._clock.now_s())

    @asynccontextmanager
    async def register(self) -> AsyncIterator[client.CardSession]:
        """Opens a card's call; the card is down once it has ended."""
        session = _FakeCardSession(self.balancer, self._sessions, self._clock)
        try:
            yield session
        finally:
            session.close()


class _FakeCardSession:
    def __init__(self, balancer: VisionBalancer, sessions: dict[str, object], clock: Clock) -> None:
        self._balancer = balancer
        self._sessions = sessions
        self._clock = clock
        self._card_id = ""

    async def send(self, report: CardReport) -> int:
        if not report.instance_id or not report.address:
            raise Failure(Reason.INVALID_REQUEST, "a card needs instance_id and address")
        if not self._card_id:
            self._card_id = report.instance_id
            self._sessions[self._card_id] = self
        if self._sessions.get(report.instance_id) is not self:
            raise Failure(Reason.STALE_EPOCH, "a newer call of this card has begun")
        self._balancer.report(report, self._clock.now_s())
        return self._balancer.num_cards

    def close(self) -> None:
        if self._sessions.get(self._card_id) is self:
            del self._sessions[self._card_id]
            self._balancer.lost(self._card_id)
