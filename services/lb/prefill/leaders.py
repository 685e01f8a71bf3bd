"""Which request computes a cold prefix that others wait for (P-35).

A leader's blocks are found by others only once they are committed. Until then its followers stand
at the side of the queue; when the leader ends, one of them asks the cache again for all: if it hits
now, all are let go; if not, it is the next leader.
Source: kvcache-and-balancing.md, section 12, "Identical cold prefixes".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class _Group:
    leader: str | None  # None while a probe is away
    followers: list[str] = field(default_factory=list)  # in order of arrival
    give_up_s: float | None = None  # set once the leader is being computed
    probe_s: float | None = None  # ask again at this time
    num_leaders: int = 1


class PrefixLeaders:
    """The table first-missing-blocks -> leader. Keys are work keys unless named request ids."""

    def __init__(self, max_leaders: int = 4) -> None:
        # After so many leaders in vain the rest go by themselves: waiting has not paid.
        self._max_leaders = max_leaders
        self._groups: dict[bytes, _Group] = {}
        self._prefix_of: dict[str, bytes] = {}
        self._probes: dict[str, bytes] = {}  # request id that asks the cache again -> its group
        self._next_due_s = math.inf  # no group is due before; asked after every event

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_followers(self) -> int:
        """Returns how many requests stand at the side."""
        return sum(len(group.followers) for group in self._groups.values())

    def join(self, key: str, request_id: str, prefix: bytes) -> bool:
        """Returns whether the request follows; else it leads, or goes by itself."""
        group = self._groups.get(prefix)
        if group is None:
            self._groups[prefix] = _Group(key)
            self._prefix_of[key] = prefix
            return False
        if group.leader is None and self._probes.get(request_id) == prefix:
            # It asked again and the cache still has nothing: its turn to compute.
            del self._probes[request_id]
            group.leader, group.probe_s, group.give_up_s = key, None, None
            group.num_leaders += 1
            self._prefix_of[key] = prefix
            return False
        group.followers.append(key)
        self._prefix_of[key] = prefix
        return True

    def probe_returned(self, request_id: str, prefix: bytes) -> list[str]:
        """Returns the followers to let go: the one that asked again hits now (other prefix)."""
        old_prefix = self._probes.get(request_id)
        if old_prefix is None or old_prefix == prefix:
            return []
        return self._dissolve(old_prefix)

    def is_leader(self, key: str) -> bool:
        """Returns whether somebody may be waiting for this one."""
        prefix = self._prefix_of.get(key)
        return prefix is not None and self._groups[prefix].leader == key

    def is_follower(self, key: str) -> bool:
        """Returns whether this one stands at the side."""
        return key in self._prefix_of and not self.is_leader(key)

    def leader_started(self, key: str, give_up_s: float) -> None:
        """Notes that the leader is computed from now on, and until when to wait for it."""
        if self.is_leader(key):
            self._groups[self._prefix_of[key]].give_up_s = give_up_s
            self._next_due_s = min(self._next_due_s, give_up_s)

    def leader_waits_again(self, key: str) -> None:
        """Notes that the leader is back in the queue."""
        if self.is_leader(key):
            self._groups[self._prefix_of[key]].give_up_s = None

    def ended(self, key: str, committed: bool, probe_s: float) -> list[str]:
        """Takes a request out; returns the followers to let go (all of them, if `committed`).

        A leader that ended without committed blocks leaves a group that asks again at `probe_s`.
        """
        prefix = self._prefix_of.pop(key, None)
        if prefix is None:
            return []
        group = self._groups[prefix]
        if group.leader != key:
            group.followers.remove(key)
            return []
        if committed:
            return self._dissolve(prefix)
        group.leader, group.probe_s, group.give_up_s = None, probe_s, None
        if group.followers:
            self._next_due_s = min(self._next_due_s, probe_s)
        else:
            self._dissolve(prefix)
        return []

    def due(self, now_s: float, probe_timeout_s: float) -> list[str]:
        """Returns the followers that should ask the cache again now."""
        released: list[str] = []
        if now_s < self._next_due_s:
            return released
        for prefix, group in list(self._groups.items()):
            if group.leader is not None:
                if group.give_up_s is None or now_s < group.give_up_s:
                    continue
                # Alive but late: it goes on by itself, and nobody waits for it any longer.
                self._prefix_of.pop(group.leader, None)
                group.leader, group.give_up_s = None, None
            elif group.probe_s is None or now_s < group.probe_s:
                continue
            if group.num_leaders >= self._max_leaders:
                released += self._dissolve(prefix)
            elif not group.followers:
                self._dissolve(prefix)
            else:
                probe = group.followers.pop(0)
                self._prefix_of.pop(probe, None)
                # A probe that does not come back is replaced by the next follower.
                self._drop_probe(prefix)
                group.probe_s = now_s + probe_timeout_s
                released.append(probe)
        self._next_due_s = min(
            (
                due_s
                for group in self._groups.values()
                for due_s in (group.give_up_s, group.probe_s)
                if due_s is not None
            ),
            default=math.inf,
        )
        return released

    def probe_left(self, key: str, request_id: str, prefix: bytes) -> None:
        """Notes under which request id the follower that asks again will come back."""
        group = self._groups.get(prefix)
        if group is not None and group.leader is None:
            self._probes[request_id] = prefix

    def _drop_probe(self, prefix: bytes) -> None:
        self._probes = {k: v for k, v in self._probes.items() if v != prefix}

    def _dissolve(self, prefix: bytes) -> list[str]:
        self._drop_probe(prefix)
        group = self._groups.pop(prefix)
        for key in [*group.followers, *([group.leader] if group.leader else [])]:
            self._prefix_of.pop(key, None)
        return group.followers
