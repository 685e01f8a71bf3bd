"""Metrics of a STORE process. Source: kvcache-and-balancing.md, section 20."""

from __future__ import annotations

from services.common.metrics import Metrics
from services.kvstore.gc.collector import Collector
from services.kvstore.storage.node import Node
from services.kvstore.store.blocks import EmbeddedBlocks
from services.kvstore.store.fetch import Fetcher
from services.kvstore.store.put import PutResult, Putter


def export_store_metrics(
    metrics: Metrics,
    node: Node,
    blocks: EmbeddedBlocks,
    putter: Putter,
    fetcher: Fetcher,
    collector: Collector,
) -> None:
    """Registers gauges that read the parts when they are scraped."""

    def gauge(name: str, text: str, read: object) -> None:
        metrics.gauge(name, text).set_function(read)

    gauge("blocks_stored", "Blocks in the metadata", lambda: len(node.meta.table))
    gauge("pins_held", "Pins held", lambda: node.meta.num_pins)
    gauge("put_queue_blocks", "Puts that wait or run", lambda: putter.num_queued)
    gauge("put_queue_bytes", "Bytes of puts that wait or run", lambda: putter.num_queued_bytes)
    gauge("fetch_inflight_bytes", "Bytes being read", lambda: fetcher.num_inflight_bytes)
    gauge("used_share", "Share of slots in use after the last pass", lambda: collector.used_share)
    gauge("evicted_blocks", "Blocks evicted since the start", lambda: collector.num_evicted)
    gauge("corrupt_blocks", "Blocks that failed a check", lambda: blocks.num_corrupt)
    gauge("index_bytes", "Memory of the index table", lambda: node.meta.table.memory_bytes())
    retention = metrics.gauge(
        "effective_retention_seconds",
        "Age since the last access of the youngest block evicted by waterline in the last pass",
    )
    retention.set_function(lambda: (collector.last.retention_epochs or 0) * 600)
    puts = metrics.gauge("put_results", "Puts since the start, by how they ended", ("result",))
    for result in PutResult:
        puts.labels(result=result.value).set_function(lambda result=result: putter.results[result])
