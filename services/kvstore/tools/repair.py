"""`pelagos kv repair`: makes a store that is not running sound, or has a storage node look at all
of its shards.

Opening a store already rebuilds what its files do not say any more; then everything is read, and
what is damaged is let go, so that no reader meets it. A storage node that runs does the same on
request, and the groups' primaries build its lost shards again from the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from pelagos.kvstore.v1 import storage_pb2 as pb
from pelagos.kvstore.v1 import storage_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK
from services.common.rpc_client import Channels, stream_call
from services.kvstore.backends.shared import open_shared
from services.kvstore.config import SHARED_BACKENDS, StoreConfig
from services.kvstore.storage.node import Node
from services.kvstore.storage.shared_node import SharedNode
from services.kvstore.store.main import open_node

_NODE_TIMEOUT_S = 24 * 3600.0


@dataclass(frozen=True)
class Repaired:
    """What a repair found."""

    num_checked: int
    num_damaged: int  # let go
    num_adopted: int = 0  # blocks that no record named
    num_lost: int = 0  # records without their block
    num_orphans: int = 0  # shards that nothing names and nobody can use


async def repair_store(config: StoreConfig) -> Repaired:
    """Repairs the store of a configuration; it must not be running.

    Raises: Failure or OSError when it is in use or away; ValueError for storage nodes.
    """
    if config.backend == "nodes":
        raise ValueError("storage nodes are repaired one by one: --node ADDRESS")
    if config.backend not in SHARED_BACKENDS:
        return await _repair(await open_node(config, SYSTEM_CLOCK))
    opened = await open_shared(config, SYSTEM_CLOCK)
    try:
        path = config.dir / "meta.log"
        return await _repair(await SharedNode.open_shared(opened.backend, path))
    finally:
        opened.close()


async def _repair(node: Node) -> Repaired:
    try:
        report = await node.backend.scrub(0)
        for ref, _ in report.bad:
            await node.drop(ref.key16, ref.put_id)
        orphans = await node.free_orphans()
        await node.sync()
        return Repaired(
            report.num_checked, len(report.bad), node.num_adopted, node.num_lost, orphans
        )
    finally:
        await node.close()


async def scrub_node(address: str, bytes_per_s: int) -> Repaired:
    """Has a running storage node check all its shards. Raises Failure."""
    channels = Channels()
    num_checked = num_damaged = 0
    try:
        stub = rpc.StorageServiceStub(channels.get(address))
        request = pb.ScrubRequest(bytes_per_s=bytes_per_s)
        async with stream_call(stub.Scrub, request, timeout_s=_NODE_TIMEOUT_S) as stream:
            async for part in stream:
                num_checked += part.checked
                num_damaged += len(part.bad)
    finally:
        await channels.close()
    return Repaired(num_checked, num_damaged)
