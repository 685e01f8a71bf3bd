"""`pelagos serve store`: FETCH and PUT of one engine machine, with the embedded disk or nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pelagos.kvstore.v1 import store_pb2_grpc

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.common.service import Runtime, run_service
from services.common.shm_ring import reclaim_orphans
from services.common.transport import host_id
from services.kvstore.backends.base import StorageAway
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.backends.shared import open_shared
from services.kvstore.cluster_key import cluster_key_of
from services.kvstore.config import SHARED_BACKENDS, StoreConfig
from services.kvstore.folders import using
from services.kvstore.gc.collector import Collector
from services.kvstore.memory import keep_freed
from services.kvstore.seal import Sealer
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links
from services.kvstore.storage.node import Node
from services.kvstore.storage.shared_node import SharedNode
from services.kvstore.store.blocks import BlockStore, EmbeddedBlocks
from services.kvstore.store.cluster import ClusterBlocks, ClusterConfig
from services.kvstore.store.cluster_index import ClusterIndex
from services.kvstore.store.fetch import Fetcher
from services.kvstore.store.metrics import (
    export_cluster_metrics,
    export_flow_metrics,
    export_local_metrics,
)
from services.kvstore.store.put import Putter
from services.kvstore.store.rings import RingCache
from services.kvstore.store.server import StoreServicer

_SWEEP_RINGS_S = 1.0
_SCRUB_EVERY_S = 7 * 24 * 3600


async def open_node(config: StoreConfig, clock: Clock) -> Node:
    """Returns the embedded node of a configuration, recovered from its directory.

    Raises: ConfigError for a directory that cannot be used, is in use, or was made for others.
    """
    with using(config.dir):
        backend = await LocalBackend.open(
            LocalBackendConfig(
                dir=config.dir / "segments",
                capacity_bytes=config.capacity_bytes,
                segment_bytes=config.segment_bytes,
                payload_bytes=config.payload_bytes,
            ),
            clock,
        )
        try:
            return await Node.open(backend, config.dir / "meta.log", clock)
        except BaseException:
            await backend.close()
            raise


async def build(runtime: Runtime[StoreConfig]) -> None:
    """Wires the process."""
    config = runtime.config
    blocks: BlockStore = await open_blocks(runtime)
    fetcher = Fetcher(blocks, config.max_inflight_fetch_bytes, clock=runtime.clock)
    # Where a write is an object of many blocks, as many must be under way.
    num_parallel = config.max_parallel_puts
    if config.backend == "s3":
        num_parallel = max(num_parallel, config.shared.batch_blocks)
    putter = Putter(blocks, config.max_queued_put_bytes, num_parallel)
    rings = RingCache()
    servicer = StoreServicer(blocks, fetcher, putter, rings)
    runtime.server.add(
        store_pb2_grpc.add_StoreServiceServicer_to_server,
        servicer,
        while_draining=("Put", "Fetch", "CancelFetch", "FollowCommits"),
    )

    async def end_streams() -> None:
        servicer.end_streams()

    async def close_rings() -> None:
        rings.close()

    runtime.on_drain(end_streams)
    runtime.on_stop(close_rings)
    runtime.count_in_flight(lambda: fetcher.num_running + putter.num_queued)
    runtime.spawn(sweep_rings(rings, runtime.clock), "sweep rings")
    runtime.census.register("kv.put", "queued", lambda: putter.num_queued)
    runtime.census.register("kv.put", "bytes", lambda: putter.num_queued_bytes)
    runtime.census.register("kv.fetch", "transfers", lambda: fetcher.num_running)
    runtime.census.register("kv.fetch", "bytes", lambda: fetcher.num_inflight_bytes)
    export_flow_metrics(runtime.metrics, putter, fetcher)
    runtime.announce(
        capacity={"kv_bytes": float(config.capacity_bytes)},
        labels={"backend": config.backend, "shm": host_id()},
    )


async def open_blocks(runtime: Runtime[StoreConfig]) -> BlockStore:
    """Returns the blocks that the configuration names, with what looks after them."""
    backend = runtime.config.backend
    if backend == "nodes":
        return await open_nodes(runtime)
    if backend in SHARED_BACKENDS:
        return await open_shared_blocks(runtime)
    node = await open_node(runtime.config, runtime.clock)
    return look_after(runtime, node, "local")


async def open_shared_blocks(runtime: Runtime[StoreConfig]) -> EmbeddedBlocks:
    """Returns blocks on a storage that other STOREs use too."""
    config = runtime.config
    with using(config.dir):
        opened = await open_shared(config, runtime.clock)

    async def unlock() -> None:
        opened.close()

    runtime.on_stop(unlock)
    try:
        node = await SharedNode.open_shared(opened.backend, config.dir / "meta.log", runtime.clock)
    except StorageAway as error:
        await opened.backend.close()
        raise Failure(Reason.BACKEND_LOST, f"the storage went away: {error}") from None
    runtime.spawn(node.follow_others(config.shared.poll_every_s), "follow others")
    return look_after(runtime, node, config.backend)


def look_after(runtime: Runtime[StoreConfig], node: Node, name: str) -> EmbeddedBlocks:
    """Returns the blocks of a node that is this process's own, with their GC and scrubbing."""
    config = runtime.config
    runtime.on_stop(node.close)
    blocks = EmbeddedBlocks(
        node,
        config.lines,
        durable=config.put_ack == "durable",
        name=name,
        sealer=open_sealer(config),
        clock=runtime.clock,
    )
    collector = Collector(
        node,
        config.lines,
        max_deletes_per_s=config.gc_max_deletes_per_s,
        clock=runtime.clock,
    )
    runtime.spawn(collector.run(config.gc_every_s, config.gc_orphans_every_s), "gc")
    runtime.spawn(make_room(blocks, collector), "make room")
    if config.scrub_bytes_per_s > 0:
        runtime.spawn(scrub(node, config.scrub_bytes_per_s, runtime.clock), "scrub")
    runtime.census.register("kv.meta", "entries", lambda: len(node.meta.table))
    runtime.census.register("kv.meta", "leases", lambda: node.meta.num_pins)
    export_local_metrics(runtime.metrics, node, blocks, collector)
    return blocks


