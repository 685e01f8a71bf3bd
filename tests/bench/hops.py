"""What each hop of one request took, read off its exported spans. Pure.

Spans of all processes of one machine share one clock, and so does the client: what lies between
two processes is the difference of their times.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tests.bench.load_client import Seen

Span = Mapping[str, Any]

# In the order in which a request passes them: name -> what is measured.
HOPS: Final[dict[str, str]] = {
    "entrypoint: HTTP in": "request sent by the client → the entrypoint's span begins",
    "entrypoint: admission": "key, quota, body read and checked → codec asked",
    "recipe.Encode": "body → token ids, with the way there and back",
    "· in recipe": "the same, inside the service",
    "CHECK.Match": "hash chain matched, with the way there and back",
    "· in CHECK": "the same, inside the service (with the SWA directory on a hit)",
    "SWA directory": "one look-up by CHECK in a shard",
    "prefill-lb: queue": "submitted → assigned to an engine",
    "prefill-lb → engine": "submitted → the engine that pulled has it",
    "prefill: wait for KV": "hit blocks fetched from STORE and loaded (nothing on a miss)",
    "prefill: compute": "queue of the rank and its steps, to the first token",
    "decode-lb.PickRank": "with the way there and back; runs beside the last chunk",
    "· in decode-lb": "the same, inside the service",
    "decode.Reserve": "with the way there and back; runs beside the last chunk",
    "· in decode": "the same, inside the service",
    "hand-off": "KV, state and record pushed and committed: transfer opened → committed",
    "decode: first token": "committed → decode's first own token",
    "parse and SSE": "first token at the entrypoint → its text at the client",
    "time to first token": "request sent → text at the client",
}
_FIRST_TOKEN: Final = re.compile(r"first_token;dur=([0-9.]+)")


def hops_of(spans: Sequence[Span], seen: Seen) -> dict[str, float]:
    """Returns milliseconds by hop of one request; a hop that it did not touch is absent."""
    found: dict[str, float] = {}
    root = _only(spans, "entrypoint chat")
    if root is None:
        return found
    sent_ns = seen.sent_unix_ns
    found["entrypoint: HTTP in"] = (root["start_ns"] - sent_ns) / 1e6

    def between(name: str, start_ns: int | None, end_ns: int | None) -> None:
        if start_ns is not None and end_ns is not None:
            found[name] = (end_ns - start_ns) / 1e6

    encode = _only(spans, "entrypoint.encode")
    between("entrypoint: admission", root["start_ns"], _start(encode))
    between("recipe.Encode", _start(encode), _end(encode))
    check = _only(spans, "entrypoint.check")
    between("CHECK.Match", _start(check), _end(check))
    wait = _only(spans, "prefill_lb.queue_wait")
    between("prefill-lb: queue", _start(wait), _end(wait))
    prefill = _only(spans, "prefill.request")
    between("prefill-lb → engine", _start(wait), _start(prefill))
    deps = _only(spans, "prefill.wait_deps")
    between("prefill: wait for KV", _start(deps), _end(deps))
    hand_off = _only(spans, "prefill.hand_off")
    between("prefill: compute", _end(deps), _start(hand_off))
    for name, rpc, service in (
        ("decode-lb.PickRank", "DecodeLbService/PickRank", "· in decode-lb"),
        ("decode.Reserve", "DecodeService/Reserve", "· in decode"),
        ("", "RecipeService/Encode", "· in recipe"),
        ("", "CheckService/Match", "· in CHECK"),
    ):
        asked = _only(spans, rpc, kind="client")
        answered = _only(spans, rpc, kind="server")
        if name:
            between(name, _start(asked), _end(asked))
        between(service, _start(answered), _end(answered))
    shard = _only(spans, "SwaDirectoryService/Lookup", kind="client")
    between("SWA directory", _start(shard), _end(shard))
    opened = _only(spans, "KvTransferService/Open", kind="client")
    between("hand-off", _start(opened), _end(_only(spans, "decode.commit")))
    decode = _only(spans, "decode.request")
    if decode is not None:
        first_ns = [e["time_ns"] for e in decode["events"] if e["name"] == "first_token"]
        between("decode: first token", decode["start_ns"], first_ns[0] if first_ns else None)
    ttft_ms = 1e3 * (seen.first_s - seen.sent_s)
    stage = _FIRST_TOKEN.search(seen.server_timing)
    if stage is not None:
        at_client_ms = ttft_ms - found["entrypoint: HTTP in"]
        found["parse and SSE"] = at_client_ms - float(stage[1])
    found["time to first token"] = ttft_ms
    return found


def is_complete(spans: Sequence[Span]) -> bool:
    """Returns whether the spans that end last have been exported."""
    names = {span["name"] for span in spans}
    return {"entrypoint chat", "decode.request", "prefill.request"} <= names


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the value below which a share of the values lies; the nearest one, not a mean."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Returns median and 95th percentile."""
    return statistics.median(values), percentile(values, 0.95)


def _only(spans: Sequence[Span], name: str, kind: str = "") -> Span | None:
    """Returns the first span whose name ends so; a retry's later ones are not counted."""
    for span in spans:
        if span["name"].endswith(name) and (not kind or span["kind"] == kind):
            return span
    return None


def _start(span: Span | None) -> int | None:
    return None if span is None else span["start_ns"]


def _end(span: Span | None) -> int | None:
    return None if span is None else span["end_ns"]
