"""Prometheus metrics named `pelagos_<service>_<noun>_<unit>`, with bounded labels.

    metrics = Metrics("prefill")
    steps = metrics.counter("steps_total", "Forward steps done", ("rank",))
    steps.labels(rank="0").inc()
    wait = metrics.histogram("queue_wait_seconds", "Time a request waited", buckets=FAST_BUCKETS)

Seconds and bytes; counters end in `_total`. A label takes at most 1,000 values, the rest is
counted under "other": request ids and keys never belong in a label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

MAX_LABEL_VALUES: Final = 1000
OTHER: Final = "other"
# From half a millisecond to a minute: waits and calls.
FAST_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


class Labelled:
    """A metric whose label values are counted, so that none can grow without bound."""

    def __init__(self, metric: Any, names: tuple[str, ...]) -> None:
        self._metric = metric
        self._names = names
        self._seen: dict[str, set[str]] = {name: set() for name in names}

    def labels(self, **values: str | int) -> Any:
        """Returns the child for these values; a value past the bound becomes "other"."""
        if values.keys() != set(self._names):
            raise ValueError(f"labels {sorted(values)} given, {sorted(self._names)} declared")
        bounded = {name: self._bound(name, str(values[name])) for name in self._names}
        return self._metric.labels(**bounded)

    def remove(self, **values: str | int) -> None:
        """Forgets the child of something that is gone, such as an instance."""
        bounded = [str(values[name]) for name in self._names]
        for name in self._names:
            self._seen[name].discard(str(values[name]))
        try:
            self._metric.remove(*bounded)
        except KeyError:
            pass

    def _bound(self, name: str, value: str) -> str:
        seen = self._seen[name]
        if value in seen:
            return value
        if len(seen) >= MAX_LABEL_VALUES:
            return OTHER
        seen.add(value)
        return value


class Metrics:
    """The metrics of one service, in a registry of its own."""

    def __init__(self, service: str) -> None:
        self._prefix = f"pelagos_{service.replace('-', '_')}_"
        self.registry = CollectorRegistry()

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Any:
        """Returns a counter (`.inc()`), or a Labelled one when it has labels."""
        if not name.endswith("_total"):
            raise ValueError(f"a counter's name ends in _total: {name}")
        return self._make(Counter, name, text, labels)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Any:
        """Returns a gauge (`.set()`, `.set_function()`), or a Labelled one."""
        return self._make(Gauge, name, text, labels)

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = FAST_BUCKETS,
    ) -> Any:
        """Returns a histogram (`.observe()`), or a Labelled one."""
        return self._make(Histogram, name, text, labels, buckets=tuple(buckets))

    def render(self) -> bytes:
        """Returns everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _make(self, kind: Any, name: str, text: str, labels: Sequence[str], **extra: Any) -> Any:
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a metric name: {name}")
        full_name = self._prefix + name
        metric = kind(full_name, text, tuple(labels), registry=self.registry, **extra)
        return Labelled(metric, tuple(labels)) if labels else metric
