"""Traces: OpenTelemetry spans, W3C context over gRPC and HTTP, bounded export.

    with tracing.span("prefill.queue_wait", {"pelagos.num_tokens": n}):
        ...

A span's parent is the span around it, else the `traceparent` of the current call. Request-level
RPCs get their spans from `rpc_server` and `rpc_client`; token and block streams carry
`traceparent` in a field: pass it as `span(..., traceparent=message.traceparent)`.

Exporters: OTLP over gRPC, JSON lines in a folder (read by `pelagos trace ID`), and memory for
tests. The queue holds 4,096 spans; when a collector is away spans are dropped, never requests.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.call import current_call

REQUEST_ID: Final = "pelagos.request_id"
MAX_QUEUED_SPANS: Final = 4096
MAX_ATTRIBUTE_CHARS: Final = 1024
_EXPORT_DELAY_MS: Final = 500
_MAX_FILE_BYTES: Final = 64 * 1024 * 1024

Attributes = Mapping[str, str | int | float | bool]

_propagator: Final = TraceContextTextMapPropagator()
_KINDS: Final = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}


@dataclass(frozen=True)
class TracingConfig:
    """Where spans go. With no exporter spans are not even created."""

    otlp_endpoint: str = ""  # host:port of a collector, plain gRPC on loopback or in a pod
    folder: str = ""  # one JSON-lines file per process
    otlp_timeout_s: float = 5.0


class _Switch:
    """The tracer in use. `setup` sets it once per process, tests per test."""

    tracer: trace.Tracer = trace.NoOpTracer()
    provider: TracerProvider | None = None


def setup(config: TracingConfig, service: str, instance_id: str) -> None:
    """Starts exporting; called once by `run_service`. Does nothing without an exporter."""
    exporters: list[SpanExporter] = []
    if config.folder:
        folder = Path(config.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        exporters.append(FileSpanExporter(folder / f"{instance_id}.jsonl"))
    if config.otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporters.append(
            OTLPSpanExporter(
                endpoint=config.otlp_endpoint, insecure=True, timeout=config.otlp_timeout_s
            )
        )
    if not exporters:
        return
    provider = _provider(service, instance_id)
    for exporter in exporters:
        provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=_EXPORT_DELAY_MS,
                max_export_batch_size=512,
            )
        )
    _Switch.provider = provider
    _Switch.tracer = provider.get_tracer("pelagos")


def shutdown() -> None:
    """Flushes and stops exporting; part of every drain. Blocks up to the exporter's timeout."""
    provider, _Switch.provider, _Switch.tracer = _Switch.provider, None, trace.NoOpTracer()
    if provider is not None:
        provider.shutdown()


@contextmanager
def in_memory(service: str = "test") -> Iterator[InMemorySpanExporter]:
    """Collects the spans made inside the block; `get_finished_spans()` has them."""
    exporter = InMemorySpanExporter()
    provider = _provider(service, service)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    before = _Switch.provider, _Switch.tracer
    _Switch.provider, _Switch.tracer = provider, provider.get_tracer("pelagos")
    try:
        yield exporter
    finally:
        _Switch.provider, _Switch.tracer = before
        provider.shutdown()


def enabled() -> bool:
    """Returns whether spans go anywhere."""
    return _Switch.provider is not None


@contextmanager
def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    traceparent: str = "",
    kind: str = "internal",
) -> Iterator[trace.Span]:
    """Opens a span around the block; a failure inside marks it, its text stays out.

    Args:
        attributes: facts, never content; strings are cut at 1 KiB.
        traceparent: parent to use instead of the surrounding span.
        kind: "internal", "server" or "client".
    """
    if _Switch.provider is None:
        yield trace.INVALID_SPAN
        return
    opened = start_span(name, attributes, traceparent=traceparent, kind=kind)
    token = otel_context.attach(trace.set_span_in_context(opened))
    try:
        yield opened
    except BaseException as error:
        mark_failed(opened, error)
        raise
    finally:
        otel_context.detach(token)
        opened.end()


