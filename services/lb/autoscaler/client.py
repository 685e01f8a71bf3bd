"""The autoscaler as siblings see it: balancers report demand, operators look and set bounds.

reporter = DemandReporter(open_demand(channels, view), "decode", instance_id, measure)
runtime.spawn(reporter.run(), "demand")

scaler = AutoscalerClient(channels, leader_of(view))
for pool in await scaler.pools(): ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pelagos.lb.v1 import autoscaler_pb2 as pb
from pelagos.lb.v1 import autoscaler_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.rpc_client import Channels, call, stream_call
from services.lb.autoscaler.config import LEADER


@dataclass(frozen=True)
class PoolState:
    """One pool: what serves, what demand asks for, what was decided and what holds it."""

    pool: str
    num_online: int
    need: int
    want: int
    desired: int
    occupancy: float
    min_instances: int
    max_instances: int
    plan_number: int
    held_by: str


@dataclass(frozen=True)
class Decision:
    """A count that changed."""

    pool: str
    before: int
    after: int
    plan_number: int
    term: int


class DemandSession(Protocol):
    """An open report of demand."""

    async def send(self, pool: str, demand: float, source: str) -> None:
        """Sends one sample, in the pool's unit."""
        ...


class Autoscaler(Protocol):
    """What the client and the fake offer."""

    async def pools(self) -> list[PoolState]:
        """Returns the pools by name."""
        ...

    async def set_bounds(self, pool: str, minimum: int, maximum: int) -> PoolState:
        """Changes a pool's bounds. Idempotent."""
        ...

    def report_demand(self) -> AbstractAsyncContextManager[DemandSession]:
        """Opens a report of demand."""
        ...

    def decisions(self) -> AbstractAsyncContextManager[AsyncIterator[Decision]]:
        """Opens the stream of decisions."""
        ...


def leader_of(view: ClusterView) -> Callable[[], str]:
    """Returns how to find the leader's address in the membership view."""

    def find() -> str:
        leader = view.leader(LEADER)
        if leader is None:
            raise Failure(Reason.NO_INSTANCE, "no autoscaler leads", retry_after_s=1.0)
        return leader.address

    return find


class AutoscalerClient:
    """The autoscaler over gRPC. `find_leader` returns an address or raises Failure."""

    def __init__(
        self, channels: Channels, find_leader: Callable[[], str], timeout_s: float = 5.0
    ) -> None:
        self._channels = channels
        self._find_leader = find_leader
        self._timeout_s = timeout_s

    async def pools(self) -> list[PoolState]:
        """Returns the pools by name."""
        reply = await call(self._stub().GetPools, pb.GetPoolsRequest(), timeout_s=self._timeout_s)
        return [_from_proto(pool) for pool in reply.pools]

    async def set_bounds(self, pool: str, minimum: int, maximum: int) -> PoolState:
        """Changes a pool's bounds."""
        message = pb.SetBoundsRequest(pool=pool, min=minimum, max=maximum)
        reply = await call(self._stub().SetBounds, message, timeout_s=self._timeout_s)
        return _from_proto(reply.pool)

    @asynccontextmanager
    async def report_demand(self) -> AsyncIterator[DemandSession]:
        """Opens a report of demand."""
        async with stream_call(self._stub().ReportDemand) as stream:
            yield _GrpcDemandSession(stream)

    @asynccontextmanager
    async def decisions(self) -> AsyncIterator[AsyncIterator[Decision]]:
        """Opens the stream of decisions."""
        request = pb.WatchDecisionsRequest()
        async with stream_call(self._stub().WatchDecisions, request) as stream:
            yield _decisions(stream)

    def _stub(self) -> Any:
        return rpc.AutoscalerServiceStub(self._channels.get(self._find_leader()))


class _GrpcDemandSession:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send(self, pool: str, demand: float, source: str) -> None:
        message = pb.ReportDemandRequest(pool=pool, demand=demand, source=source)
        await self._stream.write(message)


async def _decisions(stream: Any) -> AsyncIterator[Decision]:
    async for message in stream:
        before = getattr(message, "from")  # a keyword in Python
        yield Decision(message.pool, before, message.to, message.plan_number, message.term)


def _from_proto(pool: pb.PoolState) -> PoolState:
    return PoolState(
        pool.pool,
        pool.online,
        pool.need,
        pool.want,
        pool.desired,
        pool.occupancy,
        pool.min,
        pool.max,
        pool.plan_number,
        pool.held_by,
    )


class DemandReporter:
    """Reports one source's demand once a second, to whoever leads.

    `measure` returns the demand, or None when this process has none to report (a standby). Demand
    is worth little: while no autoscaler leads, samples are dropped and nothing else happens.
    """

    def __init__(
        self,
        autoscaler: Autoscaler,
        pool: str,
        source: str,
        measure: Callable[[], float | None],
        clock: Clock = SYSTEM_CLOCK,
        every_s: float = 1.0,
    ) -> None:
        self._autoscaler = autoscaler
        self._pool = pool
        self._source = source
        self._measure = measure
        self._clock = clock
        self._every_s = every_s

    async def run(self) -> None:
        """Reports until cancelled."""
        while True:
            try:
                async with self._autoscaler.report_demand() as session:
                    while True:
                        demand = self._measure()
                        if demand is not None:
                            await session.send(self._pool, demand, self._source)
                        await self._clock.sleep(self._every_s)
            except Failure:
                await self._clock.sleep(self._every_s)
