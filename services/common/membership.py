"""Who is there: registration under a lease, and a local view that outlives the store.

    registration = Registration(store, keys, member)      # from services.common.membership
    task = group.create_task(registration.run())
    registration.update(state=MemberState.READY, capacity={"num_blocks": 4096})

    view = ClusterView(store, keys)
    task = group.create_task(view.run())
    for member in view.members("decode"):                 # ready ones
        ...
    leader = view.leader("decode-lb")                     # address and term, or None

The view is level-triggered: `view.subscribe(callback)` calls back after every change and the
callback reconciles to `view`. While the store is away the last known members stay (P-21).
Source: kvcache-and-balancing.md, section 17; reliability-and-security.md, section 2.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.ids import new_boot_id
from services.common.layout import MAX_VALUE_BYTES, Keys
from services.common.store import (
    Backoff,
    KeyValue,
    LeaseLost,
    Snapshot,
    StorePort,
    StoreUnavailable,
    follow,
)

log = logging.getLogger(__name__)

LEASE_TTL_S: Final = 10.0
STALE_AFTER_S: Final = 30.0
# After the store came back without its history, members have this long to register again
# before they count as gone: one lease, and the longest wait between their tries.
REJOIN_GRACE_S: Final = 15.0


class MemberState(enum.Enum):
    """Where an instance is in its life; only READY ones get new work."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True)
