"""Metrics of garbage collection, the same wherever a collector runs.

The effective retention is what operators look for: how long a block that nobody uses stays before
room is made of it. Source: kvcache-and-balancing.md, sections 9 and 20.
"""

from __future__ import annotations

import math

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.metrics import Metrics
from services.kvstore.gc.collector import Collector


def export_gc_metrics(metrics: Metrics, collector: Collector, clock: Clock = SYSTEM_CLOCK) -> None:
    """Registers what a collector does and how it is."""
    gauge = metrics.gauge
    gauge("used_share", "Share of slots in use").set_function(lambda: collector.used_share)
    gauge("evicted_blocks", "Blocks evicted").set_function(lambda: collector.num_evicted)
    evictions = gauge("evictions", "Blocks evicted since the start, by why", ("why",))
    evictions.labels(why="expired").set_function(lambda: collector.totals.expired)
    evictions.labels(why="waterline").set_function(lambda: collector.totals.by_waterline)
    gauge("orphans_freed", "Shards freed that no record named").set_function(
        lambda: collector.totals.orphans
    )
    gauge(
        "effective_retention_seconds",
        "Age since the last access of the youngest block that room was made of; NaN before that",
    ).set_function(lambda: math.nan if collector.retention_s is None else collector.retention_s)

    gauge(
        "holds_for_clock", "1 while nothing expires because the wall clock has jumped"
    ).set_function(lambda: float(collector.holds_for_clock))

    def age_s() -> float:
        since_s = collector.last_success_s
        return math.nan if since_s is None else clock.now_s() - since_s

    gauge("collection_age_seconds", "Age of the last pass that ended well").set_function(age_s)