def start_span(
    name: str,
    attributes: Attributes | None = None,
    *,
    traceparent: str = "",
    kind: str = "internal",
    start_time_ns: int | None = None,
) -> trace.Span:
    """Returns an open span that the caller ends; for waits that begin and end in two places."""
    if _Switch.provider is None:
        return trace.INVALID_SPAN
    call = current_call()
    parent: otel_context.Context | None = None
    if traceparent:
        parent = _propagator.extract({"traceparent": traceparent})
    elif not trace.get_current_span().get_span_context().is_valid and call.traceparent:
        parent = _propagator.extract({"traceparent": call.traceparent})
    facts: dict[str, str | int | float | bool] = dict(attributes or {})
    if call.request_id:
        facts.setdefault(REQUEST_ID, call.request_id)
    return _Switch.tracer.start_span(
        name, context=parent, kind=_KINDS[kind], attributes=facts, start_time=start_time_ns
    )


def mark_failed(span_: trace.Span, error: BaseException) -> None:
    """Gives a span the error's type or reason; its text could hold what the caller sent (S-09)."""
    span_.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
    span_.set_attribute("error.type", _error_type(error))


def current_traceparent() -> str:
    """Returns the W3C header for an onward call: of the current span, else of the call."""
    if trace.get_current_span().get_span_context().is_valid:
        carrier: MutableMapping[str, str] = {}
        _propagator.inject(carrier)
        return carrier.get("traceparent", "")
    return current_call().traceparent


def traceparent_of(span_: trace.Span) -> str:
    """Returns the W3C header that makes `span_` the parent; "" when tracing is off."""
    if not span_.get_span_context().is_valid:
        return ""
    carrier: MutableMapping[str, str] = {}
    _propagator.inject(carrier, context=trace.set_span_in_context(span_))
    return carrier.get("traceparent", "")


def current_trace_id() -> str:
    """Returns the trace id, 32 hex digits, of the current span or call; "" outside of a trace."""
    parts = current_traceparent().split("-")
    return parts[1] if len(parts) == 4 and len(parts[1]) == 32 else ""


class FileSpanExporter(SpanExporter):  # type: ignore[misc]
    """Appends spans to a JSON-lines file; at 64 MiB it starts anew and keeps one old file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes the spans; a full disk drops them and says so."""
        text = "".join(json.dumps(span_to_document(item)) + "\n" for item in spans)
        try:
            with self._lock:
                self._rotate()
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                    file.write(text)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _rotate(self) -> None:
        try:
            if self._path.stat().st_size >= _MAX_FILE_BYTES:
                self._path.replace(self._path.with_suffix(".old.jsonl"))
        except FileNotFoundError:
            pass


def span_to_document(item: ReadableSpan) -> dict[str, Any]:
    """Returns the span as plain values: ids in hex, times in nanoseconds since the epoch."""
    context = item.get_span_context()
    parent = item.parent
    return {
        "trace_id": f"{context.trace_id:032x}" if context else "",
        "span_id": f"{context.span_id:016x}" if context else "",
        "parent_id": f"{parent.span_id:016x}" if parent else "",
        "name": item.name,
        "kind": item.kind.name.lower(),
        "service": item.resource.attributes.get("service.name", ""),
        "instance_id": item.resource.attributes.get("service.instance.id", ""),
        "start_ns": item.start_time,
        "end_ns": item.end_time,
        "status": item.status.status_code.name.lower(),
        "attributes": dict(item.attributes or {}),
        "events": [
            {"name": e.name, "time_ns": e.timestamp, "attributes": dict(e.attributes or {})}
            for e in item.events
        ],
    }


def _provider(service: str, instance_id: str) -> TracerProvider:
    resource = Resource.create(
        {
            "service.namespace": "pelagos",
            "service.name": service,
            "service.instance.id": instance_id,
        }
    )
    limits = SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARS, max_span_attributes=64)
    return TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)


def _error_type(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(getattr(reason, "value", type(error).__name__))
