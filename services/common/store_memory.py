"""`MemoryStore`: the store port in memory, with etcd's revisions, leases, watches, compaction.

It is the fake that services' tests use and the store of the simulator. Faults are switched on by
hand: `set_down`, `compact`, `wipe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.store import (
    Change,
    Compacted,
    Compare,
    Delete,
    KeyValue,
    Lease,
    LeaseLost,
    Listing,
    Put,
    StoreUnavailable,
    TxnResult,
    WatchBatch,
)


@dataclass
class _LiveLease:
    ttl_s: float
    expires_s: float
    keys: set[str] = field(default_factory=set)
    watchdog: asyncio.Task[None] | None = None


class MemoryStore:
    """An etcd in a dict. One object is one cluster; several clients may share it."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._items: dict[str, KeyValue] = {}
        self._leases: dict[int, _LiveLease] = {}
        self._history: list[Change] = []
        self._revision = 1
        self._compacted = 0
        self._num_leases = 0
        self._down = False
        self._life = 0  # counts outages and wipes: a watch belongs to one life
        self._changed = asyncio.Event()

    async def get(self, key: str) -> KeyValue | None:
        """Returns the key's value."""
        self._check_up()
        return self._items.get(key)

    async def list(self, prefix: str) -> Listing:
        """Returns everything under the prefix."""
        self._check_up()
        keys = sorted(key for key in self._items if key.startswith(prefix))
        return Listing(tuple(self._items[key] for key in keys), self._revision)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Writes one key."""
        self._check_up()
        self._write([Put(key, value, lease_id)])
        return self._revision

    async def delete(self, key: str) -> bool:
        """Deletes one key."""
        self._check_up()
        was_there = key in self._items
        self._write([Delete(key)])
        return was_there

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes everything under the prefix."""
        self._check_up()
        keys = [key for key in self._items if key.startswith(prefix)]
        self._write([Delete(key) for key in keys])
        return len(keys)

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Put | Delete],
        otherwise: Sequence[Put | Delete] = (),
    ) -> TxnResult:
        """Compares and writes at one revision."""
        self._check_up()
        holds = all(self._holds(compare) for compare in compares)
        self._write(list(then if holds else otherwise))
        return TxnResult(holds, self._revision)

    async def grant(self, ttl_s: float) -> Lease:
        """Returns a new lease that expires on this store's clock."""
        self._check_up()
        self._num_leases += 1
        lease_id = 1000 + self._num_leases
        lease = _LiveLease(ttl_s, self._clock.now_s() + ttl_s)
        self._leases[lease_id] = lease
        lease.watchdog = asyncio.get_running_loop().create_task(self._expire(lease_id, lease))
        return Lease(lease_id, ttl_s)

    async def keep_alive(self, lease_id: int) -> float:
        """Renews the lease."""
        self._check_up()
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseLost(f"lease {lease_id} is not there")
        lease.expires_s = self._clock.now_s() + lease.ttl_s
        return lease.ttl_s

    async def revoke(self, lease_id: int) -> None:
        """Ends the lease."""
        self._check_up()
        self._end_lease(lease_id)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchBatch]:
        """Yields changes from a revision on, until the store goes down or history is gone."""
        self._check_up()
        life = self._life
        yield WatchBatch((), self._revision)
        next_revision = from_revision
        while True:
            if self._down or self._life != life:
                raise StoreUnavailable("the store went away")
            if next_revision <= self._compacted:
                raise Compacted(self._compacted)
            changes = tuple(
                change
                for change in self._history
                if change.revision >= next_revision and change.key.startswith(prefix)
            )
            next_revision = max(next_revision, self._revision + 1)
            if changes:
                yield WatchBatch(changes, self._revision)
            else:
                await self._changed.wait()

    async def close(self) -> None:
        """Stops the leases' watchdogs."""
        watchdogs = [lease.watchdog for lease in self._leases.values() if lease.watchdog]
        for watchdog in watchdogs:
            watchdog.cancel()
        await asyncio.gather(*watchdogs, return_exceptions=True)

    # ---- faults -------------------------------------------------------------------------------

    def set_down(self, down: bool) -> None:
        """Makes every call fail, and breaks watches, until it is set to False.

        As in etcd, leases get their whole time again when the store returns.
        """
        if self._down and not down:
            for lease in self._leases.values():
                lease.expires_s = self._clock.now_s() + lease.ttl_s
        self._down = down
        self._life += 1
        self._wake()

    def compact(self) -> None:
        """Forgets all history up to now."""
        self._compacted = self._revision
        self._history = []
        self._wake()

    def wipe(self) -> None:
        """Starts again empty at revision 1, as after the loss of every data directory."""
        for lease in self._leases.values():
            if lease.watchdog:
                lease.watchdog.cancel()
        self._items, self._leases, self._history = {}, {}, []
        self._revision, self._compacted = 1, 0
        self._life += 1
        self._wake()

    # ---- inside -------------------------------------------------------------------------------

    def _check_up(self) -> None:
        if self._down:
            raise StoreUnavailable("the store is down")

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        create = item.create_revision if item else 0
        mod = item.mod_revision if item else 0
        if compare.create_revision is not None and create != compare.create_revision:
            return False
        if compare.mod_revision is not None and mod != compare.mod_revision:
            return False
        return compare.value is None or (item is not None and item.value == compare.value)

    def _write(self, ops: Sequence[Put | Delete]) -> None:
        for op in ops:
            if isinstance(op, Put) and op.lease_id and op.lease_id not in self._leases:
                raise LeaseLost(f"lease {op.lease_id} is not there")
        revision = self._revision + 1
        changes: list[Change] = []
        for op in ops:
            old = self._items.get(op.key)
            if old is not None and old.lease_id in self._leases:
                self._leases[old.lease_id].keys.discard(op.key)
            if isinstance(op, Put):
                create = old.create_revision if old else revision
                item = KeyValue(op.key, op.value, create, revision, op.lease_id)
                self._items[op.key] = item
                if op.lease_id:
                    self._leases[op.lease_id].keys.add(op.key)
                changes.append(Change(op.key, item, revision))
            elif old is not None:
                del self._items[op.key]
                changes.append(Change(op.key, None, revision))
        if changes:
            self._revision = revision
            self._history += changes
            self._wake()

    def _end_lease(self, lease_id: int) -> None:
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        if lease.watchdog and lease.watchdog is not asyncio.current_task():
            lease.watchdog.cancel()
        self._write([Delete(key) for key in sorted(lease.keys)])
        self._leases.pop(lease_id, None)

    async def _expire(self, lease_id: int, lease: _LiveLease) -> None:
        # A store that is down expires nothing, as etcd without a leader.
        while (left_s := lease.expires_s - self._clock.now_s()) > 0 or self._down:
            await self._clock.sleep(max(left_s, 0.05))
        self._end_lease(lease_id)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
