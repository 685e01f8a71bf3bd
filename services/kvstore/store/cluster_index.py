"""What the storage nodes have, as STORE and CHECK know it: one copy of each node's log.

A node that vanishes keeps its copy until the nodes that take its groups over have had time to say
what they found; a promise from it that no longer holds is a miss at the fetch, never wrong bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from pelagos.kvstore.v1 import storage_pb2 as pb

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure
from services.common.rpc_client import stream_call
from services.kvstore.check.replica import Replica
from services.kvstore.formats import LOG_ENTRY_BYTES
from services.kvstore.index_table import Fields, IndexTable
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links, NodeLink
from services.kvstore.storage.meta import Meta

_RECONNECT_S: Final = 0.2
_SILENCE_S: Final = 5.0
# A dead node's lease, and a take-over of its groups.
_FORGET_AFTER_S: Final = 60.0


class ClusterIndex:
    """One table over all nodes, with a log of its own that CHECK follows as it follows any store's.

    `run` keeps it level.
    """

    def __init__(self, view: MapView, links: Links, clock: Clock = SYSTEM_CLOCK) -> None:
        self._view = view
        self._links = links
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._gone_since_s: dict[str, float] = {}
        self.merged = Meta(None, clock.wall_s)
        self.level = asyncio.Event()

    def __len__(self) -> int:
        return len(self.merged.table)

    @property
    def is_level(self) -> bool:
        """Returns whether every node that is up has told all it has."""
        up = self._view.up()
        return bool(up) and all(
            node in self._replicas and self._replicas[node].is_level for node in up
        )

    def find(self, key16: bytes) -> Fields | None:
        """Returns the record of a block that can be read now."""
        return self.merged.get(key16)

    def keys(self) -> list[bytes]:
        """Returns the index keys of all blocks that can be read now."""
        return [key16 for key16 in _keys_of(self.merged.table) if self.merged.has(key16)]

    def note(self, key16: bytes, fields: Fields) -> None:
        """Makes a commit of this process visible before the log brings it.

        The answer may also come after the log has told more of this put, its end even.
        """
        told = (replica.get(key16) for replica in self._replicas.values())
        if all(known is None or known[0] != fields[0] for known in told):
            self.merged.put_fields(key16, fields)

    def _take(self, node: str, entries: bytes) -> None:
        """Merges what a node's log has said, after its replica took it."""
        self._drop(node, self.merged.merge(entries))

    def _drop(self, node: str, keys16: Sequence[bytes]) -> None:
        """Forgets keys that a node no longer has, unless another one has them."""
        going = []
        for key16 in keys16:
            others = (r.get(key16) for name, r in self._replicas.items() if name != node)
            kept = next((fields for fields in others if fields is not None), None)
            if kept is None:
                going.append(key16)
            else:
                self.merged.put_fields(key16, kept)
        self.merged.remove(going)

    def _swap(self, node: str, old: IndexTable, new: IndexTable) -> None:
        """Forgets what a node had before its snapshot and has no more."""
        if old is not new:
            self._drop(node, [key16 for key16 in _keys_of(old) if new.get(key16) is None])

    async def run(self) -> None:
        """Follows every node that is up, for ever."""
        try:
            while True:
                up = self._view.up()
                now_s = self._clock.now_s()
                for node in up:
                    self._gone_since_s.pop(node, None)
                    follower = self._followers.get(node)
                    if follower is None or follower.done():
                        self._replicas.setdefault(node, Replica())
                        self._followers[node] = asyncio.create_task(
                            self._follow(node), name="follow node"
                        )
                for node in [name for name in self._replicas if name not in up]:
                    since_s = self._gone_since_s.setdefault(node, now_s)
                    if now_s - since_s > _FORGET_AFTER_S:
                        del self._gone_since_s[node]
                        # It may still talk, cut off from the cluster store only: a log that goes on
                        # from where it stood would not tell once more what is forgotten here.
                        self._followers.pop(node).cancel()
                        self._drop(node, _keys_of(self._replicas.pop(node).table))
                if self.is_level:
                    self.level.set()
                await self._clock.sleep(_RECONNECT_S)
        finally:
            for follower in self._followers.values():
                follower.cancel()
            await asyncio.gather(*self._followers.values(), return_exceptions=True)

    async def _follow(self, node: str) -> None:
        link = self._links.get(node)
        replica = self._replicas.get(node)
        if link is None or replica is None:
            return
        try:
            await self._follow_once(node, link, replica)
        except (Failure, TimeoutError):
            pass
        finally:
            replica.disconnected()

    async def _follow_once(self, node: str, link: NodeLink, replica: Replica) -> None:
        request = pb.FollowLogRequest(pg=-1, from_seq=replica.next_seq, log_id=replica.log_id)
        async with stream_call(link.meta.FollowLog, request) as stream:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    part = await stream.read()
                if part is None:
                    return
                before = replica.table
                now_s = self._clock.now_s()
                if not replica.take(
                    part.log_id, part.entries, part.next_seq, part.reset, part.level, now_s
                ):
                    return
                self._take(node, part.entries)
                self._swap(node, before, replica.table)
                if not self.level.is_set() and self.is_level:
                    self.level.set()


def _keys_of(table: IndexTable) -> list[bytes]:
    keys: list[bytes] = []
    cursor: int | None = 0
    while cursor is not None:
        entries, cursor = table.snapshot(cursor, 8192, 0)
        keys += [entries[at + 12 : at + 28] for at in range(0, len(entries), LOG_ENTRY_BYTES)]
    return keys
