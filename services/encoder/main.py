"""Wires an encoder engine and serves it: `pelagos serve encoder`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from pelagos.encoder.v1 import encoder_pb2_grpc
from pelagos.engine.v1 import engine_control_pb2_grpc

from services.common.errors import Failure
from services.common.service import Runtime, run_service
from services.encoder.config import EncoderConfig
from services.encoder.control import EncoderControl
from services.encoder.engine import EncoderEngine
from services.encoder.server import EncoderServicer
from services.engine.control import EngineControlServicer
from services.engine.stores import nearest
from services.lb.vision.client import CardReport, VisionLbClient

log = logging.getLogger(__name__)

VISION_LB = "vision-lb"
_RETRY_S = 0.2
_HEALTH_POLL_S = 1.0
_REPORT_ANSWER_S = 1.0


async def build(runtime: Runtime[EncoderConfig]) -> None:
    """Makes the parts and puts them into the runtime; nothing is served yet."""
    await build_engine(runtime)


async def build_engine(runtime: Runtime[EncoderConfig]) -> EncoderEngine:
    """As `build`; returns the engine, for tests."""
    config = runtime.config
    encoder = None
    if config.model.engine == "torch":
        from services.encoder.vision import TorchEncoder

        encoder = TorchEncoder(config)
    engine = EncoderEngine(config, encoder, clock=runtime.clock)
    control = EncoderControl(engine, runtime.instance_id, runtime.boot_id, runtime.set_ready)
    runtime.server.add(
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server,
        EncoderServicer(engine),
        while_draining=("Plan",),
    )
    runtime.server.add(
        engine_control_pb2_grpc.add_EngineControlServiceServicer_to_server,
        EngineControlServicer(control, runtime.instance_id, runtime.boot_id, runtime.clock),
        while_draining=("*",),
    )
    patches = config.model.patches
    runtime.announce(
        capacity={
            "max_patches": config.max_queued_patches,
            "patch": patches.patch,
            "downsample": patches.downsample,
            "max_tokens": patches.max_tokens,
        },
        fingerprint={"model": config.model.model_id},
        labels={"engine": config.model.engine},
    )
    runtime.census.register("encoder.queue", "requests", lambda: engine.num_in_progress)
    runtime.census.register("encoder.queue", "queued", lambda: engine.patches_in_progress)
    runtime.count_in_flight(lambda: engine.num_in_progress)
    for name, text, value in (
        ("images", "Images encoded", lambda: engine.num_encoded),
        ("failed", "Images that failed", lambda: engine.num_failed),
        ("resized", "Images whose size was not the declared one", lambda: engine.num_resized),
        ("forwards", "Forwards done", lambda: engine.num_forwards),
        ("queue_patches", "Patches in progress", lambda: engine.patches_in_progress),
        ("cache_hits", "Embeddings found", lambda: engine.cache.num_hits),
        ("cache_bytes", "Bytes of embeddings kept", lambda: engine.cache.num_bytes),
    ):
        runtime.metrics.gauge(name, text).set_function(value)

    async def refuse_new() -> None:
        engine.accepting = False

    runtime.on_drain(refuse_new)
    runtime.spawn(engine.run(), "engine")
    runtime.spawn(_report(runtime, engine), "vision balancer report")
    runtime.spawn(_watch_health(runtime, engine), "health")
    return engine


async def _report(runtime: Runtime[EncoderConfig], engine: EncoderEngine) -> None:
    """Registers this card with the balancer of its machine, for as long as there is one."""
    while True:
        member = nearest(runtime.view, VISION_LB, runtime.machine, runtime.rng)
        if member is not None:
            balancer = VisionLbClient(runtime.channels, member.address, _REPORT_ANSWER_S)
            with suppress(Failure):
                async with balancer.register() as session:
                    while True:
                        await session.send(
                            CardReport(
                                runtime.instance_id,
                                runtime.advertised,
                                engine.patches_in_progress,
                                runtime.config.max_queued_patches,
                                engine.accepting,
                            )
                        )
                        await runtime.clock.sleep(runtime.config.report_interval_s)
        await runtime.clock.sleep(_RETRY_S)


async def _watch_health(runtime: Runtime[EncoderConfig], engine: EncoderEngine) -> None:
    """Turns health off while a forward is due and none completes, and on again."""
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
    return run_service("encoder", EncoderConfig, build, argv)
