"""The store port: what Pelagos needs of etcd, and nothing more.

Three adapters pass the same contract tests (`tests/contract/test_store_port.py`):
`MemoryStore` (tests, simulation), `EtcdStore` (the default) and `Etcd3Store` (optional package).

One watch is one connection: it ends with `StoreUnavailable` when that breaks and with `Compacted`
when its history is gone. Resuming and listing again is done once, for all adapters, by `follow`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from services.common.clock import SYSTEM_CLOCK, Clock


class StoreUnavailable(Exception):
    """The store did not answer; whether a write took place is unknown."""


class LeaseLost(Exception):
    """The lease has expired or was never there: whatever hung on it is gone."""


class Compacted(Exception):
    """The history asked for is gone; list again and watch from there."""

    def __init__(self, compact_revision: int) -> None:
        super().__init__(f"history before revision {compact_revision} is compacted")
        self.compact_revision = compact_revision


@dataclass(frozen=True)
class KeyValue:
    """A stored key. `create_revision` identifies one life of it, `mod_revision` one value."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True)
class Listing:
    """All keys under a prefix, in key order, as they were at `revision`."""

    items: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True)
class Change:
    """One key's new value, or None when it was deleted at `revision`."""

    key: str
    item: KeyValue | None
    revision: int


@dataclass(frozen=True)
class WatchBatch:
    """Changes of whole revisions, in order; empty for the batch that says the watch stands."""

    changes: tuple[Change, ...]
    revision: int


@dataclass(frozen=True)
class Compare:
    """A condition of a transaction; the fields that are not None must be equal.

    `create_revision=0` means that the key must not exist.
    """

    key: str
    create_revision: int | None = None
    mod_revision: int | None = None
    value: bytes | None = None


@dataclass(frozen=True)
class Put:
    """Writes a key, under a lease unless `lease_id` is 0."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True)
class Delete:
    """Deletes a key; nothing happens when it is not there."""

    key: str


@dataclass(frozen=True)
class TxnResult:
    """Whether the comparisons held, and the store's revision after it."""

    succeeded: bool
    revision: int


@dataclass(frozen=True)
class Lease:
    """A granted lease and its time to live, which the store may have rounded up."""

    lease_id: int
    ttl_s: float


@runtime_checkable
class StorePort(Protocol):
    """An etcd-shaped store. Every method raises StoreUnavailable when it gets no answer."""

    async def get(self, key: str) -> KeyValue | None:
        """Returns the key's value, None when it is not there. Linearizable."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Returns everything under the prefix at one revision. Linearizable."""
        ...

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Writes and returns the revision. Raises LeaseLost for an unknown lease."""
        ...

    async def delete(self, key: str) -> bool:
        """Deletes and returns whether it was there."""
        ...

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes everything under the prefix and returns how many keys that were."""
        ...

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Put | Delete],
        otherwise: Sequence[Put | Delete] = (),
    ) -> TxnResult:
        """Does `then` if every comparison holds, else `otherwise`, at one revision.

        Raises LeaseLost when a put names an unknown lease.
        """
        ...

    async def grant(self, ttl_s: float) -> Lease:
        """Returns a new lease."""
        ...

    async def keep_alive(self, lease_id: int) -> float:
        """Renews the lease and returns its new time to live. Raises LeaseLost."""
        ...

    async def revoke(self, lease_id: int) -> None:
        """Ends the lease and deletes its keys; an unknown lease is no error."""
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchBatch]:
        """Yields an empty batch once it stands, then every change from `from_revision` on.

        Raises: Compacted when that history is gone; StoreUnavailable when the connection ends.
        """
        ...

    async def close(self) -> None:
        """Lets go of connections and tasks."""
        ...


