"""Window states of this machine: kept after prefill and decode, announced, fetched from others.

Source: engine.md, sections 1.8 and 2.6; kvcache-and-balancing.md, section 10.
"""

from __future__ import annotations

import logging

from pelagos.engine.v1 import records_pb2

from services.common.membership import ClusterView
from services.common.rpc_client import Channels
from services.engine.tasks import TaskSet
from services.kvstore.client import Location, SwaDirectoryClient, SwaKey, SwaPool, fetch_state

log = logging.getLogger(__name__)

KEY16_BYTES = 16
# The directory is hosted by the entrypoints.
DIRECTORY_ROLE = "entrypoint"


class Windows:
    """The pool of this machine as its engine uses it."""

    def __init__(
        self,
        pool: SwaPool,
        layout_digest: bytes,
        view: ClusterView,
        channels: Channels,
        tasks: TaskSet,
    ) -> None:
        self.pool = pool
        self._layout_digest = layout_digest
        self._channels = channels
        self._tasks = tasks
        self._directory = SwaDirectoryClient(channels, lambda: view.members(DIRECTORY_ROLE))

    def _key(self, block_key: bytes) -> SwaKey:
        return SwaKey(block_key[:KEY16_BYTES], self._layout_digest)

    def keep(self, block_key: bytes, position: int, window: bytes, approximate: bool) -> None:
        """Puts a state into the pool; it is announced once the bytes are there."""
        key = self._key(block_key)
        location, evicted = self.pool.add(key, position, window, approximate)
        if location is not None:
            self._tasks.start(self._directory.publish(key, location), "swa publish")
        for gone in evicted:
            self._tasks.start(self._directory.withdraw(gone, self.pool.host), "swa withdraw")

    async def fetch(self, block_key: bytes, message: records_pb2.SwaLocation) -> bytes | None:
        """The bytes of a state that the directory knows of; None is a miss."""
        key = self._key(block_key)
        if message.host_instance_id == self.pool.host:
            held = self.pool.get(key)
            return held[1] if held is not None else None
        location = Location(
            position=message.position,
            host=message.host_instance_id,
            address=message.address,
            slot=message.slot,
            num_bytes=message.length_bytes,
            digest=message.digest,
            approximate=message.approximate,
            host_epoch=message.host_epoch,
        )
        data = await fetch_state(self._channels, key, location)
        if data is None:
            self._tasks.start(self._directory.withdraw(key, location.host), "swa withdraw")
        return data
