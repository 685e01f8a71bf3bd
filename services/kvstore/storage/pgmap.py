"""The placement map: which nodes hold each placement group, under which epoch.

A group's members are in order; a shard's place in that order follows from its key (`placement`).
The primary of a group is its first member that is up: metadata can be rebuilt from shard headers,
and a reader trusts only shards of one put with a right digest, so two primaries for a moment cost
hits, never bytes (docs/adr). Pure; the keeper in `storage/keeper.py` stores it.
Source: kvcache-and-balancing.md, sections 4 and 8.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.kvstore.placement import Profile, member_of_shard, placement_group

GROUPS_PER_KEY: Final = 64


@dataclass(frozen=True)
class PgMap:
    """Every group's members, by node id."""

    epoch: int
    profile: Profile
    groups: tuple[tuple[str, ...], ...]

    @property
    def num_groups(self) -> int:
        """Returns how many groups there are; fixed for the life of a cluster."""
        return len(self.groups)

    @property
    def nodes(self) -> frozenset[str]:
        """Returns all nodes that hold something."""
        return frozenset(node for group in self.groups for node in group)

    def group_of(self, key: bytes) -> int:
        """Returns the group of a key."""
        return placement_group(key, len(self.groups))

    def node_of(self, key: bytes, shard: int) -> str:
        """Returns the node that holds a shard of a key."""
        return self.groups[self.group_of(key)][member_of_shard(key, shard, self.profile)]

    def members_of(self, key: bytes) -> frozenset[str]:
        """Returns all nodes that hold shards of a key."""
        return frozenset(self.groups[self.group_of(key)])

    def primary_of(self, group: int, up: Collection[str]) -> str | None:
        """Returns the first member that is up; None when none is."""
        return next((node for node in self.groups[group] if node in up), None)

    def led_by(self, node: str, up: Collection[str]) -> frozenset[int]:
        """Returns the groups whose primary is this node."""
        return frozenset(
            group for group in range(len(self.groups)) if self.primary_of(group, up) == node
        )


def _score(group: int, node: str) -> bytes:
    return hashlib.sha256(f"{group} {node}".encode()).digest()


def build_map(domains: Mapping[str, str], num_groups: int, profile: Profile) -> PgMap | None:
    """Returns a first map over nodes and their failure domains; None while there are too few.

    Each group takes the nodes of highest rendezvous score, one per domain while there are enough
    domains; the order within a group is turned so that every node leads as many groups as others.
    """
    size = profile.num_shards
    if len(domains) < size:
        return None
    groups: list[tuple[str, ...]] = []
    led: Counter[str] = Counter()
    for group in range(num_groups):
        ranked = sorted(domains, key=lambda node: _score(group, node), reverse=True)
        chosen: list[str] = []
        used: set[str] = set()
        for node in ranked:
            if len(chosen) < size and domains[node] not in used:
                chosen.append(node)
                used.add(domains[node])
        chosen += [node for node in ranked if node not in chosen][: size - len(chosen)]
        first = min(range(size), key=lambda at: (led[chosen[at]], at))
        groups.append((*chosen[first:], *chosen[:first]))
        led[chosen[first]] += 1
    return PgMap(1, profile, tuple(groups))


def replace_node(old: PgMap, out: str, domains: Mapping[str, str]) -> PgMap | None:
    """Returns the map with a node that is lost replaced in each of its groups, under the next
    epoch; None when no group can be helped. The place in the order stays, so shards keep theirs.

    A group of which more nodes are away than it can do without keeps them: nobody could rebuild
    what they hold, and when one returns everything is there again.

    Args:
        domains: failure domains of the nodes that are there.
    """
    groups = []
    changed = False
    load: Counter[str] = Counter(node for group in old.groups for node in group)
    for number, group in enumerate(old.groups):
        num_away = sum(node not in domains for node in group)
        if out not in group or num_away > old.profile.m:
            groups.append(group)
            continue
        used = {domains.get(node, node) for node in group if node != out}
        spares = [node for node in domains if node not in group and node != out]
        fresh = [node for node in spares if domains[node] not in used] or spares
        if not fresh:
            groups.append(group)
            continue
        spare = min(fresh, key=lambda node: (load[node], _score(number, node)))
        load[spare] += 1
        groups.append(tuple(spare if node == out else node for node in group))
        changed = True
    return replace(old, epoch=old.epoch + 1, groups=tuple(groups)) if changed else None


def to_values(pgmap: PgMap) -> dict[str, bytes]:
    """Returns the map as it lies in the cluster store: 64 groups a key, each below 8 KiB."""
    nodes = sorted(pgmap.nodes)
    number = {node: at for at, node in enumerate(nodes)}
    values = {}
    for first in range(0, pgmap.num_groups, GROUPS_PER_KEY):
        part = pgmap.groups[first : first + GROUPS_PER_KEY]
        document = {
            "epoch": pgmap.epoch,
            "profile": str(pgmap.profile),
            "num_groups": pgmap.num_groups,
            "nodes": nodes,
            "groups": [[number[node] for node in group] for group in part],
        }
        values[f"{first:05d}"] = json.dumps(document, separators=(",", ":")).encode()
    return values


def from_values(values: Mapping[str, bytes]) -> PgMap | None:
    """Returns the map of the stored parts; None while parts are missing, damaged, or of different
    epochs (a reader keeps the last whole one)."""
    try:
        parts = [json.loads(values[name]) for name in sorted(values)]
        if not parts or len({(part["epoch"], part["num_groups"]) for part in parts}) != 1:
            return None
        groups = [
            tuple(part["nodes"][at] for at in group) for part in parts for group in part["groups"]
        ]
        head = parts[0]
        profile = Profile.parse(head["profile"])
        sizes: Sequence[int] = [len(group) for group in groups]
        if len(groups) != head["num_groups"] or set(sizes) != {profile.num_shards}:
            return None
        return PgMap(int(head["epoch"]), profile, tuple(groups))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