@dataclass
class Backoff:
    """Waits between tries: full jitter below a ceiling that doubles, so that many clients which
    lost the store at one moment come back spread over the whole window (UR-56)."""

    rng: random.Random
    first_s: float = 0.5
    max_s: float = 2.0
    num_failures: int = field(default=0, init=False)

    def next_s(self) -> float:
        """Returns the wait after one more failure."""
        ceiling_s = min(self.max_s, self.first_s * 2.0 ** min(self.num_failures, 16))
        self.num_failures += 1
        return self.rng.uniform(0.0, ceiling_s)

    def reset(self) -> None:
        """Starts again at the first window; call it after a success."""
        self.num_failures = 0


@dataclass(frozen=True)
class Snapshot:
    """What is under a prefix now; the consumer reconciles to it and never acts on one change."""

    items: dict[str, KeyValue]
    revision: int
    # False while the store is away: the items are the last ones known.
    healthy: bool
    # True when the store's history went backwards: it came back empty or from an old copy.
    history_lost: bool = False


async def store_identity(store: StorePort, key: str) -> str:
    """Returns the name of this life of the store, which whoever comes first gives it.

    Revisions alone do not tell a store that came back empty: it may already have counted past
    the last one we saw.
    """
    item = await store.get(key)
    if item is None:
        name = secrets.token_hex(8).encode()
        await store.txn([Compare(key, create_revision=0)], [Put(key, name)])
        item = await store.get(key)
    if item is None:
        raise StoreUnavailable("the store does not keep its name")
    return item.value.decode(errors="replace")


async def follow(
    store: StorePort,
    prefix: str,
    *,
    identity_key: str = "",
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random | None = None,
) -> AsyncGenerator[Snapshot, None]:
    """Yields the full state under a prefix, again after each change, for ever.

    Lists, then watches from the list's revision + 1, resumes from the last change seen, lists
    again on compaction or when the store is another one (`identity_key`, see `store_identity`) or
    its history went backwards. While the store is away it yields one
    unhealthy snapshot with the last known items and keeps trying, jittered (UR-54, UR-55).
    """
    items: dict[str, KeyValue] = {}
    next_revision = 0  # 0: list first
    healthy = False
    history_lost = False
    identity = ""
    backoff = Backoff(rng or random.Random())
    while True:
        try:
            if identity_key:
                before, identity = identity, await store_identity(store, identity_key)
                if before not in ("", identity):
                    next_revision, history_lost = 0, True
            if next_revision == 0:
                listing = await store.list(prefix)
                items = {item.key: item for item in listing.items}
                next_revision = listing.revision + 1
                healthy = True
                yield Snapshot(dict(items), listing.revision, True, history_lost)
                history_lost = False
            async with aclosing(_as_generator(store.watch(prefix, next_revision))) as batches:
                async for batch in batches:
                    if not batch.changes and batch.revision < next_revision - 1:
                        # A watch from the future would wait in silence: the store lost history.
                        history_lost = True
                        raise Compacted(batch.revision)
                    backoff.reset()
                    if batch.changes:
                        items = apply_changes(items, batch.changes)
                        next_revision = batch.changes[-1].revision + 1
                    if batch.changes or not healthy:
                        healthy = True
                        yield Snapshot(dict(items), next_revision - 1, True)
        except Compacted:
            next_revision = 0
            if history_lost:
                continue
            await clock.sleep(backoff.next_s() * 0.1)
        except StoreUnavailable:
            if healthy:
                healthy = False
                yield Snapshot(dict(items), max(0, next_revision - 1), False)
            await clock.sleep(backoff.next_s())


def apply_changes(items: dict[str, KeyValue], changes: Sequence[Change]) -> dict[str, KeyValue]:
    """Returns the items after the changes; the argument stays as it is."""
    result = dict(items)
    for change in changes:
        if change.item is None:
            result.pop(change.key, None)
        else:
            result[change.key] = change.item
    return result


async def _as_generator(
    batches: AsyncIterator[WatchBatch],
) -> AsyncGenerator[WatchBatch, None]:
    """Gives any iterator an `aclose`, and passes it on where the iterator has one."""
    try:
        async for batch in batches:
            yield batch
    finally:
        close = getattr(batches, "aclose", None)
        if close is not None:
            await asyncio.shield(close())
