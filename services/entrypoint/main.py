"""`pelagos serve entrypoint`: wires the parts and serves HTTP and gRPC."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from pelagos.entrypoint.v1 import entrypoint_pb2_grpc
from pelagos.kvstore.v1 import swa_pb2_grpc

from services.common.config import ConfigError
from services.common.errors import Failure, Reason
from services.common.service import Runtime, run_service
from services.entrypoint.address_policy import UrlPolicy
from services.entrypoint.admission import Door, Load
from services.entrypoint.attach import EngineHub
from services.entrypoint.catalog import Catalog
from services.entrypoint.codec_models import CodecModels
from services.entrypoint.config import EntrypointConfig
from services.entrypoint.generation import Engines
from services.entrypoint.http_app import HttpFront
from services.entrypoint.http_server import HttpServer
from services.entrypoint.image_fetch import ImageFetcher
from services.entrypoint.key_store import KeyStore
from services.entrypoint.ledger import Ledger
from services.entrypoint.neighbours import (
    PREFILL_LB,
    CheckService,
    Codec,
    CompilerService,
    Peers,
    RecipeService,
)
from services.entrypoint.parse_mux import ParseMux
from services.entrypoint.pipeline import Parts, Pipeline
from services.entrypoint.quota import Quota
from services.entrypoint.retry import RetryBudget, RetryPolicy
from services.entrypoint.server import EntrypointServicer
from services.entrypoint.telemetry import Instruments
from services.kvstore.client import swa_directory_servicer
from services.lb.prefill.client import PrefillLbClient

log = logging.getLogger(__name__)

ROLE = "entrypoint"
_TICK_S = 1.0
_HAND_OVER_POLL_S = 0.02


async def build(runtime: Runtime[EntrypointConfig]) -> Parts:
    """Wires one entrypoint; returns its parts, for tests that look inside."""
    config, clock = runtime.config, runtime.clock
    keys = KeyStore(
        Path(config.key_folder),
        anonymous_tenant="anonymous" if config.anonymous_on_loopback else "",
        clock=clock,
    )
    if keys.open():
        log.info("first key made", extra={"path": str(keys.key_path)})
    peers = Peers(
        runtime.view,
        runtime.machine,
        {
            "recipe": config.recipe_address,
            "check": config.check_address,
            PREFILL_LB: config.prefill_lb_address,
            "so-compiler": config.so_compiler_address,
        },
        runtime.rng,
    )
    codec = await _codec(runtime, peers)
    instruments = Instruments(runtime.metrics)
    hub = EngineHub(runtime.channels, runtime.instance_id, runtime.spawn, clock=clock)
    policy = RetryPolicy(
        max_attempts=config.max_attempts,
        budget_ratio=config.retry_budget_ratio,
        budget_floor=config.retry_budget_floor,
    )
    engines = Engines(
        check=CheckService(runtime.channels, peers),
        queue=PrefillLbClient(runtime.channels, lambda: peers.leader(PREFILL_LB)),
        hub=hub,
        policy=policy,
        budget=RetryBudget(policy),
        clock=clock,
        rng=runtime.rng,
        entrypoint_id=runtime.instance_id,
        leader_wait_s=config.leader_wait_s,
        on_retry=lambda reason: instruments.retries.labels(reason=reason.value).inc(),
    )
    quota = Quota(config.limits.max_concurrent_per_key)
    catalog = Catalog(
        runtime.view,
        runtime.channels,
        aliases=config.model_aliases,
        fixed_engines=config.engine_addresses,
    )
    parts = Parts(
        config=config,
        codec=codec,
        compiler=CompilerService(runtime.channels, peers),
        catalog=catalog,
        models=CodecModels(codec, clock),
        engines=engines,
        mux=ParseMux(codec, clock=clock),
        ledger=Ledger(config.explained_requests),
        door=Door(quota, config.limits, clock),
        load=Load(config.limits.max_requests, config.limits.max_request_tokens),
        quota=quota,
        instruments=instruments,
        fetcher=ImageFetcher(_url_policy(config)),
        keys=keys,
        outputs=set(),
    )
    pipeline = Pipeline(parts)
    server: HttpServer
    front = HttpFront(
        parts,
        pipeline,
        keys,
        is_ready=lambda: runtime.is_ready and catalog.num_engines > 0,
        is_alive=lambda: runtime.heartbeats.is_alive,
        base_url=lambda: f"http://{server.address}",
    )
    server = HttpServer(front.app, config.http_listen, config.limits)
    parts.http = server
    runtime.server.add(
        entrypoint_pb2_grpc.add_EntrypointServiceServicer_to_server,
        EntrypointServicer(parts, pipeline, keys),
    )
    if config.swa_directory:
        # This process's shard of the directory: prefill publishes to it, CHECK asks it.
        runtime.server.add(
            swa_pb2_grpc.add_SwaDirectoryServiceServicer_to_server,
            swa_directory_servicer(),
            while_draining=("*",),
        )
    for coroutine, name in (
        (keys.run(), "keys"),
        (catalog.run(), "catalog"),
        (parts.mux.run(), "parse"),
        (hub.run(), "idle channels"),
        (_tick(runtime, pipeline), "keep-alive"),
    ):
        runtime.spawn(coroutine, name)
    _share_quota(runtime, parts)
    _register_census(runtime, parts, server)
    runtime.count_in_flight(lambda: parts.ledger.num_open)

    async def drain() -> None:
        server.drain()

    async def hand_over() -> None:
        # What outlives the grace ends with a failure that its client can read (P-01).
        for output in list(parts.outputs):
            output.abandon(Failure(Reason.DRAINING, "the entrypoint is stopping"))
        while parts.ledger.num_open:
            await clock.sleep(_HAND_OVER_POLL_S)

    runtime.on_drain(drain)
    runtime.on_hand_over(hand_over)
    runtime.on_stop(server.close)
    await server.start()
    runtime.announce(labels={"http": server.address})
    return parts


async def _codec(runtime: Runtime[EntrypointConfig], peers: Peers) -> Codec:
    config = runtime.config
    if config.recipe_mode == "service":
        return RecipeService(runtime.channels, peers, config.codec_wait_s, runtime.clock)
    # Imported here: the service mode needs neither tokenizers nor native code.
    from services.entrypoint.embedded_codec import EmbeddedCodec

    try:
        return await asyncio.to_thread(
            EmbeddedCodec.load,
            config.tokenizer_folder,
            config.recipe_tokenizers,
            config.recipe_models,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"recipe_mode: embedded: {error}") from None


def _url_policy(config: EntrypointConfig) -> UrlPolicy | None:
    if not config.fetch_image_urls:
        return None
    return UrlPolicy(
        allow_http=config.fetch_http_urls,
        domains=config.fetch_domains,
        denied_networks=tuple(ipaddress.ip_network(text) for text in config.denied_networks),
    )


def _share_quota(runtime: Runtime[EntrypointConfig], parts: Parts) -> None:
    """Divides every key's limits by the entrypoints that are there."""

    def update() -> None:
        num = len(runtime.view.members(ROLE))
        # Ourselves, also while our own registration is not in the view yet.
        known = runtime.view.member(ROLE, runtime.instance_id) is not None
        parts.quota.set_num_entrypoints(max(1, num if known else num + 1))
        parts.door.admit_waiting()

    runtime.view.subscribe(update)
    update()


