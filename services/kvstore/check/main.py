"""`pelagos serve check`: matching for the entrypoints of one machine."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pelagos.kvstore.v1 import check_pb2_grpc

from services.common.config import ConfigError
from services.common.service import Runtime, run_service
from services.kvstore.check.match import Matcher, PromptMatch
from services.kvstore.check.replica import Replica
from services.kvstore.check.server import CheckServicer, StoreLink
from services.kvstore.client import SwaDirectoryClient
from services.kvstore.config import CheckConfig
from services.kvstore.hash_chain import CLUSTER_KEY_BYTES, SessionChains
from services.kvstore.swa.directory import Location, SwaKey

_SIZE_CLASSES = ((16 << 10, "<16K"), (64 << 10, "16K-64K"), (256 << 10, "64K-256K"))
# How long a start waits for the first copy of the index: without it first requests only miss.
_FIRST_COPY_S = 5.0


def cluster_key_of(path: str) -> bytes:
    """Returns the cluster's secret from its file, made now if it does not exist.

    Raises: ConfigError for a file of another size, or that others may read.
    """
    if not path:
        return secrets.token_bytes(CLUSTER_KEY_BYTES)
    file = Path(path)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first: two processes that start together agree on one key.
        new = file.with_name(f".{file.name}.{os.getpid()}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(CLUSTER_KEY_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):
            os.link(new, file)
        new.unlink()
    if file.stat().st_mode & 0o077:
        raise ConfigError("cluster_key_file may be read by others; its mode must be 0600")
    key = file.read_bytes()
    if len(key) != CLUSTER_KEY_BYTES:
        raise ConfigError(f"cluster_key_file must hold {CLUSTER_KEY_BYTES} bytes")
    return key


async def build(runtime: Runtime[CheckConfig]) -> None:
    """Wires the process."""
    config = runtime.config
    replica = Replica()
    sessions = SessionChains(config.max_sessions, config.max_session_bytes)
    matcher = Matcher(cluster_key_of(config.cluster_key_file), replica, sessions)

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

    def on_match(match: PromptMatch, num_tokens: int, spent_s: float) -> None:
        latency.labels(size=_size_class(num_tokens)).observe(spent_s)
        hit_tokens.inc(match.hit.hit_tokens)
        input_tokens.inc(num_tokens)
        ended.labels(why=match.hit.ended_by.value).inc()

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
            if store_address() is not None:
                await link.level.wait()


_MATCH_BUCKETS = (*(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005), *(0.01, 0.025, 0.05, 0.25))


def _size_class(num_tokens: int) -> str:
    return next((name for limit, name in _SIZE_CLASSES if num_tokens < limit), ">=256K")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the process until it is told to stop."""
    return run_service("check", CheckConfig, build, argv)
