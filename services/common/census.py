"""The resource census: who holds how many of what, so that leaks have a name.

    census = Census()
    census.register("decode.scheduler", "blocks", lambda: pool.num_used)
    census.snapshot()     # {"decode.scheduler": {"blocks": 12}, "process": {"tasks": 9, ...}}

The admin listener serves it at /census; tests compare it before and after (P-06, P-15).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Final

Gauge = Callable[[], int]

# What is counted, one word each, so that owners can be summed.
KINDS: Final = frozenset(
    {"blocks", "slots", "leases", "tasks", "descriptors", "queued", "streams", "requests"}
    | {"channels", "threads", "transfers", "bytes", "entries"}
)


class Census:
    """A registry of gauges by owner and kind."""

    def __init__(self) -> None:
        self._gauges: dict[tuple[str, str], Gauge] = {}

    def register(self, owner: str, kind: str, gauge: Gauge) -> Callable[[], None]:
        """Adds a gauge and returns how to remove it.

        Raises: ValueError for a kind that is not in KINDS, or a second gauge of one name.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not a kind the census knows: {sorted(KINDS)}")
        if (owner, kind) in self._gauges:
            raise ValueError(f"{owner} registers {kind} twice")
        self._gauges[(owner, kind)] = gauge
        return lambda: self._gauges.pop((owner, kind), None) and None

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Returns every gauge now, and the process's own; a gauge that fails reads -1."""
        counts: dict[str, dict[str, int]] = {"process": process_counts()}
        for (owner, kind), gauge in sorted(self._gauges.items()):
            try:
                value = int(gauge())
            except Exception:
                value = -1  # one owner's bug must not hide all others
            counts.setdefault(owner, {})[kind] = value
        return counts


def process_counts() -> dict[str, int]:
    """Returns tasks, threads, descriptors and resident bytes of this process."""
    counts = {"threads": threading.active_count()}
    try:
        counts["tasks"] = len(asyncio.all_tasks())
    except RuntimeError:
        counts["tasks"] = 0
    try:
        counts["descriptors"] = len(os.listdir("/proc/self/fd"))
        with open("/proc/self/statm", encoding="ascii") as statm:
            counts["bytes"] = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass  # not Linux: the other counts still stand
    return counts


def differences(
    before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]
) -> dict[str, tuple[int, int]]:
    """Returns "owner.kind" -> (before, after) for what is not the same; the process's own left
    out, for its bytes and threads move by themselves."""
    found: dict[str, tuple[int, int]] = {}
    for owner in sorted((before.keys() | after.keys()) - {"process"}):
        old, new = before.get(owner, {}), after.get(owner, {})
        for kind in sorted(old.keys() | new.keys()):
            if old.get(kind, 0) != new.get(kind, 0):
                found[f"{owner}.{kind}"] = (old.get(kind, 0), new.get(kind, 0))
    return found
