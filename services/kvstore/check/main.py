"""`pelagos serve check`: matching for the entrypoints of one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from pelagos.kvstore.v1 import check_pb2_grpc

from services.common.service import Runtime, run_service
from services.kvstore.check.match import Matcher, PromptMatch
from services.kvstore.check.replica import Replica
from services.kvstore.check.server import CheckServicer, StoreLink
from services.kvstore.check.sharded import ShardedIndex
from services.kvstore.client import SwaDirectoryClient
from services.kvstore.cluster_key import cluster_key_of
from services.kvstore.config import CheckConfig
from services.kvstore.hash_chain import SessionChains
from services.kvstore.hit_policy import EndedBy
from services.kvstore.memory import keep_freed
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links
from services.kvstore.swa.directory import Location, SwaKey

_SIZE_CLASSES = ((16 << 10, "<16K"), (64 << 10, "16K-64K"), (256 << 10, "64K-256K"))
_LARGEST = ">=256K"
_SIZES = (*(name for _, name in _SIZE_CLASSES), _LARGEST)
# How long a start waits for the first copy of the index: without it first requests only miss.
_FIRST_COPY_S = 5.0


async def build(runtime: Runtime[CheckConfig]) -> None:
    """Wires the process."""
    config = runtime.config
    sharded = open_sharded(runtime) if config.index == "sharded" else None
    # What primaries say needs no copy; the rest of CHECK asks either the same questions.
    replica = sharded if sharded is not None else Replica()
    sessions = SessionChains(config.max_sessions, config.max_session_bytes)
    matcher = Matcher(
        cluster_key_of(config.cluster_key_file),
        replica,
        sessions,
        sharded.find if sharded is not None else None,
    )

    def store_address() -> str | None:
        if config.store:
            return config.store
        stores = sorted(runtime.view.members("store"), key=lambda m: m.instance_id)
        near = [m for m in stores if m.labels.get("machine") == runtime.machine]
        return (near or stores)[0].address if stores else None

    link = StoreLink(
        runtime.channels,
        store_address,
        replica,
        max_queued=config.max_queued_touches,
        clock=runtime.clock,
    )
    directory = SwaDirectoryClient(runtime.channels, lambda: runtime.view.members("entrypoint"))

    async def find_swa(keys: Sequence[SwaKey]) -> Sequence[Location | None]:
        return await directory.lookup(keys, config.swa_timeout_ms / 1000)

    latency = runtime.metrics.histogram(
        "match_seconds", "Time of one match", ("size",), buckets=_MATCH_BUCKETS
    )
    hit_tokens = runtime.metrics.counter("hit_tokens_total", "Tokens of hits")
    input_tokens = runtime.metrics.counter("input_tokens_total", "Tokens asked about")
    ended = runtime.metrics.counter("hits_ended_total", "Matches by why they ended", ("why",))
    # Looked up once: finding a series by its labels costs more than counting.
    latency_of = {size: latency.labels(size=size) for size in _SIZES}
    ended_by = {why: ended.labels(why=why.value) for why in EndedBy}

    def on_match(match: PromptMatch, num_tokens: int, spent_s: float) -> None:
        latency_of[_size_class(num_tokens)].observe(spent_s)
        hit_tokens.inc(match.hit.hit_tokens)
        input_tokens.inc(num_tokens)
        ended_by[match.hit.ended_by].inc()

    servicer = CheckServicer(
        matcher,
        replica,
        link,
        find_swa,
        lagging_after_ms=config.lagging_after_ms,
        on_match=on_match,
        clock=runtime.clock,
    )
    runtime.server.add(check_pb2_grpc.add_CheckServiceServicer_to_server, servicer)
    if sharded is None:
        runtime.spawn(link.follow(), "follow commits")
    runtime.spawn(link.send_notes(), "send notes")
    runtime.metrics.gauge("index_blocks", "Blocks in the index").set_function(lambda: len(replica))
    runtime.metrics.gauge("index_bytes", "Memory of the index").set_function(
        lambda: replica.memory_bytes
    )
    runtime.metrics.gauge("index_lag_seconds", "Age of the index").set_function(
        lambda: replica.lag_ms(runtime.clock.now_s()) / 1000
    )
    runtime.census.register("kv.check", "queued", lambda: link.num_queued)
    runtime.census.register("kv.check", "entries", lambda: len(sessions))
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_COPY_S):
            if not config.store:
                await runtime.view.wait_synced()
            if store_address() is not None and sharded is None:
                await link.level.wait()


def open_sharded(runtime: Runtime[CheckConfig]) -> ShardedIndex:
    """Returns an index that asks the storage nodes' primaries."""
    config = runtime.config
    view = MapView(runtime.store, runtime.keys, runtime.view, runtime.clock)
    links = Links(runtime.channels, view.address_of, runtime.clock)
    runtime.on_stop(links.close)
    runtime.spawn(view.run(), "placement map")
    index = ShardedIndex(
        view,
        links,
        timeout_s=config.lookup_timeout_ms / 1000,
        budget_s=config.lookup_budget_ms / 1000,
        clock=runtime.clock,
    )
    runtime.metrics.gauge("lookup_round_trips", "Rounds of look-ups").set_function(
        lambda: index.num_round_trips
    )
    runtime.metrics.gauge("lookups_unanswered", "Look-ups a primary did not answer").set_function(
        lambda: index.num_unanswered
    )
    return index


_MATCH_BUCKETS = (*(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005), *(0.01, 0.025, 0.05, 0.25))


def _size_class(num_tokens: int) -> str:
    return next((name for limit, name in _SIZE_CLASSES if num_tokens < limit), _LARGEST)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the process until it is told to stop."""
    keep_freed()
    return run_service("check", CheckConfig, build, argv)
