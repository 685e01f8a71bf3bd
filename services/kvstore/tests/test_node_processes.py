"""Twelve storage nodes as processes with a real etcd: killed and frozen under verified load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from deploy.local.etcd import running_etcd
from services.common.rpc_client import Channels
from services.kvstore.client import StoreClient
from services.kvstore.tests.kit import LAYOUT, blocks_of, token_ids

ROOT = bytes(32)
_COMMON = ("--listen=127.0.0.1:0", "--runtime.log_level=warning", "--runtime.die_with_parent")


class Process:
    """One `pelagos serve` process, ended by its id."""

    def __init__(self, folder: Path, name: str, service: str, *flags: str) -> None:
        self._folder = folder
        self._ready = folder / f"{name}.json"
        self._args = ("serve", service, *_COMMON, f"--runtime.ready_file={self._ready}", *flags)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.common.cli", *self._args, stdout=log, stderr=log
            )

    async def ready(self) -> str:
        """Returns the address once it serves."""
        while not self._ready.exists():
            assert self._process is not None
            assert self._process.returncode is None, (self._folder / "log").read_text()
            await asyncio.sleep(0.05)
        address: str = json.loads(self._ready.read_text())["address"]
        return address

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Load:
    """Reads random blocks for as long as it runs; every answer is right or counted as a miss."""

    def __init__(self, store: StoreClient, blocks, log: Path) -> None:
        self.log = log
        self._store = store
        self._blocks = blocks
        self.num_right = 0
        self.misses: list[str] = []
        self.longest_s = 0.0
        self._rng = random.Random(1)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            some = self._rng.sample(self._blocks, 4)
            started_s = loop.time()
            async with self._store.fetch(b"".join(b.key for b in some), LAYOUT) as parts:
                async for part in parts:
                    if part.is_ok:
                        assert part.payload == some[part.index].payload, "wrong bytes"
                        self.num_right += 1
                    else:
                        self.misses.append(part.reason)
            self.longest_s = max(self.longest_s, loop.time() - started_s)


@pytest.mark.timeout(300)
async def test_p_31_p_32_nodes_killed_and_frozen_under_verified_load(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(running_etcd(tmp_path / "etcd"))
        nodes = [
            Process(
                tmp_path,
                f"node-{n}",
                "storage-node",
                f"--dir={tmp_path / f'node-{n}'}",
                f"--node_id=n{n:02d}",
                f"--runtime.etcd={etcd.endpoint}",
                *("--capacity_bytes=4194304", "--segment_bytes=1048576", "--payload_bytes=5000"),
                *("--num_groups=64", "--scrub_bytes_per_s=0", "--keeper_every_s=0.2"),
            )
            for n in range(12)
        ]
        store = Process(
            tmp_path,
            "store",
            "store",
            "--backend=nodes",
            f"--runtime.etcd={etcd.endpoint}",
            *("--payload_bytes=5000", "--read_timeout_ms=20000", "--put_timeout_ms=20000"),
        )
        for process in (*nodes, store):
            await process.start()
            stack.push_async_callback(process.kill)
        await asyncio.gather(*(process.ready() for process in nodes))
        channels = Channels()
        stack.push_async_callback(channels.close)
        client = StoreClient(channels, await store.ready())
        stack.push_async_callback(client.close)

        written = blocks_of(ROOT, token_ids(1, 128 * 40))
        for block in written:
            await _stored(client, block)
        capacity = (await client.stat()).capacity_bytes

        load = Load(client, written, tmp_path / "log")
        task = asyncio.create_task(load.run())
        try:
            await _progress(load, 200)
            # Frozen, connections left open: eleven are asked, so nobody waits for it.
            nodes[7].signal(signal.SIGSTOP)
            await _progress(load, 200)
            nodes[7].signal(signal.SIGCONT)
            await _whole(client, capacity)
            for first, second in ((2, 9), (0, 5)):
                await nodes[first].kill()
                await nodes[second].kill()
                await _progress(load, 200)
                for number in (first, second):
                    await nodes[number].start()
                await asyncio.gather(nodes[first].ready(), nodes[second].ready())
                # The two are in use again before the next two go.
                await _whole(client, capacity)
                await _progress(load, 100)
            assert load.misses == [], load.log.read_text()[-3000:]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        # SIGKILL of every process of the store at once, then all of them again.
        for process in (*nodes, store):
            await process.kill()
        for process in (*nodes, store):
            await process.start()
        await asyncio.gather(*(process.ready() for process in nodes))
        again = StoreClient(channels, await store.ready())
        stack.push_async_callback(again.close)
        await _all_right(again, written)


async def _stored(client: StoreClient, block) -> None:
    """Puts a block until its group has a primary that takes it."""
    while not (await client.put(block)).is_stored:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def _whole(client: StoreClient, capacity: int) -> None:
    """Waits until every node answers again: its lease may have ended meanwhile."""
    while (await client.stat()).capacity_bytes != capacity:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def _progress(load: Load, count: int) -> None:
    target = load.num_right + count
    while load.num_right < target:
        assert load.misses == [], load.log.read_text()[-3000:]
        await asyncio.sleep(0.05)


async def _all_right(client: StoreClient, blocks) -> None:
    """Waits until every block is read; the test's deadline bounds the wait."""
    keys = b"".join(block.key for block in blocks)
    while True:
        async with client.fetch(keys, LAYOUT) as parts:
            found = [part async for part in parts]
        for part in found:
            assert not part.is_ok or part.payload == blocks[part.index].payload
        if all(part.is_ok for part in found):
            return
        await asyncio.sleep(0.1)