async def open_nodes(runtime: Runtime[StoreConfig]) -> ClusterBlocks:
    """Returns blocks over the cluster's storage nodes."""
    config = runtime.config
    view = MapView(runtime.store, runtime.keys, runtime.view, runtime.clock)
    # A message that takes longer than the read or put it serves is a node that does not answer.
    longest_s = max(config.read_timeout_ms, config.put_timeout_ms) / 1000
    links = Links(
        runtime.channels,
        view.address_of,
        runtime.clock,
        max(longest_s, 5.0),
        largest_bytes=config.payload_bytes,  # where a shard is a copy
    )
    index = ClusterIndex(view, links, runtime.clock)
    cluster = ClusterConfig(
        payload_bytes=config.payload_bytes,
        hedge_s=config.hedge_ms / 1000,
        read_timeout_s=config.read_timeout_ms / 1000,
        put_timeout_s=config.put_timeout_ms / 1000,
        durable=config.put_ack == "durable",
    )
    blocks = ClusterBlocks(view, links, index, cluster, runtime.clock, open_sealer(config))

    async def close() -> None:
        await blocks.close()
        await links.close()

    runtime.on_stop(close)
    runtime.spawn(view.run(), "placement map")
    runtime.spawn(index.run(), "follow nodes")
    runtime.census.register("kv.meta", "entries", lambda: len(index))
    export_cluster_metrics(runtime.metrics, blocks, index)
    return blocks


def open_sealer(config: StoreConfig) -> Sealer | None:
    """Returns what encrypts blocks; None when they are stored as they come.

    Raises: ConfigError for a key file that cannot be used; Failure(INVALID_REQUEST) without the
        package.
    """
    if config.encryption == "off":
        return None
    try:
        return Sealer(cluster_key_of(config.cluster_key_file))
    except ImportError as error:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"encryption needs the package {error.name}: install the extra pelagos[encryption]",
        ) from None


async def make_room(blocks: EmbeddedBlocks, collector: Collector) -> None:
    """Collects at once when a put met the high waterline, instead of at the next turn."""
    while True:
        await blocks.wants_room.wait()
        blocks.wants_room.clear()
        await collector.collect()


async def sweep_rings(rings: RingCache, clock: Clock) -> None:
    """Lets go of the rings of dead engines, and removes what they left in shared memory."""
    while True:
        await clock.sleep(_SWEEP_RINGS_S)
        if rings.sweep():
            await asyncio.to_thread(reclaim_orphans)


async def scrub(node: Node, bytes_per_s: float, clock: Clock) -> None:
    """Reads everything every seven days; a damaged block is forgotten before anybody asks."""
    while True:
        await clock.sleep(_SCRUB_EVERY_S)
        report = await node.backend.scrub(bytes_per_s)
        for ref, _ in report.bad:
            await node.drop(ref.key16, ref.put_id)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the process until it is told to stop."""
    keep_freed()
    return run_service("store", StoreConfig, build, argv)
