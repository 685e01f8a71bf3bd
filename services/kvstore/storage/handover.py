"""Commits that were answered when somebody else already led their group: the new primary is told.

Source: kvcache-and-balancing.md, section 8.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Final

from pelagos.kvstore.v1 import storage_pb2 as pb

from services.common.clock import Clock
from services.common.errors import Failure
from services.common.rpc_client import call
from services.kvstore.formats import Record
from services.kvstore.index_table import Fields
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links
from services.kvstore.storage.meta import Meta
from services.kvstore.storage.pgmap import PgMap

# How long a commit may have been answered after another node began to lead its group.
_LATE_S: Final = 30.0
_MAX_RECENT: Final = 16_384
_HANDED_AT_ONCE: Final = 64
_RETRY_S: Final = 0.2
_TELL_TIMEOUT_S: Final = 2.0


class HandOver:
    """The latest commits of one node, and those that it owes to new primaries."""

    def __init__(self, node: str, meta: Meta, view: MapView, links: Links, clock: Clock) -> None:
        self._node = node
        self._meta = meta
        self._view = view
        self._links = links
        self._clock = clock
        self._recent: deque[tuple[float, bytes]] = deque(maxlen=_MAX_RECENT)  # commits, when
        self._waiting: dict[bytes, tuple[float, Fields]] = {}  # until when, what
        self._wanted = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Returns how many commits their new primaries have not taken yet."""
        return len(self._waiting)

    def note_commit(self, key16: bytes) -> None:
        """Takes note of a commit that was just made."""
        self._recent.append((self._clock.now_s(), key16))

    def give_up(self, groups: Collection[int], pgmap: PgMap) -> None:
        """Takes note of late commits in groups that are given up.

        Who leads them now may have learned of it earlier than we did, and have listed the members'
        shards before these were written.
        """
        now_s = self._clock.now_s()
        for at_s, key16 in self._recent:
            fields = self._meta.get(key16)
            is_late = at_s > now_s - _LATE_S and pgmap.group_of(key16) in groups
            if is_late and fields is not None:
                self._waiting[key16] = now_s + _LATE_S, fields
        if self._waiting:
            self._wanted.set()

    async def run(self) -> None:
        """Tells new primaries what was committed here late, for ever."""
        while True:
            await self._wanted.wait()
            waiting = list(self._waiting.items())
            for at in range(0, len(waiting), _HANDED_AT_ONCE):
                part = waiting[at : at + _HANDED_AT_ONCE]
                done = await asyncio.gather(*(self._tell_new_primary(*item) for item in part))
                for (key16, _), is_done in zip(part, done, strict=True):
                    if is_done:
                        self._waiting.pop(key16, None)
            if self._waiting:
                await self._clock.sleep(_RETRY_S)
            else:
                self._wanted.clear()

    async def _tell_new_primary(self, key16: bytes, what: tuple[float, Fields]) -> bool:
        """Returns whether there is nothing left to do; not while it still takes the group over."""
        until_s, fields = what
        pgmap = self._view.pgmap
        if pgmap is None or self._clock.now_s() > until_s:
            return True
        group = pgmap.group_of(key16)
        primary = pgmap.primary_of(group, self._view.up())
        link = self._links.get(primary) if primary not in (None, self._node) else None
        if link is None:
            return primary == self._node  # we lead it again, and ask the members
        record = Record(*fields).pack(group)
        request = pb.CommitRequest(
            pg=group, epoch=pgmap.epoch, object=pb.ObjectRecord(key16=key16, record=record)
        )
        try:
            await call(link.meta.Commit, request, timeout_s=_TELL_TIMEOUT_S)
        except Failure:
            return False
        return True