async def _tick(runtime: Runtime[EntrypointConfig], pipeline: Pipeline) -> None:
    while True:
        await runtime.clock.sleep(_TICK_S)
        pipeline.tick()


def _register_census(runtime: Runtime[EntrypointConfig], parts: Parts, server: HttpServer) -> None:
    census = runtime.census
    census.register("entrypoint.ledger", "requests", lambda: parts.ledger.num_open)
    census.register("entrypoint.http", "requests", lambda: server.num_requests)
    census.register("entrypoint.quota", "slots", lambda: parts.quota.num_in_flight)
    census.register("entrypoint.door", "queued", lambda: parts.door.num_waiting)
    census.register("entrypoint.load", "requests", lambda: parts.load.num_requests)
    census.register("entrypoint.parse", "streams", lambda: parts.mux.num_streams)
    census.register("entrypoint.attach", "streams", lambda: parts.engines.hub.num_followers)
    census.register("entrypoint.outputs", "streams", lambda: len(parts.outputs))
    parts.instruments.watch(
        runtime.metrics,
        {
            "requests_in_flight": ("Accepted requests not ended", lambda: parts.ledger.num_open),
            "connections": ("Open HTTP connections", lambda: server.connections.num_open),
            "engines": ("Engines described", lambda: parts.catalog.num_engines),
            "retry_budget": ("Incidents that can be paid for", lambda: parts.engines.budget.level),
        },
    )


async def _build(runtime: Runtime[EntrypointConfig]) -> None:
    await build(runtime)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit status."""
    return run_service(ROLE, EntrypointConfig, _build, argv)


if __name__ == "__main__":
    sys.exit(main())
