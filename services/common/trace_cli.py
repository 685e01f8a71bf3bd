"""`pelagos trace [ID]`: one request's timeline over all processes, out of their span files.

ID is a request id, or a trace id or its beginning; without one the newest traces are listed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.common.tracing import REQUEST_ID

DEFAULT_FOLDER: Final = Path(".local/stack")
_TRACES: Final = "traces"
_MAX_LISTED: Final = 20
_BAR: Final = 40
_USAGE: Final = "usage: pelagos trace [ID] [--folder DIR] [--json]"

Span = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A span in its place: how deep, when it began, how long it took."""

    depth: int
    span: Span
    offset_ms: float
    duration_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a timeline. 0: found; 1: no such trace; 2: bad arguments."""
    args = list(argv or ())
    folder = DEFAULT_FOLDER
    as_json = False
    wanted: list[str] = []
    while args:
        arg = args.pop(0)
        if arg in ("-h", "--help"):
            print(_USAGE)
            return 0
        if arg == "--json":
            as_json = True
        elif arg == "--folder" and args:
            folder = Path(args.pop(0))
        elif arg.startswith("--folder="):
            folder = Path(arg.partition("=")[2])
        elif arg.startswith("-") or wanted:
            print(_USAGE, file=sys.stderr)
            return 2
        else:
            wanted.append(arg)
    if (folder / _TRACES).is_dir():
        folder /= _TRACES  # the folder of a stack, as its other commands take it
    spans = list(read_spans(folder))
    if not wanted:
        print("\n".join(newest(spans)) or f"no spans in {folder}")
        return 0
    found = select(spans, wanted[0])
    if not found:
        print(f"pelagos trace: nothing for {wanted[0]} in {folder}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if as_json else render(found))
    return 0


def read_spans(folder: Path) -> Iterator[Span]:
    """Yields every span in the folder; a line that is still being written is left out."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    span = json.loads(text)
                except ValueError:
                    continue
                if isinstance(span, dict) and {"trace_id", "span_id", "start_ns"} <= span.keys():
                    yield span


def select(spans: Iterable[Span], wanted: str) -> list[Span]:
    """Returns all spans of the traces that `wanted` names, oldest first."""
    every = list(spans)
    traces = {
        span["trace_id"]
        for span in every
        if span.get("attributes", {}).get(REQUEST_ID) == wanted
        or (len(wanted) >= 6 and span["trace_id"].startswith(wanted.lower()))
    }
    return sorted(
        (span for span in every if span["trace_id"] in traces), key=lambda span: span["start_ns"]
    )


def newest(spans: Iterable[Span]) -> list[str]:
    """Returns a line for each of the newest traces: id, request, length, spans, first name."""
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span["trace_id"], []).append(span)
    lines = []
    for trace_id, members in sorted(
        traces.items(), key=lambda item: -min(span["start_ns"] for span in item[1])
    )[:_MAX_LISTED]:
        first = min(members, key=lambda span: span["start_ns"])
        end_ns = max(span["end_ns"] or span["start_ns"] for span in members)
        request_id = next((s["attributes"].get(REQUEST_ID) for s in members if s["attributes"]), "")
        took_ms = (end_ns - first["start_ns"]) / 1e6
        lines.append(
            f"{trace_id[:16]}  {request_id or '-':<28}  {took_ms:9.1f} ms  "
            f"{len(members):4} spans  {first['service']} {first['name']}"
        )
    return lines


def timeline(spans: Sequence[Span]) -> list[Line]:
    """Returns the spans as a tree, each under its parent, siblings by their start."""
    known = {span["span_id"] for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda item: item["start_ns"]):
        # A parent that was not exported (a process was killed) leaves its children as roots.
        parent = span.get("parent_id", "")
        children.setdefault(parent if parent in known else "", []).append(span)
    start_ns = min(span["start_ns"] for span in spans)
    lines: list[Line] = []
    stack = [(0, span) for span in reversed(children.get("", []))]
    seen: set[str] = set()
    while stack:
        depth, span = stack.pop()
        if span["span_id"] in seen:
            continue  # a file that names a span twice, or a circle of parents, ends here
        seen.add(span["span_id"])
        end_ns = span["end_ns"] or span["start_ns"]
        lines.append(
            Line(
                depth,
                span,
                (span["start_ns"] - start_ns) / 1e6,
                (end_ns - span["start_ns"]) / 1e6,
            )
        )
        stack += [(depth + 1, child) for child in reversed(children.get(span["span_id"], []))]
    return lines


def render(spans: Sequence[Span]) -> str:
    """Returns the timeline for a terminal: offset, length, a bar, service, name and facts."""
    lines = timeline(spans)
    total_ms = max(line.offset_ms + line.duration_ms for line in lines) or 1.0
    request_ids = {span["attributes"].get(REQUEST_ID) for span in spans} - {None}
    services = {span["service"] for span in spans}
    head = (
        f"trace {spans[0]['trace_id']}  request {', '.join(sorted(request_ids)) or '-'}  "
        f"{total_ms:.1f} ms, {len(spans)} spans, {len(services)} services"
    )
    rows = [head, ""]
    for line in lines:
        first = min(_BAR - 1, int(line.offset_ms / total_ms * _BAR))
        length = max(1, round(line.duration_ms / total_ms * _BAR))
        bar = (" " * first + "#" * length)[:_BAR].ljust(_BAR)
        mark = "!" if line.span.get("status") == "error" else " "
        rows.append(
            f"{line.offset_ms:9.2f} {line.duration_ms:9.2f} ms |{bar}|{mark} "
            f"{'  ' * line.depth}{line.span['service']}: {line.span['name']}{_facts(line.span)}"
        )
    return "\n".join(rows)


def _facts(span: Span) -> str:
    facts = {k: v for k, v in span.get("attributes", {}).items() if k != REQUEST_ID}
    return "  " + " ".join(f"{k}={v}" for k, v in sorted(facts.items())) if facts else ""
