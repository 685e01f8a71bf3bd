"""The STORE that an engine talks to: the one of its machine, found in the membership view."""

from __future__ import annotations

import random

from services.common.membership import ClusterView, Member
from services.common.rpc_client import Channels
from services.common.transport import host_id
from services.kvstore.client import StoreClient

STORE_ROLE = "store"


def nearest(view: ClusterView, role: str, machine: str, rng: random.Random) -> Member | None:
    """A ready member of a role on our machine, else any one; None when there is none."""
    members = view.members(role)
    local = [member for member in members if member.labels.get("machine") == machine]
    candidates = local or list(members)
    return rng.choice(candidates) if candidates else None


class NearestStore:
    """Keeps one client per store instance, so that its stream of puts is kept too."""

    def __init__(
        self, view: ClusterView, channels: Channels, machine: str, rng: random.Random
    ) -> None:
        self._view = view
        self._channels = channels
        self._machine = machine
        self._rng = rng
        self._member: Member | None = None
        self._client: StoreClient | None = None
        # Whether the instance of `client` sees the shared memory that we see.
        self.shares_memory = False

    def client(self) -> StoreClient | None:
        """Returns the client; the same one for as long as its instance is ready."""
        ready = self._view.members(STORE_ROLE)
        known = self._member
        if known is not None and any(m.incarnation == known.incarnation for m in ready):
            return self._client
        self._member = nearest(self._view, STORE_ROLE, self._machine, self._rng)
        self._client = None
        self.shares_memory = False
        if self._member is not None:
            self._client = StoreClient(self._channels, self._member.address)
            seen = self._member.labels.get("shm", "")
            self.shares_memory = seen != "" and seen == host_id()
        return self._client
