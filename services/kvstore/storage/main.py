"""`pelagos serve storage-node`: one disk, with the DATA and META halves."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from pelagos.kvstore.v1 import storage_pb2_grpc

from services.common.clock import Clock
from services.common.config import ConfigError
from services.common.service import Runtime, run_service
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.config import NODE_ID, GcConfig, StorageNodeConfig
from services.kvstore.folders import using
from services.kvstore.gc.metrics import export_gc_metrics
from services.kvstore.gc.worker import passes_over, run_passes
from services.kvstore.index_table import EPOCH_S
from services.kvstore.memory import keep_freed
from services.kvstore.placement import Profile
from services.kvstore.storage.keeper import ROLE, MapKeeper, MapView
from services.kvstore.storage.leader import Leader
from services.kvstore.storage.links import Links, NodeLink
from services.kvstore.storage.meta import Meta
from services.kvstore.storage.server import MetaServicer, StorageServicer

_SCRUB_EVERY_S = 7 * 24 * 3600
_ELECTION = "storage-map"


def node_id_of(config: StorageNodeConfig) -> str:
    """Returns the node's name, which stays with its disk and not with its process."""
    if config.node_id:
        return config.node_id
    file = Path(config.dir) / "node-id"
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(f"node-{secrets.token_hex(6)}")
    node = file.read_text(errors="replace").strip()
    if not re.fullmatch(NODE_ID, node):
        raise ConfigError(f"{file} does not hold a node's name: remove it, or give node_id")
    return node


async def build(runtime: Runtime[StorageNodeConfig]) -> None:
    """Wires the process."""
    config = runtime.config
    profile = Profile.parse(config.profile)
    with using(config.dir):
        node = node_id_of(config)
        backend = await LocalBackend.open(
            LocalBackendConfig(
                dir=config.dir / "segments",
                capacity_bytes=config.capacity_bytes,
                segment_bytes=config.segment_bytes,
                payload_bytes=config.payload_bytes,
                profile=profile,
                cluster=config.runtime.cluster,
            ),
            runtime.clock,
        )
        runtime.on_stop(backend.close)
        meta = Meta(config.dir / "meta.log", runtime.clock.wall_s)
    view = MapView(runtime.store, runtime.keys, runtime.view, runtime.clock)
    links = Links(
        runtime.channels, view.address_of, runtime.clock, largest_bytes=config.payload_bytes
    )
    leader = Leader(
        node,
        meta,
        view,
        links,
        repair_bytes_per_s=config.repair_bytes_per_s,
        clock=runtime.clock,
    )
    storage = StorageServicer(
        node, backend, view, leader, config.scrub_bytes_per_s, config.lines, runtime.clock
    )
    records = MetaServicer(leader, view, runtime.clock)
    everything = ("*",)
    runtime.server.add(
        storage_pb2_grpc.add_StorageServiceServicer_to_server, storage, while_draining=everything
    )
    runtime.server.add(
        storage_pb2_grpc.add_MetaServiceServicer_to_server, records, while_draining=everything
    )
    election = runtime.elect(_ELECTION)
    keeper = MapKeeper(
        view,
        election,
        runtime.keys,
        profile,
        config.num_groups,
        out_after_s=config.out_after_s,
        clock=runtime.clock,
    )

    async def end_streams() -> None:
        records.end_streams()

    async def close() -> None:
        await links.close()
        meta.close()

    runtime.on_drain(end_streams)
    runtime.on_stop(close)
    runtime.view.subscribe(leader.poke)
    runtime.spawn(view.run(leader.poke), "placement map")
    runtime.spawn(keeper.run(config.keeper_every_s), "map keeper")
    runtime.spawn(leader.run(), "lead groups")
    runtime.spawn(leader.repairs.run(), "repair")
    runtime.spawn(leader.handover.run(), "hand commits over")
    runtime.spawn(purge(leader, runtime.clock), "purge tombstones")
    if config.gc_every_s > 0:
        worker = GcConfig(lines=config.lines, every_s=config.gc_every_s)
        link = NodeLink(runtime.channels, runtime.address, runtime.clock)
        passes = passes_over(link, links, view, worker, runtime.clock)
        runtime.spawn(run_passes(passes, worker, runtime.clock), "gc")
        export_gc_metrics(runtime.metrics, passes.collector, runtime.clock)
    if config.scrub_bytes_per_s > 0:
        runtime.spawn(scrub(backend, leader, config, runtime.clock), "scrub")
    started = f"{runtime.clock.wall_s():.6f}"
    runtime.announce(labels={"node": node, "domain": config.domain, "started": started})
    runtime.census.register("kv.meta", "entries", lambda: len(meta.table))
    runtime.census.register("kv.meta", "leases", lambda: meta.num_pins)
    runtime.census.register("kv.repair", "queued", lambda: len(leader.repairs))
    gauge = runtime.metrics.gauge
    gauge("blocks_led", "Blocks of led groups").set_function(lambda: len(meta.table))
    gauge("groups_led", "Groups led").set_function(lambda: len(leader.led))
    gauge("repair_queue_blocks", "Blocks that wait for repair").set_function(
        lambda: len(leader.repairs)
    )
    gauge("repaired_shards", "Shards rebuilt").set_function(lambda: leader.counts.repaired)
    gauge("lost_blocks", "Blocks with too few good shards").set_function(
        lambda: leader.counts.dropped
    )
    gauge("bad_shards", "Shards that failed a check").set_function(lambda: storage.num_bad)
    assert runtime.role == ROLE


async def scrub(
    backend: LocalBackend, leader: Leader, config: StorageNodeConfig, clock: Clock
) -> None:
    """Reads everything every seven days; whoever leads what was found bad repairs it."""
    while True:
        await clock.sleep(_SCRUB_EVERY_S)
        report = await backend.scrub(config.scrub_bytes_per_s)
        await leader.tell_primaries([ref for ref, _ in report.bad])


async def purge(leader: Leader, clock: Clock) -> None:
    """Ends evictions that were broken off, forgets tombstones whose time is over, for ever."""
    while True:
        await clock.sleep(EPOCH_S)
        await leader.finish_evictions()
        leader.meta.purge_tombstones()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the process until it is told to stop."""
    keep_freed()
    return run_service("storage-node", StorageNodeConfig, build, argv)
