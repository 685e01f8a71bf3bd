"""A cluster of storage nodes in one process, with real servers, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.service import Runtime, RuntimeConfig, running
from services.common.store_memory import MemoryStore
from services.kvstore.client import Block, StoreClient
from services.kvstore.config import StorageNodeConfig, StoreConfig
from services.kvstore.storage import main as node_main
from services.kvstore.store import main as store_main
from services.kvstore.store.cluster import ClusterBlocks
from services.kvstore.store.cluster_index import ClusterIndex
from services.kvstore.tests.kit import LAYOUT, blocks_of, token_ids, until

ROOT = bytes(32)
NUM_GROUPS = 64


def node_config(folder: Path, number: int, **more: Any) -> StorageNodeConfig:
    """Returns a small node."""
    fields: dict[str, Any] = {
        "dir": folder / f"node-{number}",
        "node_id": f"n{number:02d}",
        "capacity_bytes": 4 << 20,
        "segment_bytes": 1 << 20,
        "payload_bytes": 5000,
        "profile": "10+2",
        "num_groups": NUM_GROUPS,
        "keeper_every_s": 0.05,
        "scrub_bytes_per_s": 0,
        "repair_bytes_per_s": 1e9,
        "gc_every_s": 0,
    }
    return StorageNodeConfig(**(fields | more))


@dataclass
class Cluster:
    """Running nodes and one STORE."""

    folder: Path
    members: MemoryStore
    more: dict[str, Any]
    nodes: dict[int, AsyncExitStack] = field(default_factory=dict)
    runtimes: dict[int, Runtime[StorageNodeConfig]] = field(default_factory=dict)
    store: StoreClient | None = None
    store_runtime: Runtime[StoreConfig] | None = None
    blocks: ClusterBlocks | None = None
    index: ClusterIndex | None = None

    async def start(self, number: int) -> None:
        """Starts one node."""
        stack = AsyncExitStack()
        config = node_config(self.folder, number, **self.more)
        self.runtimes[number] = await stack.enter_async_context(
            running("storage-node", config, node_main.build, store=self.members)
        )
        self.nodes[number] = stack

    async def stop(self, number: int) -> None:
        """Stops one node; its data stay on its disk."""
        self.runtimes.pop(number)
        await self.nodes.pop(number).aclose()

    async def put(self, seed: int, num_tokens: int = 512, **more: Any) -> list[Block]:
        """Puts the blocks of a prompt and returns them; all must be stored."""
        blocks = blocks_of(ROOT, token_ids(seed, num_tokens), **more)
        statuses = await asyncio.gather(*(self.store.put(block) for block in blocks))
        assert all(status.is_stored for status in statuses), statuses
        return blocks

    async def read(self, blocks: list[Block]) -> list[bool]:
        """Reads blocks; every one is right or a miss."""
        keys = b"".join(block.key for block in blocks)
        found = [False] * len(blocks)
        async with self.store.fetch(keys, LAYOUT) as parts:
            async for part in parts:
                if part.is_ok:
                    assert part.payload == blocks[part.index].payload, "wrong bytes"
                    found[part.index] = True
        return found

    def node_of(self, key: bytes, shard: int) -> int:
        """Returns the number of the node that holds a shard."""
        pgmap = self.view.pgmap
        return int(pgmap.node_of(key, shard)[1:])

    @property
    def view(self):
        """The STORE's view of the map."""
        return self.blocks._view

    async def settled(self) -> None:
        """Waits until every group has a primary that serves it and STORE knows all of it."""

        def is_settled() -> bool:
            if self.view.pgmap is None or len(self.view.up()) != len(self.nodes):
                return False
            leaders = [leader_of(runtime) for runtime in self.runtimes.values()]
            if not all(each.knows_all for each in leaders) or not self.index.is_level:
                return False
            # A node that joined last is heard out last: its shards may make blocks whole.
            alive = (key for each in leaders for key in each._keys() if each.meta.has(key))
            if any(self.index.find(key) is None for key in alive):
                return False
            return set().union(*(each.led for each in leaders)) == set(range(NUM_GROUPS))

        await until(is_settled)

    async def repaired(self) -> None:
        """Waits until no block waits for repair and all have all shards."""

        every_shard = (1 << self.view.pgmap.profile.num_shards) - 1

        def is_whole() -> bool:
            return all(
                len(leader.repairs) == 0
                and all(
                    fields[4] == every_shard
                    for fields in map(leader.meta.get, leader._keys())
                    if fields is not None
                )
                for leader in map(leader_of, self.runtimes.values())
            )

        await until(is_whole)


def leader_of(runtime: Runtime[Any]):
    """The leader inside a node, reached through the gauge it registered."""
    gauge = runtime.census._gauges[("kv.repair", "queued")]
    return next(cell.cell_contents for cell in gauge.__closure__)


def leader_of_key(c: Cluster, key: bytes):
    """The leader of a key's group."""
    return next(leader for leader in map(leader_of, c.runtimes.values()) if leader.leads(key))


def backend_of(c: Cluster, number: int):
    """A node's disk."""
    return c.runtimes[number]._stop_hooks[0].__self__


async def num_used(c: Cluster) -> int:
    """Slots in use over all nodes."""
    return sum([(await backend_of(c, n).stat()).num_used for n in c.runtimes])


class Pause:
    """Holds a coroutine function up, before or after its work."""

    def __init__(self, owner, name: str, after: bool) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        work = getattr(owner, name)

        async def paused(*args):
            result = await work(*args) if after else None
            self.begun.set()
            await self.go.wait()
            return result if after else await work(*args)

        setattr(owner, name, paused)


@asynccontextmanager
async def cluster(
    folder: Path, num_nodes: int = 12, store: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[Cluster]:
    """Runs nodes and a STORE over them."""
    members = MemoryStore()
    c = Cluster(folder, members, more)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_stop_all, c)
        await asyncio.gather(*(c.start(number) for number in range(num_nodes)))
        opened: dict[str, Any] = {}

        async def build(runtime: Runtime[StoreConfig]) -> None:
            original = store_main.open_nodes

            async def opening(runtime: Runtime[StoreConfig]) -> ClusterBlocks:
                opened["blocks"] = await original(runtime)
                return opened["blocks"]

            store_main.open_nodes = opening
            try:
                await store_main.build(runtime)
            finally:
                store_main.open_nodes = original

        config = StoreConfig(
            **({"backend": "nodes", "payload_bytes": 5000, "read_timeout_ms": 20_000.0,
                "put_timeout_ms": 20_000.0} | (store or {})),
            runtime=RuntimeConfig(),
        )  # fmt: skip
        runtime = await stack.enter_async_context(running("store", config, build, store=members))
        c.blocks, c.index = opened["blocks"], opened["blocks"]._index
        c.store = StoreClient(runtime.channels, runtime.address)
        c.store_runtime = runtime
        stack.push_async_callback(c.store.close)
        await c.settled()
        yield c


async def _stop_all(c: Cluster) -> None:
    for number in list(c.nodes):
        await c.stop(number)


__all__ = [
    *("ROOT", "Cluster", "ClusterView", "Pause", "PutStatus"),
    *("backend_of", "cluster", "leader_of", "leader_of_key", "num_used"),
]
