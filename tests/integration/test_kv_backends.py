"""`pelagos up --backend s3|redis`: STORE as a process over a real server, and both killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deploy.local.plan import StackConfig, plan
from deploy.local.stack import Stack
from services.common.cli import SERVICES
from services.common.rpc_client import Channels
from services.kvstore.client import PutStatus, StoreClient
from services.kvstore.tests.kit import LAYOUT, blocks_of, token_ids
from services.kvstore.tests.servers import make_bucket, redis_server, s3_server

ROOT = bytes(range(32))


@contextmanager
def storage(kind: str, folder, patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Runs the storage; yields what `up` is told of it."""
    if kind == "redis":
        with redis_server(folder) as server:
            yield {"backend_at": f"redis://127.0.0.1:{server.port}/0"}
        return
    # Where every S3 client looks for credentials; the stack's processes inherit it.
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with s3_server(folder) as server:
        make_bucket(server, "kvcache")
        endpoint = f"http://127.0.0.1:{server.port}"
        yield {"backend_at": "s3://kvcache/blocks", "s3_endpoint": endpoint}


@pytest.mark.parametrize("kind", ["s3", "redis"])
async def test_blocks_survive_a_killed_store_in(kind, tmp_path, monkeypatch) -> None:
    blocks = blocks_of(ROOT, token_ids(1, 1280), num_bytes=114_688, tenant="acme")
    keys = b"".join(block.key for block in blocks)
    channels = Channels()
    with storage(kind, tmp_path / "server", monkeypatch) as where:
        without = tuple(name for name in SERVICES if name != "store")
        config = StackConfig(
            folder=tmp_path / "stack", without=without, backend=kind, drain_grace_s=2.0, **where
        )
        async with Stack(config).running() as stack:
            process = stack["store"]
            store = StoreClient(channels, process.ready_document["address"])
            statuses = await asyncio.gather(*(store.put(block) for block in blocks))
            assert statuses == [PutStatus.COMMITTED] * 10
            assert (await store.stat()).backend == kind
            await store.close()
            pid = process.pid
            process.signal(signal.SIGKILL)
            while process.pid in (0, pid):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await process.wait_ready()
            store = StoreClient(channels, process.ready_document["address"])
            async with store.fetch(keys, LAYOUT) as parts:
                found = {part.index: part.payload async for part in parts}
            assert [found[number] for number in range(10)] == [b.payload for b in blocks]
            assert await store.delete_tenant("acme") == 10
            assert await store.exists(keys) == bytes(10)
            await store.close()
    await channels.close()


def test_a_backend_elsewhere_needs_a_place_and_the_others_take_none(tmp_path) -> None:
    for backend in ("posix", "s3", "redis"):
        with pytest.raises(ValueError, match="needs backend_at"):
            StackConfig(folder=tmp_path, backend=backend)
    for backend in ("local", "nodes"):
        with pytest.raises(ValueError, match="takes no backend_at"):
            StackConfig(folder=tmp_path, backend=backend, backend_at="somewhere")
    config = StackConfig(
        folder=tmp_path, backend="posix", backend_at="/mnt/kv", encryption="aes-256-gcm"
    )
    (store,) = (spec for spec in plan(config) if spec.service == "store")
    assert {"--backend=posix", "--at=/mnt/kv", "--encryption=aes-256-gcm"} <= set(store.flags)
    # One secret for what makes keys and for what encrypts.
    (check,) = (spec for spec in plan(config) if spec.service == "check")
    assert set(check.flags) & set(store.flags) == {
        f"--cluster_key_file={tmp_path / 'keys' / 'cluster-key'}"
    }
