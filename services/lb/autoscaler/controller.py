"""The loop of the autoscaler: look, decide, write under the term, tell. No gRPC.

While it does not surely lead, or the view of the cluster is stale, every count is frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.membership import Member, MemberState
from services.common.store import Delete, Put, StorePort, StoreUnavailable, TxnResult
from services.lb.autoscaler.config import ROLE_OF_POOL, AutoscalerConfig
from services.lb.autoscaler.fleet import Fleet, FleetMember
from services.lb.autoscaler.lifecycle import Action
from services.lb.autoscaler.orchestrator import Orchestrator
from services.lb.autoscaler.scaler import Change, PoolView, Scaler, desired_to_bytes, parse_desired

log = logging.getLogger(__name__)

_ALL_STATES = (MemberState.STARTING, MemberState.READY, MemberState.DRAINING)


class LeaderPort(Protocol):
    """What the controller needs of an election."""

    @property
    def term(self) -> int:
        """The term of this leadership; 0 when it does not lead."""
        ...

    async def write(self, ops: Sequence[Put | Delete]) -> TxnResult:
        """Writes while this leadership lasts. Raises Failure(STALE_EPOCH)."""
        ...


class ViewPort(Protocol):
    """What the controller needs of the membership view."""

    @property
    def is_stale(self) -> bool:
        """Whether the view is too old to act upon."""
        ...

    def members(self, role: str, states: tuple[MemberState, ...] = ...) -> tuple[Member, ...]:
        """The members of a role."""
        ...


@dataclass(frozen=True)
class Decided:
    """A change in force."""

    change: Change
    term: int


class Controller:
    """One candidate; only the leader's looks do anything."""

    def __init__(
        self,
        config: AutoscalerConfig,
        leader: LeaderPort,
        view: ViewPort,
        store: StorePort,
        keys: Keys,
        orchestrator: Orchestrator,
        clock: Clock,
        on_decided: Callable[[Decided], None] | None = None,
    ) -> None:
        self._config = config
        self._leader = leader
        self._view = view
        self._store = store
        self._keys = keys
        self._orchestrator = orchestrator
        self._clock = clock
        self._on_decided = on_decided or (lambda _: None)
        self._restored_term = 0
        self._written: dict[str, bytes] = {}
        self._fleets = {pool: Fleet(pool, config.lifecycle) for pool in config.pools}
        self.scaler = Scaler(config.pools)

    def require(self) -> int:
        """Returns the term. Raises Failure(NO_INSTANCE) when this instance does not lead."""
        term = self._leader.term
        if not term:
            raise Failure(Reason.NO_INSTANCE, "this autoscaler does not lead", retry_after_s=1.0)
        return term

    def pools(self) -> list[PoolView]:
        """Returns the last look at each pool."""
        return [self.scaler.view(pool, self._num_online(pool)) for pool in self.scaler.pools]

    async def look(self) -> None:
        """Looks at every pool once. Raises nothing: what could not be written stays as it was."""
        term = self._leader.term
        if not term or self._view.is_stale:
            return
        try:
            if term != self._restored_term:
                await self._restore()
                self._restored_term = term
            for pool in self.scaler.pools:
                change = self.scaler.look(pool, self._num_online(pool), self._clock.now_s())
                if change is not None:
                    await self._put_in_force(change, term)
                if self._config.enact:
                    await self._reconcile(pool, term)
        except (StoreUnavailable, Failure) as error:
            log.warning("counts stay as they are", extra={"error": str(error)})

    async def set_bounds(self, pool: str, minimum: int, maximum: int) -> PoolView:
        """Changes a pool's bounds and writes them down for the next leader."""
        self.require()
        before = self.scaler.config(pool)
        self.scaler.set_bounds(pool, minimum, maximum)
        try:
            value = f"{minimum} {maximum}".encode()
            await self._leader.write([Put(self._keys.named("as", pool, "bounds"), value)])
        except (StoreUnavailable, Failure) as error:
            self.scaler.set_bounds(pool, before.min_instances, before.max_instances)
            if isinstance(error, Failure):
                raise
            raise Failure(Reason.OVERLOADED, "the store is away", retry_after_s=1.0) from error
        return self.scaler.view(pool, self._num_online(pool))

    async def _restore(self) -> None:
        """Continues from what the last leader wrote: same counts, same plan numbers."""
        self.scaler.forget()
        self._written.clear()
        for pool in self.scaler.pools:
            bounds = await self._store.get(self._keys.named("as", pool, "bounds"))
            if bounds is not None:
                with suppress(ValueError, Failure):
                    minimum, maximum = bounds.value.decode().split()
                    self.scaler.set_bounds(pool, int(minimum), int(maximum))
            item = await self._store.get(self._keys.named("as", pool, "desired"))
            found = None if item is None else parse_desired(item.value)
            desired, plan_number = found or (None, 0)
            self.scaler.restore(pool, desired, plan_number, self._num_online(pool))
            prefix = self._keys.named("as", pool, "inst", "")
            listing = await self._store.list(prefix)
            documents = {i.key.removeprefix(prefix): i.value for i in listing.items}
            self._written.update({i.key: i.value for i in listing.items})
            self._fleets[pool].restore(documents, self._clock.now_s())

    async def _put_in_force(self, change: Change, term: int) -> None:
        key = self._keys.named("as", change.pool, "desired")
        value = desired_to_bytes(change.after, change.plan_number, term)
        await self._leader.write([Put(key, value)])
        self.scaler.commit(change)
        self._on_decided(Decided(change, term))
        await self._orchestrator.scale(change.pool, change.after, change.plan_number, term)

    async def _reconcile(self, pool: str, term: int) -> None:
        members = [
            FleetMember(
                member.instance_id,
                member.state.value,
                member.zone or member.labels.get("machine", ""),
                int(member.capacity.get("running", 0)),
            )
            for member in self._view.members(ROLE_OF_POOL[pool], _ALL_STATES)
        ]
        fleet = self._fleets[pool]
        desired, plan_number = self.scaler.desired(pool)
        steps = fleet.reconcile(members, desired, plan_number, self._clock.now_s())
        for step in [s for s in steps if s.action is Action.COUNT_CARDS]:
            can_restart = await self._orchestrator.can_restart(pool, step.instance_id)
            steps += fleet.failed(step.instance_id, can_restart, self._clock.now_s())
        # First written, then done: a new leader finds what may have been done, and repeats it
        # under the same plan number.
        await self._write_instances(pool, fleet)
        for step in steps:
            await self._orchestrator.carry_out(pool, step, term)

    async def _write_instances(self, pool: str, fleet: Fleet) -> None:
        prefix = self._keys.named("as", pool, "inst", "")
        wanted = {prefix + k: v for k, v in fleet.to_documents().items()}
        known = {k: v for k, v in self._written.items() if k.startswith(prefix)}
        ops: list[Put | Delete] = [Put(k, v) for k, v in wanted.items() if known.get(k) != v]
        ops += [Delete(k) for k in known if k not in wanted]
        # A transaction has a bound of 128 operations in etcd.
        for start in range(0, len(ops), 100):
            await self._leader.write(ops[start : start + 100])
        self._written = {k: v for k, v in self._written.items() if k not in known} | wanted

    def _num_online(self, pool: str) -> int:
        return len(self._view.members(ROLE_OF_POOL[pool], (MemberState.READY,)))
