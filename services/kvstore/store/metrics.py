"""Metrics of a STORE process. Source: kvcache-and-balancing.md, section 20."""

from __future__ import annotations

from collections.abc import Callable

from services.common.metrics import Metrics
from services.kvstore.gc.collector import Collector
from services.kvstore.gc.metrics import export_gc_metrics
from services.kvstore.storage.node import Node
from services.kvstore.store.blocks import EmbeddedBlocks
from services.kvstore.store.cluster import ClusterBlocks
from services.kvstore.store.cluster_index import ClusterIndex
from services.kvstore.store.fetch import Fetcher
from services.kvstore.store.put import PutResult, Putter


def _gauge(metrics: Metrics, name: str, text: str, read: Callable[[], float]) -> None:
    """Registers a gauge that reads its part when it is scraped."""
    metrics.gauge(name, text).set_function(read)


def export_flow_metrics(metrics: Metrics, putter: Putter, fetcher: Fetcher) -> None:
    """Registers what FETCH and PUT do."""
    _gauge(metrics, "put_queue_blocks", "Puts that wait or run", lambda: putter.num_queued)
    _gauge(metrics, "put_queue_bytes", "Bytes of those puts", lambda: putter.num_queued_bytes)
    _gauge(metrics, "fetch_inflight_bytes", "Bytes being read", lambda: fetcher.num_inflight_bytes)
    puts = metrics.gauge("put_results", "Puts since the start, by how they ended", ("result",))
    for result in PutResult:
        puts.labels(result=result.value).set_function(lambda result=result: putter.results[result])


def export_local_metrics(
    metrics: Metrics, node: Node, blocks: EmbeddedBlocks, collector: Collector
) -> None:
    """Registers what an embedded disk holds and lets go."""
    table = node.meta.table
    _gauge(metrics, "blocks_stored", "Blocks in the metadata", lambda: len(table))
    _gauge(metrics, "index_bytes", "Memory of the index table", table.memory_bytes)
    _gauge(metrics, "pins_held", "Pins held", lambda: node.meta.num_pins)
    _gauge(metrics, "corrupt_blocks", "Blocks that failed a check", lambda: blocks.num_corrupt)
    _gauge(
        metrics,
        "sealed_blocks_dropped",
        "Blocks that the key at hand does not open",
        lambda: blocks.num_sealed_away,
    )
    export_gc_metrics(metrics, collector)


def export_cluster_metrics(metrics: Metrics, blocks: ClusterBlocks, index: ClusterIndex) -> None:
    """Registers what reads over nodes cost."""
    counts = blocks.counts
    _gauge(metrics, "blocks_stored", "Blocks in the metadata", lambda: len(index))
    _gauge(metrics, "reads", "Blocks read from nodes", lambda: counts.reads)
    _gauge(metrics, "reads_hedged", "Reads that asked for all shards", lambda: counts.hedged)
    _gauge(metrics, "reads_shared", "Reads that joined another one", lambda: counts.shared_reads)
    _gauge(metrics, "reads_failed", "Reads with too few good shards", lambda: counts.failed_reads)
    _gauge(metrics, "bad_shards", "Shards missing or damaged", lambda: counts.bad_shards)
