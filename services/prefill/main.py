"""Wires a prefill engine and serves it: `pelagos serve prefill`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pelagos.engine.v1 import engine_control_pb2_grpc
from pelagos.kvstore.v1 import swa_pb2_grpc
from pelagos.prefill.v1 import prefill_pb2_grpc

from services.common.service import Runtime, run_service
from services.decode.client import DecodeClient
from services.engine.control import EngineControlServicer
from services.engine.grammars import Grammars
from services.engine.persister import Persister
from services.engine.sim.tokens import Scripts
from services.engine.store_ring import StoreRing, watch_rings
from services.engine.stores import NearestStore
from services.engine.tasks import TaskSet
from services.engine.windows import Windows
from services.kvstore.client import SwaPool, SwaPoolServicer
from services.lb.decode.client import DecodeLbClient
from services.lb.decode.client import leader_of as decode_leader_of
from services.lb.prefill.client import PrefillLbClient
from services.lb.prefill.client import leader_of as prefill_leader_of
from services.prefill.config import PrefillConfig
from services.prefill.control import PrefillControl
from services.prefill.engine import PrefillEngine
from services.prefill.handoff import Handoff
from services.prefill.peers import GrpcPeers
from services.prefill.puller import Puller
from services.prefill.server import PrefillServicer
from services.prefill.work import Work
from services.so_compiler.client import SoCompilerClient

log = logging.getLogger(__name__)

_HEALTH_POLL_S = 1.0


async def build(runtime: Runtime[PrefillConfig]) -> None:
    """Makes the parts and puts them into the runtime; nothing is served yet."""
    await build_engine(runtime)


async def build_engine(
    runtime: Runtime[PrefillConfig], scripts: Scripts | None = None
) -> PrefillEngine:
    """As `build`; returns the engine, and takes scripts, for tests."""
    config, clock = runtime.config, runtime.clock
    layout = config.model.layout()
    layout_digest = bytes.fromhex(layout.signature)
    library = config.model.grammar_library()
    library.preload()
    store = NearestStore(runtime.view, runtime.channels, runtime.machine, runtime.rng)
    put_ring = StoreRing("prefill-put", layout.block_bytes, config.store_ring_blocks)
    fetch_ring = StoreRing("prefill-fetch", layout.block_bytes, config.store_ring_blocks)
    tasks = TaskSet()
    windows = Windows(
        SwaPool(runtime.instance_id, runtime.advertised, config.swa_pool_bytes),
        layout_digest,
        runtime.view,
        runtime.channels,
        tasks,
    )
    grammars = Grammars(
        library,
        SoCompilerClient(runtime.channels),
        runtime.view,
        runtime.rng,
    )
    engine = PrefillEngine(
        config,
        [
            config.model.make_runner(
                config.num_blocks, for_prefill=True, scripts=scripts, clock=clock
            )
            for _ in range(config.num_ranks)
        ],
        runtime.instance_id,
        peers=GrpcPeers(
            runtime.view,
            runtime.channels,
            store,
            windows,
            grammars,
            layout_digest,
            layout.block_bytes,
            fetch_ring,
            runtime.rng,
        ),
        handoff=Handoff(
            DecodeClient(runtime.channels),
            DecodeLbClient(runtime.channels, decode_leader_of(runtime.view)),
            instance_id=runtime.instance_id,
            boot_id=runtime.boot_id,
            attempts=config.handoff_attempts,
            pick_wait_s=config.pick_wait_ms / 1e3,
        ),
        persister=Persister(
            store.client,
            layout=layout_digest,
            writer_id=runtime.instance_id,
            block_bytes=layout.block_bytes,
            max_queue_bytes=config.persist_queue_bytes,
            by_decode=False,
            ring=lambda: put_ring if store.shares_memory else None,
        ),
        keep_window=windows.keep,
        tasks=tasks,
        clock=clock,
    )
    pullers = [
        Puller(
            engine,
            PrefillLbClient(runtime.channels, prefill_leader_of(runtime.view, shard)),
            boot_id=runtime.boot_id,
            address=runtime.advertised,
            clock=clock,
        )
        for shard in config.shards
    ]

    def on_load() -> None:
        for puller in pullers:
            puller.report()

    def on_ended(work: Work) -> None:
        for puller in pullers:
            puller.ended(work)

    engine.on_load, engine.on_ended = on_load, on_ended
    control = PrefillControl(engine, runtime.boot_id, runtime.set_ready, clock.now_s)
    add = runtime.server.add
    add(
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        PrefillServicer(engine),
        while_draining=("Attach", "Abort"),
    )
    add(
        engine_control_pb2_grpc.add_EngineControlServiceServicer_to_server,
        EngineControlServicer(control, runtime.instance_id, runtime.boot_id, clock),
        while_draining=("*",),
    )
    add(
        swa_pb2_grpc.add_SwaPoolServiceServicer_to_server,
        SwaPoolServicer(windows.pool),
        while_draining=("*",),
    )
    _announce(runtime, engine)
    _count(runtime, engine)
    watch_rings(runtime, fetch_ring, put_ring)

    async def refuse_new() -> None:
        engine.accepting = False
        on_load()

    async def hand_over() -> None:
        engine.end_all()

    runtime.on_drain(refuse_new)
    runtime.on_hand_over(hand_over)
    runtime.on_stop(engine.close)
    runtime.spawn(engine.run(), "engine")
    for number, puller in enumerate(pullers):
        runtime.spawn(puller.run(), f"pull {number}")
    runtime.spawn(_watch_health(runtime, engine), "health")
    return engine


def _announce(runtime: Runtime[PrefillConfig], engine: PrefillEngine) -> None:
    config = runtime.config
    geometry = engine.layout.geometry
    runtime.announce(
        capacity={
            "num_ranks": config.num_ranks,
            "num_blocks": config.num_blocks - 1,
            "kv_tokens": (config.num_blocks - 1) * geometry.block_tokens,
            "max_model_len": config.model.max_model_len,
            "quota_ns": config.quota_ns,
            "block_tokens": geometry.block_tokens,
            "ring_tokens": geometry.ring,
            "vocab_size": config.model.vocab_size,
        },
        fingerprint={
            "layout": engine.layout.signature,
            "model": config.model.model_id,
            "tokenizer": config.model.vocabulary_id,
        },
        labels={"engine": config.model.engine},
    )


def _count(runtime: Runtime[PrefillConfig], engine: PrefillEngine) -> None:
    census, metrics = runtime.census, runtime.metrics
    census.register("prefill.pool", "blocks", lambda: engine.num_blocks_used)
    census.register("prefill.pool", "slots", lambda: engine.num_slots_used)
    census.register("prefill.requests", "requests", lambda: engine.num_requests)
    census.register("prefill.streams", "streams", lambda: engine.hub.num_streams)
    census.register("prefill.tasks", "tasks", lambda: len(engine.tasks))
    census.register("prefill.persister", "queued", lambda: engine.persister.num_queued)
    runtime.count_in_flight(lambda: engine.num_requests)
    ranks, counts = engine.ranks, engine.counts
    for name, text, value in (
        ("requests", "Requests here", lambda: engine.num_requests),
        ("received", "Requests taken", lambda: counts.received),
        ("handed_off", "Requests that decode elsewhere now", lambda: counts.handed_off),
        ("finished", "Requests that ended with their prompt", lambda: counts.finished),
        ("aborted", "Requests aborted", lambda: counts.aborted),
        ("failed", "Requests failed", lambda: counts.failed),
        ("outstanding_ns", "Predicted work not finished", lambda: engine.ledger.total_ns),
        ("blocks_used", "Blocks in use", lambda: engine.num_blocks_used),
        ("steps", "Steps done", lambda: sum(r.counts.steps for r in ranks)),
        (
            "computed_tokens",
            "Prompt tokens computed",
            lambda: sum(r.counts.computed_tokens for r in ranks),
        ),
        (
            "cached_tokens",
            "Prompt tokens taken from the cache",
            lambda: sum(r.counts.cached_tokens for r in ranks),
        ),
        (
            "replayed_tokens",
            "Prompt tokens fed again for their window",
            lambda: sum(r.counts.replayed_tokens for r in ranks),
        ),
        (
            "hits_shortened",
            "Hits thrown away or cut",
            lambda: sum(r.counts.hits_shortened for r in ranks),
        ),
        ("persisted_blocks", "Blocks stored", lambda: engine.persister.counts.persisted),
        ("persist_dropped_blocks", "Blocks dropped", lambda: engine.persister.counts.dropped),
    ):
        metrics.gauge(name, text).set_function(value)


async def _watch_health(runtime: Runtime[PrefillConfig], engine: PrefillEngine) -> None:
    """Turns health off while steps are due and none completes (7.1), and on again."""
    healthy = True
    while True:
        await runtime.clock.sleep(_HEALTH_POLL_S)
        stalled = engine.stalled_for_s() > runtime.config.stall_limit_s
        if stalled == healthy and engine.accepting:
            healthy = not stalled
            log.warning("progress", extra={"healthy": healthy})
            await runtime.set_ready(healthy)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns its exit status."""
    return run_service("prefill", PrefillConfig, build, argv)
