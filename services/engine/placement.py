"""Where the sibling services of an engine are, out of the membership view."""

from __future__ import annotations

import random

from services.common.membership import ClusterView, Member


def nearest(view: ClusterView, role: str, machine: str, rng: random.Random) -> Member | None:
    """A ready member of a role on our machine, else any one; None when there is none."""
    members = view.members(role)
    local = [member for member in members if member.labels.get("machine") == machine]
    candidates = local or list(members)
    return rng.choice(candidates) if candidates else None


def leader_address(view: ClusterView, service: str) -> str | None:
    """Address of a service's leader; without one, of its only ready member."""
    leader = view.leader(service)
    if leader is not None:
        return leader.address
    members = view.members(service)
    return members[0].address if len(members) == 1 else None
