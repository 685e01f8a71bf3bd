"""`pelagos serve store`: FETCH and PUT of one engine machine, with the embedded disk or nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pelagos.kvstore.v1 import store_pb2_grpc

from services.common.clock import Clock
from services.common.service import Runtime, run_service
from services.common.shm_ring import reclaim_orphans
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.config import StoreConfig
from services.kvstore.gc.collector import Collector
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links
from services.kvstore.storage.node import Node
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
    """Returns the embedded node of a configuration, recovered from its directory."""
    backend = await LocalBackend.open(
        LocalBackendConfig(
            dir=config.dir / "segments",
            capacity_bytes=config.capacity_bytes,
            segment_bytes=config.segment_bytes,
            payload_bytes=config.payload_bytes,
        ),
        clock,
    )
    return await Node.open(backend, config.dir / "meta.log", clock)


async def build(runtime: Runtime[StoreConfig]) -> None:
    """Wires the process."""
    config = runtime.config
    opened = await (open_nodes(runtime) if config.backend == "nodes" else open_local(runtime))
    blocks: BlockStore = opened
    fetcher = Fetcher(blocks, config.max_inflight_fetch_bytes, clock=runtime.clock)
    putter = Putter(blocks, config.max_queued_put_bytes, config.max_parallel_puts)
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
        labels={"backend": config.backend},
    )


async def open_local(runtime: Runtime[StoreConfig]) -> EmbeddedBlocks:
    """Returns blocks on this machine's disk, with what looks after them."""
    config = runtime.config
    node = await open_node(config, runtime.clock)
    runtime.on_stop(node.close)
    blocks = EmbeddedBlocks(
        node, config.lines, durable=config.put_ack == "durable", clock=runtime.clock
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
    links = Links(runtime.channels, view.address_of, runtime.clock, max(longest_s, 5.0))
    index = ClusterIndex(view, links, runtime.clock)
    cluster = ClusterConfig(
        payload_bytes=config.payload_bytes,
        hedge_s=config.hedge_ms / 1000,
        read_timeout_s=config.read_timeout_ms / 1000,
        put_timeout_s=config.put_timeout_ms / 1000,
        durable=config.put_ack == "durable",
    )
    blocks = ClusterBlocks(view, links, index, cluster, runtime.clock)

    async def close() -> None:
        await blocks.close()
        await links.close()

    runtime.on_stop(close)
    runtime.spawn(view.run(), "placement map")
    runtime.spawn(index.run(), "follow nodes")
    runtime.census.register("kv.meta", "entries", lambda: len(index))
    export_cluster_metrics(runtime.metrics, blocks, index)
    return blocks


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
    return run_service("store", StoreConfig, build, argv)
