"""The decode balancer in memory, with the same contract as the client: no gRPC, no election.

    async with FakeDecodeLb() as ranks:
        picked = await ranks.pick(PickRequest("req-1", 900))

It runs the real rules, so that what siblings test against is what they will meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.lb.decode import balancer as dec
from services.lb.decode import client, wire
from services.lb.decode.balancer import BalancerConfig
from services.lb.decode.hub import DecodeHub


class FakeDecodeLb:
    """A balancer that always leads, under term 1."""

    def __init__(
        self,
        rules: BalancerConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
        default_wait_s: float = 1.0,
    ) -> None:
        self._clock = clock
        self._default_wait_s = default_wait_s
        self.hub = DecodeHub(rules or BalancerConfig(), clock)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> FakeDecodeLb:
        self.hub.begin()
        loops = (self.hub.run_batches(), self.hub.run_lapses())
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.hub.end(Failure(Reason.NO_INSTANCE, "the balancer has stopped"))

    async def pick(self, request: client.PickRequest) -> client.PickedRank:
        """Returns a rank. Idempotent per (request_id, attempt) for 60 s."""
        pick = wire.pick_of(client.pick_to_proto(request), self._clock, self._default_wait_s)
        placed = await self.hub.pick(pick)
        return client.PickedRank(placed.instance_id, placed.boot_id, placed.address, placed.rank, 1)

    async def return_rank(
        self, request_id: str, attempt: int, instance_id: str, instance_fault: bool = False
    ) -> bool:
        """Gives a pick back; returns whether it was known. Idempotent."""
        return self.hub.give_back(wire.key_of(request_id, attempt), instance_id, instance_fault)

    @asynccontextmanager
    async def report(self) -> AsyncIterator[client.ReportSession]:
        """Opens an engine's call; its ranks take nothing new once it has ended."""
        session = _FakeReportSession(self.hub)
        try:
            yield session
        finally:
            session.close()


class _FakeReportSession:
    def __init__(self, hub: DecodeHub) -> None:
        self._hub = hub
        self._version = 0
        self._last: dec.Report | None = None

    async def send(self, report: client.LoadReport) -> int:
        self._version += 1
        self._last = wire.report_of(client.report_to_proto(report, self._version))
        _ = self._hub.balancer
        self._hub.dispatch(self._last)
        return 1

    def close(self) -> None:
        if self._last is not None:
            self._hub.dispatch(dec.Lost(self._last.instance_id, self._last.boot_id))
