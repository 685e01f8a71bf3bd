"""Which request computes a cold prefix that others wait for (P-35).

A leader's blocks are found by others only once they are committed, and a decode engine commits
them a moment after the prefill engine has let the request go. Until then its followers stand at
the side of the queue. When the leader ends, one of them asks the cache again for all: if it hits
now, all are let go. If not, it goes back to the side and asks again a little later, where the
leader's engine said that its blocks are on their way; else it is the next leader. A request whose
answer is older than that hit misses what is there by now: it asks again before it leads.
Source: kvcache-and-balancing.md, section 12, "Identical cold prefixes".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Delays between questions about blocks that are on their way, seconds; after the last one the
# promise counts as broken. About what a loaded decode engine takes to persist a long prompt.
_PROMISE_DELAYS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
# A hit that leaves no more than this is all there is to hit. One that leaves more may still grow.
_SETTLED_TOKENS = 512
# So many answers in a row without growth: the rest of the follower's prompt is its own.
_STALLED_ANSWERS = 2
# An answer of the cache reaches this table in less than that, even on a busy machine.
_STALE_S = 5.0


@dataclass
class _Group:
    leader: str | None  # None while a probe is away
    # In order of arrival, with the tokens that each missed when it came.
    followers: dict[str, int] = field(default_factory=dict)
    give_up_s: float | None = None  # set once the leader is being computed
    probe_s: float | None = None  # ask again at this time
    num_leaders: int = 1
    num_asked: int | None = None  # questions about promised blocks so far; None: nothing promised
    num_missing: int | None = None  # tokens that the last answer left to compute
    num_stalled: int = 0  # last answers that left as much as the one before


@dataclass(frozen=True)
class Probe:
    """A follower that asks the cache for its group, and the tokens that it missed when it came."""

    key: str
    prefix: bytes
    num_missing: int


class PrefixLeaders:
    """The table first-missing-blocks -> leader. Keys are work keys unless named request ids."""

    def __init__(self, follow_tokens: int, max_leaders: int = 4) -> None:
        """`follow_tokens`: so far into the missing part equal prefixes are known to be equal."""
        self._follow_tokens = follow_tokens
        # After so many leaders in vain the rest go by themselves: waiting has not paid.
        self._max_leaders = max_leaders
        self._groups: dict[bytes, _Group] = {}
        self._prefix_of: dict[str, bytes] = {}
        # By the request id under which the follower comes back.
        self._probes: dict[str, Probe] = {}
        self._found: dict[bytes, float] = {}  # prefix that somebody hit -> until when to mind it
        self._next_due_s = math.inf  # no group is due before; asked after every event

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_followers(self) -> int:
        """Returns how many requests stand at the side."""
        return sum(len(group.followers) for group in self._groups.values())

    def join(
        self, key: str, request_id: str, prefix: bytes, num_missing: int, now_s: float
    ) -> tuple[bool, list[str]]:
        """Takes a request in. `prefix`: empty where its missing part is not worth waiting for.

        Returns: whether it follows (else it leads, or goes by itself), and the followers to let go.
        """
        probe = self._probes.pop(request_id, None)
        asked: bytes | None = None
        freed: list[str] = []
        if probe is not None:
            asked = probe.prefix
            group = self._groups[asked]
            if group.leader is None and self._asks_again(
                group, asked != prefix, num_missing, probe.num_missing
            ):
                group.followers = {key: probe.num_missing, **group.followers}
                self._prefix_of[key] = asked
                self._ask_at(group, now_s + _PROMISE_DELAYS_S[group.num_asked or 0])
                group.num_asked = (group.num_asked or 0) + 1
                return True, []
            if asked != prefix:
                freed = self._dissolve(asked)  # it hits now, and so will the others
                self._found.pop(asked, None)
                self._found[asked] = now_s + _STALE_S
        if not prefix:
            return False, freed
        self._prefix_of[key] = prefix
        if prefix not in self._groups:
            if self._was_found(prefix, now_s):
                self._groups[prefix] = group = _Group(None, {key: num_missing})
                self._ask_at(group, now_s)
                return True, freed
            self._groups[prefix] = _Group(key)
            return False, freed
        group = self._groups[prefix]
        if group.leader is None and asked == prefix:
            # It asked again and the cache still has nothing: its turn to compute.
            self._found.pop(prefix, None)
            group.leader, group.probe_s, group.give_up_s = key, None, None
            group.num_leaders += 1
            group.num_asked = group.num_missing = None
            group.num_stalled = 0
            return False, freed
        group.followers[key] = num_missing
        return True, freed

    def _was_found(self, prefix: bytes, now_s: float) -> bool:
        """Returns whether somebody hit this prefix a moment ago; forgets those of long ago."""
        while self._found:
            oldest = next(iter(self._found))
            if now_s < self._found[oldest]:
                break
            del self._found[oldest]
        return prefix in self._found

    def _asks_again(self, group: _Group, hits: bool, num_missing: int, num_before: int) -> bool:
        """Returns whether promised blocks are still to come, as far as the answers tell."""
        if group.num_asked is None or group.num_asked >= len(_PROMISE_DELAYS_S):
            return False
        if not hits:
            return True
        has_grown = group.num_missing is None or num_missing < group.num_missing
        group.num_stalled = 0 if has_grown else group.num_stalled + 1
        group.num_missing = num_missing
        if num_missing <= _SETTLED_TOKENS:
            return False
        # The leader computed at least what the key stands for, so less than that is not all.
        is_short = num_before - num_missing < self._follow_tokens
        return is_short or group.num_stalled < _STALLED_ANSWERS

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

    def ended(self, key: str, promised: bool, now_s: float, delay_s: float) -> None:
        """Takes a request out. `promised`: its blocks are on their way to the store.

        A leader leaves a group that asks the cache again after `delay_s`, or sooner and more than
        once where its blocks are promised.
        """
        prefix = self._prefix_of.pop(key, None)
        if prefix is None:
            return
        group = self._groups[prefix]
        if group.leader != key:
            del group.followers[key]
            return
        if not group.followers:
            self._dissolve(prefix)
            return
        group.leader, group.give_up_s = None, None
        group.num_asked = 1 if promised else None
        self._ask_at(group, now_s + (_PROMISE_DELAYS_S[0] if promised else delay_s))

    def _ask_at(self, group: _Group, probe_s: float) -> None:
        group.probe_s = probe_s
        self._next_due_s = min(self._next_due_s, probe_s)

    def due(self, now_s: float, probe_timeout_s: float) -> tuple[list[Probe], list[str]]:
        """Returns the followers that should ask the cache again now: for all, and for themselves.

        The caller says by `probe_left` how those that ask for all will come back.
        """
        probes: list[Probe] = []
        released: list[str] = []
        if now_s < self._next_due_s:
            return probes, released
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
                key = next(iter(group.followers))
                probes.append(Probe(key, prefix, group.followers.pop(key)))
                self._prefix_of.pop(key, None)
                # A probe that does not come back is replaced by the next follower.
                self._drop_probe(prefix)
                group.probe_s = now_s + probe_timeout_s
        self._next_due_s = min(
            (
                due_s
                for group in self._groups.values()
                for due_s in (group.give_up_s, group.probe_s)
                if due_s is not None
            ),
            default=math.inf,
        )
        return probes, released

    def probe_left(self, probe: Probe, request_id: str) -> None:
        """Notes under which request id a follower that asks for all will come back."""
        group = self._groups.get(probe.prefix)
        if group is not None and group.leader is None:
            self._probes[request_id] = probe

    def _drop_probe(self, prefix: bytes) -> None:
        self._probes = {k: v for k, v in self._probes.items() if v.prefix != prefix}

    def _dissolve(self, prefix: bytes) -> list[str]:
        self._drop_probe(prefix)
        group = self._groups.pop(prefix)
        for key in [*group.followers, *([group.leader] if group.leader else [])]:
            self._prefix_of.pop(key, None)
        return list(group.followers)
