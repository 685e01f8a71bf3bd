"""Blocks of storage nodes for a tool: a member of the cluster for as long as it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from services.common.errors import Failure, Reason
from services.common.service import Runtime, running
from services.common.store import StorePort
from services.kvstore.config import StoreConfig
from services.kvstore.store.cluster import ClusterBlocks
from services.kvstore.store.main import open_nodes

_ROLE: Final = "kv-tool"  # nobody looks for members of it
_LEVEL_S: Final = 60.0


@asynccontextmanager
async def over_nodes(
    config: StoreConfig, members: StorePort | None = None
) -> AsyncIterator[ClusterBlocks]:
    """Opens what the nodes of the configuration's cluster hold, once all of them have told it.

    Blocks pass as they are stored, sealed ones too.
    Raises: ValueError without the address of etcd; Failure(BACKEND_LOST) when the nodes do not
        answer in time.
    """
    if not config.runtime.etcd and members is None:
        raise ValueError("--runtime.etcd: where storage nodes are registered")
    opened: list[ClusterBlocks] = []

    async def build(runtime: Runtime[StoreConfig]) -> None:
        opened.append(await open_nodes(runtime))

    as_stored = replace(config, listen="127.0.0.1:0", encryption="off")
    async with running(_ROLE, as_stored, build, role=_ROLE, store=members):
        try:
            async with asyncio.timeout(_LEVEL_S):
                await opened[0].index.level.wait()
        except TimeoutError:
            raise Failure(Reason.BACKEND_LOST, "the storage nodes did not answer") from None
        yield opened[0]