class Member:
    """One instance as its key in the store describes it.

    Args:
        incarnation: new whenever its lease was lost; state that peers keep about it ends with it.
        capacity: numbers a balancer needs ("num_ranks", "num_blocks").
        fingerprint: digests that must be equal to work together ("layout", "model", "weights").
        labels: other addresses and facts ("admin", "http", "machine").
    """

    role: str
    instance_id: str
    address: str
    state: MemberState = MemberState.STARTING
    incarnation: str = field(default_factory=new_boot_id)
    zone: str = ""
    capacity: Mapping[str, float] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Returns the JSON value of its key. Raises ValueError above 8 KiB."""
        document = {
            "address": self.address,
            "state": self.state.value,
            "incarnation": self.incarnation,
            "zone": self.zone,
            "capacity": dict(self.capacity),
            "fingerprint": dict(self.fingerprint),
            "labels": dict(self.labels),
        }
        value = json.dumps(document, sort_keys=True).encode()
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"a member's value takes {len(value)} bytes, {MAX_VALUE_BYTES} fit")
        return value


def parse_member(role: str, instance_id: str, value: bytes) -> Member | None:
    """Returns the member, None for a value that cannot be read: another build may have written
    it, and one bad value must not take down a reader."""
    if len(value) > MAX_VALUE_BYTES:
        return None
    try:
        document: dict[str, Any] = json.loads(value)
        states = {state.value: state for state in MemberState}
        return Member(
            role=role,
            instance_id=instance_id,
            address=str(document["address"]),
            # A state of a newer build is one we must not send work to.
            state=states.get(document.get("state", ""), MemberState.STARTING),
            incarnation=str(document.get("incarnation", "")),
            zone=str(document.get("zone", "")),
            capacity={str(k): float(v) for k, v in document.get("capacity", {}).items()},
            fingerprint={str(k): str(v) for k, v in document.get("fingerprint", {}).items()},
            labels={str(k): str(v) for k, v in document.get("labels", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True)
class Leader:
    """Who leads a service. `term` rises with each new leader; receivers refuse lower ones."""

    service: str
    instance_id: str
    address: str
    term: int


class Registration:
    """Keeps one member's key in the store, for as long as `run` runs.

    It reconciles: whatever `update` asked for is written when the store can be reached. A lease
    that was lost is replaced under a new incarnation (UR-54).
    """

    def __init__(
        self,
        store: StorePort,
        keys: Keys,
        member: Member,
        *,
        ttl_s: float = LEASE_TTL_S,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._key = keys.member(member.role, member.instance_id)
        self._wanted = member
        self._written: bytes | None = None
        self._ttl_s = ttl_s
        self._clock = clock
        self._rng = rng or random.Random()
        self._lease_id = 0
        self._lease_end_s = 0.0
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()

    @property
    def member(self) -> Member:
        """Returns the member as it should be in the store."""
        return self._wanted

    @property
    def is_registered(self) -> bool:
        """Returns whether the store holds this member as it should be, as far as we know."""
        return bool(self._lease_id) and self._written == self._wanted.to_bytes()

    async def wait_registered(self) -> None:
        """Waits until the store holds this member as it should be; bound it."""
        while not self.is_registered:
            await self._settled.wait()

    def update(
        self,
        *,
        state: MemberState | None = None,
        capacity: Mapping[str, float] | None = None,
        fingerprint: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Asks for new values; they are written as soon as the store answers."""
        member = self._wanted
        self._wanted = replace(
            member,
            state=state or member.state,
            capacity=member.capacity if capacity is None else dict(capacity),
            fingerprint=member.fingerprint if fingerprint is None else dict(fingerprint),
            labels=member.labels if labels is None else {**member.labels, **labels},
        )
        self._wanted.to_bytes()  # too large is the caller's mistake, so tell the caller
        self._settled.clear()
        self._changed.set()

    async def run(self) -> None:
        """Registers and keeps registering until cancelled; then the key is left to `close`."""
        backoff = Backoff(self._rng, first_s=0.25, max_s=2.0)
        renew_at_s = 0.0
        while True:
            try:
                self._changed.clear()
                if not self._lease_id:
                    await self._take_lease()
                    renew_at_s = self._renewal_time_s()
                await self._write()
                backoff.reset()
                await self._wait(renew_at_s)
                if self._clock.now_s() >= renew_at_s:
                    await self._renew()
                    renew_at_s = self._renewal_time_s()
            except LeaseLost:
                log.warning("lease lost, registering again", extra=self._facts())
                self._lose_lease()
            except StoreUnavailable:
                # The same lease first: it may well be alive, only the way to it is not.
                await self._clock.sleep(backoff.next_s())
                renew_at_s = 0.0

    async def close(self) -> None:
        """Removes the key at once, if the store answers; else the lease does it in its time."""
        self._settled.clear()
        lease_id, self._lease_id, self._written = self._lease_id, 0, None
        if lease_id:
            with suppress(StoreUnavailable, LeaseLost, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._store.revoke(lease_id)

    async def _take_lease(self) -> None:
        asked_s = self._clock.now_s()
        lease = await self._store.grant(self._ttl_s)
        self._lease_id = lease.lease_id
        self._lease_end_s = asked_s + lease.ttl_s
        self._written = None

    async def _write(self) -> None:
        value = self._wanted.to_bytes()
        if value == self._written:
            return
        await self._store.put(self._key, value, self._lease_id)
        self._written = value
        if value == self._wanted.to_bytes():
            self._settled.set()

    async def _renew(self) -> None:
        asked_s = self._clock.now_s()
        ttl_s = await self._store.keep_alive(self._lease_id)
        # Counted from before the question: the store started counting after it.
        self._lease_end_s = asked_s + ttl_s

    def _renewal_time_s(self) -> float:
        """Returns when half of the time left has passed, a little earlier at random."""
        now_s = self._clock.now_s()
        left_s = max(0.0, self._lease_end_s - now_s)
        return now_s + left_s * self._rng.uniform(0.4, 0.5)

    async def _wait(self, until_s: float) -> None:
        """Waits for the renewal time or for an update."""
        left_s = until_s - self._clock.now_s()
        if left_s <= 0 or self._wanted.to_bytes() != self._written:
            return
        sleep = asyncio.ensure_future(self._clock.sleep(left_s))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({sleep, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            changed.cancel()

    def _lose_lease(self) -> None:
        self._settled.clear()
        self._lease_id = 0
        self._written = None
        self._wanted = replace(self._wanted, incarnation=new_boot_id())

    def _facts(self) -> dict[str, str]:
        return {"role": self._wanted.role, "incarnation": self._wanted.incarnation}


class ClusterView:
    """The last known members and leaders, kept current by `run`.

    Reading it costs no I/O and works while the store is away; `is_stale` then turns true after
    30 s, for those who must stop making changes.
    """

    def __init__(
        self,
        store: StorePort,
        keys: Keys,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._rng = rng or random.Random()
        self._members: dict[str, dict[str, Member]] = {}
        self._leaders: dict[str, Leader] = {}
        # Members missing since the store lost its history, by key: when they count as gone.
        self._missing_until_s: dict[tuple[str, str], float] = {}
        self._healthy = {"members": False, "leaders": False}
        self._healthy_at_s = clock.now_s()
        self.num_history_losses = 0  # how often the store came back without its history
        self._callbacks: list[Callable[[], None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._synced = asyncio.Event()

    def members(
        self, role: str, states: tuple[MemberState, ...] = (MemberState.READY,)
    ) -> tuple[Member, ...]:
        """Returns the members of a role in these states, ordered by instance id."""
        found = self._members.get(role, {})
        return tuple(found[key] for key in sorted(found) if found[key].state in states)

    def member(self, role: str, instance_id: str) -> Member | None:
        """Returns one member in any state, None when it is not known."""
        return self._members.get(role, {}).get(instance_id)

    def leader(self, service: str) -> Leader | None:
        """Returns the last known leader of a service."""
        return self._leaders.get(service)

    def pick(self, role: str, rng: random.Random) -> Member:
        """Returns a ready member at random. Raises Failure(NO_INSTANCE)."""
        ready = self.members(role)
        if not ready:
            raise Failure(
                Reason.NO_INSTANCE, f"no ready {role} is known", {"role": role}, retry_after_s=1.0
            )
        return rng.choice(ready)

    @property
    def roles(self) -> tuple[str, ...]:
        """Returns the roles that have members."""
        return tuple(sorted(role for role, found in self._members.items() if found))

    @property
    def age_s(self) -> float:
        """Returns the seconds since the watches were last known to be healthy."""
        return 0.0 if self.is_healthy else self._clock.now_s() - self._healthy_at_s

    @property
    def is_healthy(self) -> bool:
        """Returns whether both watches stand."""
        return all(self._healthy.values())

    @property
    def is_stale(self) -> bool:
        """Returns whether the view is older than 30 s: go on serving, change nothing."""
        return self.age_s > STALE_AFTER_S

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after each change; returns how to stop that. Callbacks must not block."""
        self._callbacks.append(callback)

        def stop() -> None:
            with suppress(ValueError):
                self._callbacks.remove(callback)

        return stop

    async def wait_synced(self) -> None:
        """Waits until members and leaders have been listed once."""
        await self._synced.wait()

    async def wait_for(self, condition: Callable[[ClusterView], bool]) -> None:
        """Waits until the condition holds; bound it with asyncio.timeout."""
        while not condition(self):
            await self._changed.wait()

    async def run(self) -> None:
        """Follows the store until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._follow("members", self._keys.members, self._take_members))
            group.create_task(self._follow("leaders", self._keys.leaders, self._take_leaders))

    async def _follow(self, name: str, prefix: str, take: Callable[[Snapshot], None]) -> None:
        snapshots = follow(
            self._store,
            prefix,
            identity_key=self._keys.identity,
            clock=self._clock,
            rng=self._rng,
        )
        async with aclosing(snapshots):
            async for snapshot in snapshots:
                was_healthy, self._healthy[name] = self._healthy[name], snapshot.healthy
                if snapshot.healthy:
                    take(snapshot)
                    if self.is_healthy:
                        self._synced.set()
                elif was_healthy:
                    self._healthy_at_s = self._clock.now_s()
                    log.warning("store away, keeping the last view", extra={"watch": name})
                self._notify()

    def _take_members(self, snapshot: Snapshot) -> None:
        members: dict[str, dict[str, Member]] = {}
        for key, item in snapshot.items.items():
            role, _, instance_id = key.removeprefix(self._keys.members).partition("/")
            member = parse_member(role, instance_id, item.value)
            if member is None:
                log.warning("unreadable member left out", extra={"store_key": key})
                continue
            members.setdefault(role, {})[instance_id] = member
        self._keep_missing(members, snapshot.history_lost)
        self._members = members

    def _keep_missing(self, members: dict[str, dict[str, Member]], history_lost: bool) -> None:
        """Keeps members whose absence proves nothing: the store lost them, nobody deleted them."""
        now_s = self._clock.now_s()
        if history_lost:
            self.num_history_losses += 1
            for role, found in self._members.items():
                for instance_id in found:
                    self._missing_until_s[(role, instance_id)] = now_s + REJOIN_GRACE_S
            assert self._group is not None, "only run() takes snapshots"
            self._group.create_task(self._end_grace())
        for (role, instance_id), until_s in list(self._missing_until_s.items()):
            old = self._members.get(role, {}).get(instance_id)
            if instance_id in members.get(role, {}) or until_s <= now_s or old is None:
                del self._missing_until_s[(role, instance_id)]
            else:
                members.setdefault(role, {})[instance_id] = old

    async def _end_grace(self) -> None:
        await self._clock.sleep(REJOIN_GRACE_S)
        for (role, instance_id), until_s in list(self._missing_until_s.items()):
            if until_s <= self._clock.now_s():
                del self._missing_until_s[(role, instance_id)]
                self._members.get(role, {}).pop(instance_id, None)
        self._notify()

    def _take_leaders(self, snapshot: Snapshot) -> None:
        leaders = (
            parse_leader(key.removeprefix(self._keys.leaders), item)
            for key, item in snapshot.items.items()
        )
        self._leaders = {leader.service: leader for leader in leaders if leader is not None}

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for callback in tuple(self._callbacks):
            try:
                callback()
            except Exception:
                # One consumer's bug must not stop the view of all others.
                log.exception("a view callback failed")


def parse_leader(service: str, item: KeyValue) -> Leader | None:
    """Returns the leader a key names, None for a value that cannot be read."""
    try:
        document = json.loads(item.value)
        return Leader(
            service, str(document["instance_id"]), str(document["address"]), item.create_revision
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
