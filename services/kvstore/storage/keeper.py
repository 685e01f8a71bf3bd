"""Keeps the placement map in the cluster store, and reads it.

One storage node, by election, makes the first map once enough nodes are there and replaces a node
that has been away for `out_after_s`. All others follow; a reader without the store goes on with
the last map it knew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.common.clock import Clock
from services.common.election import Election
from services.common.errors import Failure
from services.common.layout import Keys
from services.common.membership import ClusterView, Member
from services.common.store import Compare, Put, StorePort, StoreUnavailable, follow
from services.kvstore.placement import Profile
from services.kvstore.storage.pgmap import PgMap, build_map, from_values, replace_node, to_values

log = logging.getLogger(__name__)

ROLE = "storage-node"


class MapView:
    """The last whole map, and which nodes are up."""

    def __init__(self, store: StorePort, keys: Keys, view: ClusterView, clock: Clock) -> None:
        self._store = store
        self._prefix = keys.named("ec", "pgmap") + "/"
        self._view = view
        self._clock = clock
        self._changed = asyncio.Event()
        self.pgmap: PgMap | None = None
        self.stored: dict[str, int] = {}  # mod revisions, for the keeper

    def _nodes(self) -> dict[str, Member]:
        """Returns the member of each node that is there. A node that was killed and is back has
        two until the lease of its first life ends; the later start counts."""
        found: dict[str, Member] = {}
        for member in self._view.members(ROLE):
            node = member.labels.get("node", "")
            known = found.get(node)
            if node and (known is None or _started(member) > _started(known)):
                found[node] = member
        return found

    def up(self) -> dict[str, str]:
        """Returns the addresses of the nodes that are there, by node id."""
        return {node: member.address for node, member in self._nodes().items()}

    def lives(self) -> dict[str, str]:
        """Returns which life of each node is there: another one than before has been away, however
        short, also when it answers at the same address."""
        return {node: member.incarnation for node, member in self._nodes().items()}

    def domains(self) -> dict[str, str]:
        """Returns the failure domain of each node that is there."""
        return {
            node: member.labels.get("domain", "") or node for node, member in self._nodes().items()
        }

    def address_of(self, node: str) -> str | None:
        """Returns where a node answers; None while it is away."""
        return self.up().get(node)

    async def wait(self) -> PgMap:
        """Waits for a map."""
        while self.pgmap is None:
            await self._changed.wait()
        return self.pgmap

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Follows the map for ever."""
        async for snapshot in follow(self._store, self._prefix, clock=self._clock):
            values = {key[len(self._prefix) :]: i.value for key, i in snapshot.items.items()}
            self.stored = {key: item.mod_revision for key, item in snapshot.items.items()}
            found = from_values(values)
            if found is not None and (self.pgmap is None or found.epoch > self.pgmap.epoch):
                self.pgmap = found
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
                on_change()


def _started(member: Member) -> float:
    try:
        return float(member.labels.get("started", "0"))
    except ValueError:
        return 0.0


class MapKeeper:
    """Makes and mends the map; acts only while it leads."""

    def __init__(
        self,
        view: MapView,
        election: Election,
        keys: Keys,
        profile: Profile,
        num_groups: int,
        *,
        out_after_s: float,
        clock: Clock,
    ) -> None:
        self._view = view
        self._election = election
        self._keys = keys
        self._profile = profile
        self._num_groups = num_groups
        self._out_after_s = out_after_s
        self._clock = clock
        self._away_since_s: dict[str, float] = {}

    async def run(self, every_s: float) -> None:
        """Looks after the map for ever."""
        while True:
            await self._clock.sleep(every_s)
            if not self._election.is_leader:
                self._away_since_s.clear()
                continue
            wanted = self._wanted()
            if wanted is not None:
                try:
                    await self._write(wanted)
                except (Failure, StoreUnavailable):
                    pass  # another keeper, or no store: look again at what is there

    def _wanted(self) -> PgMap | None:
        """Returns the map that should take the place of the present one; None for no change."""
        present = self._view.pgmap
        domains = self._view.domains()
        if present is None:
            return build_map(domains, self._num_groups, self._profile)
        if not self._view.stored:
            # The store has lost it: who starts anew would wait for one for ever.
            return present
        now_s = self._clock.now_s()
        away = present.nodes - domains.keys()
        self._away_since_s = {node: self._away_since_s.get(node, now_s) for node in away}
        for node, since_s in sorted(self._away_since_s.items(), key=lambda item: item[1]):
            if now_s - since_s >= self._out_after_s:
                mended = replace_node(present, node, domains)
                if mended is not None:
                    log.warning("storage node replaced", extra={"node": node})
                    return mended
        return None

    async def _write(self, pgmap: PgMap) -> None:
        prefix = self._keys.named("ec", "pgmap")
        puts = [Put(f"{prefix}/{name}", value) for name, value in to_values(pgmap).items()]
        compares = [
            Compare(put.key, mod_revision=self._view.stored[put.key])
            if put.key in self._view.stored
            else Compare(put.key, create_revision=0)
            for put in puts
        ]
        await self._election.write(puts, compares)
