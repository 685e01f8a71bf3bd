"""Leadership by create-revision, fenced by a term.

    election = Election(store, keys, "decode-lb", instance_id, address)
    task = group.create_task(election.run())
    if election.is_leader:
        await election.write([Put(key, value)])     # compares the term in the same transaction

The leader's key hangs on a lease. Whoever creates it leads; its create revision is the term. A
lease is no lock: `is_leader` turns false, by the local monotonic clock, one second before the
lease can end, and receivers keep a `TermGuard` that refuses lower terms (P-22).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Final

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.store import (
    Backoff,
    Compare,
    Delete,
    LeaseLost,
    Put,
    Snapshot,
    StorePort,
    StoreUnavailable,
    TxnResult,
    follow,
    store_identity,
)

log = logging.getLogger(__name__)

LEASE_TTL_S: Final = 10.0
SAFETY_S: Final = 1.0


class Election:
    """One candidate for one service; `run` campaigns, leads and campaigns again."""

    def __init__(
        self,
        store: StorePort,
        keys: Keys,
        service: str,
        instance_id: str,
        address: str,
        *,
        ttl_s: float = LEASE_TTL_S,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._key = keys.leader(service)
        self._service = service
        self._value = json.dumps({"instance_id": instance_id, "address": address}).encode()
        self._ttl_s = ttl_s
        self._clock = clock
        self._rng = rng or random.Random()
        self._term = 0
        self._lease_id = 0
        self._lease_end_s = 0.0
        self._identity_key = keys.identity
        self._identity = ""  # of the store that the last term, ours or another's, was seen in
        self._callbacks: list[Callable[[bool], None]] = []
        self._changed = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        """Returns whether this instance surely leads now. Ask again right before each act."""
        return bool(self._term) and self._clock.now_s() < self._lease_end_s - SAFETY_S

    @property
    def term(self) -> int:
        """Returns the term of this leadership; 0 when it does not lead."""
        return self._term if self.is_leader else 0

    def subscribe(self, callback: Callable[[bool], None]) -> None:
        """Calls back with True after winning and with False after losing."""
        self._callbacks.append(callback)

    async def wait_leader(self) -> int:
        """Waits until this instance leads and returns the term."""
        while not self.is_leader:
            await self._changed.wait()
        return self._term

    async def write(
        self, ops: Sequence[Put | Delete], compares: Sequence[Compare] = ()
    ) -> TxnResult:
        """Writes only while this leadership lasts, in one transaction with the comparison.

        Raises: Failure(STALE_EPOCH) when another term has begun; Failure(CONFLICT) when a
            comparison of the caller does not hold; StoreUnavailable.
        """
        term = self.term
        if not term:
            raise Failure(Reason.STALE_EPOCH, f"no longer the leader of {self._service}")
        fence = Compare(self._key, create_revision=term)
        result = await self._store.txn([fence, *compares], list(ops))
        if result.succeeded:
            return result
        held = await self._store.get(self._key)
        if held is None or held.create_revision != term:
            self._lose()
            raise Failure(
                Reason.STALE_EPOCH, f"{self._service}: term {term} is over", {"term": str(term)}
            )
        raise Failure(Reason.CONFLICT, f"{self._service}: a shared key has changed")

    async def run(self) -> None:
        """Campaigns until cancelled."""
        backoff = Backoff(self._rng, first_s=0.25, max_s=1.0)
        while True:
            try:
                if not self._term:
                    await self._campaign()
                    backoff.reset()
                await self._lead()
            except LeaseLost:
                self._lose()
                self._lease_id = 0
            except StoreUnavailable:
                if self._term and not self.is_leader:
                    self._lose()
                await self._clock.sleep(backoff.next_s())

    async def resign(self) -> None:
        """Gives leadership up at once, so that a standby need not wait for the lease."""
        self._lose(logging.INFO)
        lease_id, self._lease_id = self._lease_id, 0
        if lease_id:
            with suppress(StoreUnavailable, LeaseLost, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._store.revoke(lease_id)

    async def _campaign(self) -> None:
        """Returns once the key is ours; waits, watching it, while it is another's."""
        while True:
            await self._renew_or_take_lease()
            identity = await store_identity(self._store, self._identity_key)
            put = Put(self._key, self._value, self._lease_id)
            result = await self._store.txn([Compare(self._key, create_revision=0)], [put])
            held = await self._store.get(self._key)
            # Also ours if an earlier answer was lost on the way after the key was written.
            if held is not None and held.lease_id == self._lease_id:
                if self._identity not in ("", identity):
                    await self._outwait_the_forgotten()
                self._identity = identity
                self._win(held.create_revision)
                return
            self._identity = self._identity or identity
            if not result.succeeded and held is not None:
                await self._wait_vacant()

    async def _outwait_the_forgotten(self) -> None:
        """Waits a whole lease: the store came back without its history, and with it without the
        key of a leader who may go on believing in its lease for that long."""
        end_s = self._clock.now_s() + self._ttl_s
        while (left_s := end_s - self._clock.now_s()) > 0:
            await self._clock.sleep(min(left_s, self._ttl_s / 3))
            await self._renew_or_take_lease()

    async def _wait_vacant(self) -> None:
        """Waits until the key is gone; gives up after half a lease, to renew ours."""
        snapshots = follow(self._store, self._key, clock=self._clock, rng=self._rng)
        sleep = asyncio.ensure_future(self._clock.sleep(self._ttl_s / 2))
        seen = asyncio.ensure_future(self._see_vacant(snapshots))
        try:
            await asyncio.wait({sleep, seen}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sleep, seen):
                task.cancel()
            await asyncio.gather(sleep, seen, return_exceptions=True)

    async def _see_vacant(self, snapshots: AsyncGenerator[Snapshot, None]) -> None:
        async with aclosing(snapshots):
            async for snapshot in snapshots:
                if snapshot.healthy and self._key not in snapshot.items:
                    return

    async def _lead(self) -> None:
        """Renews at half of the time left. Raises LeaseLost or StoreUnavailable."""
        while True:
            left_s = self._lease_end_s - self._clock.now_s()
            await self._clock.sleep(max(0.0, left_s) * self._rng.uniform(0.4, 0.5))
            await self._renew_or_take_lease()
            held = await self._store.get(self._key)
            if held is None or held.create_revision != self._term:
                # Deleted by hand, or the store lost its history: this term is over.
                raise LeaseLost("the leader's key is not ours any more")

    async def _renew_or_take_lease(self) -> None:
        asked_s = self._clock.now_s()
        if self._lease_id:
            ttl_s = await self._store.keep_alive(self._lease_id)
        else:
            lease = await self._store.grant(self._ttl_s)
            self._lease_id, ttl_s = lease.lease_id, lease.ttl_s
        # Counted from before the question: the store started counting after it.
        self._lease_end_s = asked_s + ttl_s

    def _win(self, term: int) -> None:
        self._term = term
        log.info("leadership won", extra={"leads": self._service, "term": term})
        self._notify(True)

    def _lose(self, level: int = logging.WARNING) -> None:
        if self._term:
            extra = {"leads": self._service, "term": self._term}
            log.log(level, "leadership ended", extra=extra)
            self._term = 0
            self._notify(False)

    def _notify(self, leads: bool) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for callback in tuple(self._callbacks):
            callback(leads)


class TermGuard:
    """What a receiver keeps per decision maker: the highest term seen.

    Args:
        num_history_losses: `ClusterView.num_history_losses`. A store that came back empty counts
            its revisions from 1 again, and so do the terms.
    """

    def __init__(self, num_history_losses: Callable[[], int] = lambda: 0) -> None:
        self._num_history_losses = num_history_losses
        self._history = num_history_losses()
        self._highest = 0

    @property
    def highest(self) -> int:
        """Returns the highest term accepted so far."""
        return self._highest

    def accept(self, term: int) -> None:
        """Takes a write's term. Raises Failure(STALE_EPOCH) for one lower than seen before."""
        if self._history != self._num_history_losses():
            self._history, self._highest = self._num_history_losses(), 0
        if term < self._highest:
            raise Failure(
                Reason.STALE_EPOCH,
                f"term {term} is over, {self._highest} has begun",
                {"term": str(term), "highest_term": str(self._highest)},
            )
        self._highest = term
