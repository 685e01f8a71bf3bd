"""Wires a decode engine and serves it: `pelagos serve decode`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from pelagos.decode.v1 import decode_pb2_grpc
from pelagos.engine.v1 import engine_control_pb2_grpc, kv_transfer_pb2_grpc
from pelagos.kvstore.v1 import store_pb2_grpc, swa_pb2_grpc
from pelagos.lb.v1 import decode_lb_pb2_grpc

from services.common.errors import Failure
from services.common.rpc_client import stream_call
from services.common.service import Runtime, run_service
from services.decode.config import DecodeConfig
from services.decode.control import DecodeControl
from services.decode.engine import DecodeEngine, Identity
from services.decode.mover import BalancedMover
from services.decode.server import DecodeServicer
from services.engine.control import EngineControlServicer
from services.engine.persister import Persister
from services.engine.placement import leader_address, nearest
from services.engine.sim.tokens import Scripts
from services.engine.swa_directory import SwaDirectory
from services.engine.swa_pool import SwaPool, SwaPoolServicer

log = logging.getLogger(__name__)

DECODE_LB = "decode-lb"
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
    identity = Identity(runtime.instance_id, runtime.boot_id, runtime.advertised)
    host_epoch = int(runtime.boot_id, 16) >> 1

    def store() -> store_pb2_grpc.StoreServiceStub | None:
        member = nearest(runtime.view, "store", runtime.machine, runtime.rng)
        return member and store_pb2_grpc.StoreServiceStub(runtime.channels.get(member.address))

    persister = Persister(
        store,
        layout_fingerprint=bytes.fromhex(layout.signature),
        writer_id=runtime.instance_id,
        block_bytes=layout.block_bytes,
        max_queue_bytes=config.persist_queue_bytes,
        by_decode=True,
        clock=clock,
    )
    pool = SwaPool(config.swa_pool_bytes, bytes.fromhex(layout.signature))
    engine = DecodeEngine(
        config,
        [
            config.model.make_runner(
                config.num_blocks, for_prefill=False, scripts=scripts, clock=clock
            )
            for _ in range(config.num_ranks)
        ],
        identity,
        persister=persister,
        pool=pool,
        mover=BalancedMover(
            runtime.channels,
            lambda: leader_address(runtime.view, DECODE_LB),
            runtime.instance_id,
            layout.signature,
        ),
        publish=lambda *state: directory.keep(*state),
        clock=clock,
    )
    directory = SwaDirectory(
        pool,
        runtime.view,
        runtime.channels,
        engine.tasks,
        instance_id=runtime.instance_id,
        address=runtime.advertised,
        host_epoch=host_epoch,
    )
    pool.on_evict = directory.withdraw
    control = DecodeControl(engine, runtime.set_ready)
    runtime.server.add(
        decode_pb2_grpc.add_DecodeServiceServicer_to_server,
        DecodeServicer(engine),
        # Reserve answers no by itself; what was promised before the drain is kept.
        while_draining=("*",),
    )
    runtime.server.add(
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
        engine.transfers,
        while_draining=("*",),
    )
    runtime.server.add(
        engine_control_pb2_grpc.add_EngineControlServiceServicer_to_server,
        EngineControlServicer(control, runtime.instance_id, runtime.boot_id, clock),
        while_draining=("*",),
    )
    runtime.server.add(
        swa_pb2_grpc.add_SwaPoolServiceServicer_to_server,
        SwaPoolServicer(pool, host_epoch),
        while_draining=("*",),
    )
    _announce(runtime, engine)
    _count(runtime, engine)

    async def refuse_new() -> None:
        engine.refusing = True

    async def hand_over() -> None:
        engine.start_drain(0.0, config.drain_hard_s, migrate=config.preempt == "migrate")
        await engine.stopped.wait()

    runtime.on_drain(refuse_new)
    runtime.on_hand_over(hand_over)
    runtime.on_stop(engine.close)
    runtime.spawn(engine.run(), "engine")
    runtime.spawn(_report(runtime, control), "decode balancer report")
    runtime.spawn(_watch_health(runtime, engine), "health")
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
            "tokenizer": config.model.tokenizer_id,
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


async def _report(runtime: Runtime[DecodeConfig], control: DecodeControl) -> None:
    """Reports load to the decode balancer's leader for as long as there is one."""
    version = 0
    while True:
        address = leader_address(runtime.view, DECODE_LB)
        if address is None:
            await runtime.clock.sleep(_RETRY_S)
            continue
        stub = decode_lb_pb2_grpc.DecodeLbServiceStub(runtime.channels.get(address))
        with suppress(Failure):
            async with stream_call(stub.Report) as stream:
                answers = asyncio.create_task(_read_all(stream), name="report answers")
                try:
                    while not answers.done():
                        if leader_address(runtime.view, DECODE_LB) != address:
                            break
                        version += 1
                        await stream.write(control.balancer_report(version))
                        await runtime.clock.sleep(runtime.config.report_interval_s)
                finally:
                    answers.cancel()
                    await asyncio.gather(answers, return_exceptions=True)
        await runtime.clock.sleep(_RETRY_S)


async def _read_all(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass


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
