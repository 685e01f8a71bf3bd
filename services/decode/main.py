"""Wires a decode engine and serves it: `pelagos serve decode`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from pelagos.decode.v1 import decode_pb2_grpc
from pelagos.engine.v1 import engine_control_pb2_grpc, kv_transfer_pb2_grpc
from pelagos.kvstore.v1 import swa_pb2_grpc

from services.common.errors import Failure
from services.common.service import Runtime, run_service
from services.decode.config import DecodeConfig
from services.decode.control import DecodeControl
from services.decode.engine import DecodeEngine, Identity
from services.decode.experts import LOOKS, ExpertBalance, PlacesExperts
from services.decode.mover import BalancedMover
from services.decode.server import DecodeServicer
from services.engine.control import EngineControlServicer
from services.engine.grammars import Grammars
from services.engine.persister import Persister
from services.engine.sim.tokens import Scripts
from services.engine.store_ring import StoreRing, watch_rings
from services.engine.stores import NearestStore
from services.engine.tasks import TaskSet
from services.engine.windows import Windows
from services.kvstore.client import SwaPool, SwaPoolServicer
from services.lb.decode.client import DecodeLbClient, leader_of
from services.lb.expert.client import ExpertLbClient
from services.lb.expert.client import leader_of as expert_leader_of
from services.so_compiler.client import SoCompilerClient

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_HEALTH_POLL_S = 1.0


async def build(runtime: Runtime[DecodeConfig]) -> None:
    """Makes the parts and puts them into the runtime; nothing is served yet."""
    await build_engine(runtime)


async def build_engine(
    runtime: Runtime[DecodeConfig], scripts: Scripts | None = None
) -> DecodeEngine:
    """As `build`; returns the engine, and takes scripts, for tests."""
    config, clock = runtime.config, runtime.clock
    layout = config.model.layout()
    layout_digest = bytes.fromhex(layout.signature)
    library = config.model.grammar_library()
    library.preload()
    ranks = DecodeLbClient(runtime.channels, leader_of(runtime.view))
    store = NearestStore(runtime.view, runtime.channels, runtime.machine, runtime.rng)
    put_ring = StoreRing("decode-put", layout.block_bytes, config.store_ring_blocks)
    tasks = TaskSet()
    windows = Windows(
        SwaPool(runtime.instance_id, runtime.advertised, config.swa_pool_bytes),
        layout_digest,
        runtime.view,
        runtime.channels,
        tasks,
    )
    engine = DecodeEngine(
        config,
        [
            config.model.make_runner(
                config.num_blocks,
                for_prefill=False,
                max_seqs=config.max_seqs,
                scripts=scripts,
                clock=clock,
            )
            for _ in range(config.num_ranks)
        ],
        Identity(runtime.instance_id, runtime.boot_id, runtime.advertised),
        persister=Persister(
            store.client,
            layout=layout_digest,
            writer_id=runtime.instance_id,
            block_bytes=layout.block_bytes,
            max_queue_bytes=config.persist_queue_bytes,
            by_decode=True,
            ring=lambda: put_ring if store.shares_memory else None,
        ),
        mover=BalancedMover(runtime.channels, ranks, runtime.instance_id, layout.signature),
        keep_window=windows.keep,
        grammars=Grammars(
            library,
            SoCompilerClient(runtime.channels),
            runtime.view,
            runtime.rng,
        ),
        tasks=tasks,
        clock=clock,
    )
    control = DecodeControl(engine, runtime.set_ready)
    add = runtime.server.add
    # Reserve answers no by itself; what was promised before a drain is kept. Hence all of them.
    every = ("*",)
    add(
        decode_pb2_grpc.add_DecodeServiceServicer_to_server,
        DecodeServicer(engine),
        while_draining=every,
    )
    add(
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
        engine.transfers,
        while_draining=every,
    )
    add(
        engine_control_pb2_grpc.add_EngineControlServiceServicer_to_server,
        EngineControlServicer(control, runtime.instance_id, runtime.boot_id, clock),
        while_draining=every,
    )
    add(
        swa_pb2_grpc.add_SwaPoolServiceServicer_to_server,
        SwaPoolServicer(windows.pool),
        while_draining=every,
    )
    _announce(runtime, engine)
    _count(runtime, engine)
    watch_rings(runtime, put_ring)

    async def refuse_new() -> None:
        engine.refusing = True

    async def hand_over() -> None:
        engine.start_drain(0.0, config.drain_hard_s, migrate=config.preempt == "migrate")
        await engine.stopped.wait()

    runtime.on_drain(refuse_new)
    runtime.on_hand_over(hand_over)
    runtime.on_stop(engine.close)
    runtime.spawn(engine.run(), "engine")
    runtime.spawn(_report(runtime, control, ranks), "decode balancer report")
    runtime.spawn(_watch_health(runtime, engine), "health")
    runner = engine.ranks[0].runner
    moves = isinstance(runner, PlacesExperts) and runner.leads_experts and runner.expert_ranks > 1
    # Ranks of one process share the experts' memory, and nothing keeps their steps together.
    if moves and config.rebalance_steps and len(engine.ranks) == 1:
        runtime.spawn(_balance_experts(runtime, engine, runner), "experts")
    return engine


def _announce(runtime: Runtime[DecodeConfig], engine: DecodeEngine) -> None:
    config = runtime.config
    block = engine.layout.geometry.block_tokens
    runtime.announce(
        capacity={
            "num_ranks": config.num_ranks,
            "num_blocks": config.num_blocks - 1,
            "kv_tokens": (config.num_blocks - 1) * block,
            "max_seqs": config.max_seqs,
            "max_model_len": config.model.max_model_len,
            "block_tokens": block,
            "ring_tokens": engine.layout.geometry.ring,
            "vocab_size": config.model.vocab_size,
        },
        fingerprint={
            "layout": engine.layout.signature,
            "model": config.model.model_id,
            "tokenizer": config.model.vocabulary_id,
        },
        labels={"engine": config.model.engine},
    )


def _count(runtime: Runtime[DecodeConfig], engine: DecodeEngine) -> None:
    census, metrics = runtime.census, runtime.metrics
    census.register("decode.pool", "blocks", lambda: engine.num_blocks_used)
    census.register("decode.pool", "slots", lambda: engine.num_slots_used)
    census.register("decode.reservations", "leases", lambda: engine.num_held)
    census.register("decode.transfers", "transfers", lambda: len(engine.transfers))
    census.register("decode.requests", "requests", lambda: engine.num_running)
    census.register("decode.streams", "streams", lambda: engine.hub.num_streams)
    census.register("decode.tasks", "tasks", lambda: len(engine.tasks))
    census.register("decode.persister", "queued", lambda: engine.persister.num_queued)
    runtime.count_in_flight(engine.num_in_flight)
    for name, text, value in (
        ("running", "Requests that decode", lambda: engine.num_running),
        ("reserved", "Reservations held", lambda: engine.num_held),
        ("blocks_used", "Blocks in use", lambda: engine.num_blocks_used),
        (
            "quarantined_blocks",
            "Blocks whose writer is not fenced yet",
            lambda: sum(rank.blocks.num_quarantined for rank in engine.ranks),
        ),
        ("steps", "Steps done", lambda: sum(rank.counts.steps for rank in engine.ranks)),
        ("tokens", "Tokens generated", lambda: sum(rank.counts.tokens for rank in engine.ranks)),
        (
            "accepted_drafts",
            "Drafts accepted",
            lambda: sum(rank.counts.accepted for rank in engine.ranks),
        ),
        (
            "verified_drafts",
            "Drafts verified",
            lambda: sum(rank.counts.drafted for rank in engine.ranks),
        ),
        (
            "wasted_rows",
            "Rows computed for requests that had ended",
            lambda: sum(rank.counts.wasted_rows for rank in engine.ranks),
        ),
        (
            "preempted",
            "Requests that lost their place",
            lambda: sum(rank.counts.preempted for rank in engine.ranks),
        ),
        ("moved", "Requests moved elsewhere", lambda: engine.num_moved),
        ("lapsed_leases", "Leases that lapsed", lambda: engine.num_lapsed),
        ("persisted_blocks", "Blocks stored", lambda: engine.persister.counts.persisted),
        ("persist_dropped_blocks", "Blocks dropped", lambda: engine.persister.counts.dropped),
        (
            "refused_chunks",
            "Chunks of writers that were fenced",
            lambda: engine.transfers.num_refused_chunks,
        ),
    ):
        metrics.gauge(name, text).set_function(value)


async def _report(
    runtime: Runtime[DecodeConfig], control: DecodeControl, ranks: DecodeLbClient
) -> None:
    """Reports load to the decode balancer's leader for as long as there is one."""
    while True:
        with suppress(Failure):
            async with ranks.report() as session:
                while True:
                    await session.send(control.balancer_report())
                    await runtime.clock.sleep(runtime.config.report_interval_s)
        await runtime.clock.sleep(_RETRY_S)


async def _balance_experts(
    runtime: Runtime[DecodeConfig], engine: DecodeEngine, runner: PlacesExperts
) -> None:
    """Follows the expert balancer's plans, a look every tenth of a window."""
    planner = ExpertLbClient(runtime.channels, expert_leader_of(runtime.view))
    balance = ExpertBalance(runner, planner, runtime.instance_id)
    every, last = max(1, runtime.config.rebalance_steps // LOOKS), 0
    while True:
        await runtime.clock.sleep(_HEALTH_POLL_S)
        steps = sum(rank.counts.steps for rank in engine.ranks)
        if steps - last >= every:
            last = steps
            await balance.turn(steps)


async def _watch_health(runtime: Runtime[DecodeConfig], engine: DecodeEngine) -> None:
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
    return run_service("decode", DecodeConfig, build, argv)
