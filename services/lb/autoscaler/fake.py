"""The autoscaler in memory, with the same contract as the client: it leads, under term 1.

fake = FakeAutoscaler(online={"decode": 2})
async with fake.report_demand() as session:
    await session.send("decode", 150, "lb-1")
await fake.look()
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.membership import Member, MemberState
from services.common.store import Delete, Put, TxnResult
from services.common.store_memory import MemoryStore
from services.lb.autoscaler import client
from services.lb.autoscaler.config import ROLE_OF_POOL, AutoscalerConfig
from services.lb.autoscaler.controller import Controller, Decided
from services.lb.autoscaler.orchestrator import RecordingOrchestrator
from services.lb.autoscaler.scaler import PoolView


class _AlwaysLeads:
    term = 1

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def write(self, ops: Sequence[Put | Delete]) -> TxnResult:
        return await self._store.txn([], list(ops))


class _FixedView:
    is_stale = False

    def __init__(self, online: Mapping[str, int]) -> None:
        self._online = online

    def members(
        self, role: str, states: tuple[MemberState, ...] = (MemberState.READY,)
    ) -> tuple[Member, ...]:
        pools = [pool for pool, of in ROLE_OF_POOL.items() if of == role]
        count = sum(self._online.get(pool, 0) for pool in pools)
        return tuple(
            Member(role, f"{role}-{i}", f"{role}-{i}:1", MemberState.READY) for i in range(count)
        )


class FakeAutoscaler:
    """It decides with the real rules whenever `look` is called."""

    def __init__(
        self,
        config: AutoscalerConfig | None = None,
        online: Mapping[str, int] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._watchers: list[tuple[deque[client.Decision], asyncio.Event]] = []
        self.orchestrator = RecordingOrchestrator()
        store = MemoryStore(clock)
        self.controller = Controller(
            config or AutoscalerConfig(),
            _AlwaysLeads(store),
            _FixedView(online or {}),
            store,
            Keys(),
            self.orchestrator,
            clock,
            self._decided,
        )

    async def look(self) -> None:
        """Looks at every pool once."""
        await self.controller.look()

    async def pools(self) -> list[client.PoolState]:
        """Returns the pools by name."""
        return [_to_client(view) for view in self.controller.pools()]

    async def set_bounds(self, pool: str, minimum: int, maximum: int) -> client.PoolState:
        """Changes a pool's bounds. Idempotent."""
        return _to_client(await self.controller.set_bounds(pool, minimum, maximum))

    @asynccontextmanager
    async def report_demand(self) -> AsyncIterator[client.DemandSession]:
        """Opens a report of demand."""
        yield _FakeDemandSession(self.controller, self._clock)

    @asynccontextmanager
    async def decisions(self) -> AsyncIterator[AsyncIterator[client.Decision]]:
        """Opens the stream of decisions."""
        watcher: tuple[deque[client.Decision], asyncio.Event] = (deque(), asyncio.Event())
        self._watchers.append(watcher)
        try:
            yield _read(*watcher)
        finally:
            self._watchers.remove(watcher)

    def _decided(self, decided: Decided) -> None:
        change = decided.change
        decision = client.Decision(
            change.pool, change.before, change.after, change.plan_number, decided.term
        )
        for decisions, woken in self._watchers:
            decisions.append(decision)
            woken.set()


async def _read(
    decisions: deque[client.Decision], woken: asyncio.Event
) -> AsyncIterator[client.Decision]:
    while True:
        while decisions:
            yield decisions.popleft()
        woken.clear()
        await woken.wait()


class _FakeDemandSession:
    def __init__(self, controller: Controller, clock: Clock) -> None:
        self._controller = controller
        self._clock = clock

    async def send(self, pool: str, demand: float, source: str) -> None:
        if not source:
            raise Failure(Reason.INVALID_REQUEST, "a sample needs its source")
        self._controller.scaler.demand(pool, source, demand, self._clock.now_s())


def _to_client(view: PoolView) -> client.PoolState:
    decision = view.decision
    return client.PoolState(
        view.pool,
        view.num_online,
        decision.need,
        decision.want,
        decision.desired,
        decision.occupancy,
        view.config.min_instances,
        view.config.max_instances,
        view.plan_number,
        decision.held_by,
    )
