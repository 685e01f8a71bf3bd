"""Storage nodes and a STORE as processes with a real etcd, and a load that checks what it reads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.etcd import running_etcd
from deploy.local.http import http_get
from services.common.errors import Failure
from services.common.rpc_client import Channels
from services.kvstore.client import Block, StoreClient
from services.kvstore.tests.kit import LAYOUT

ROOT = bytes(32)
START_S = 120.0
_COMMON = ("--listen=127.0.0.1:0", "--runtime.log_level=warning", "--runtime.die_with_parent")


class Process:
    """One `pelagos serve` process, ended by its id."""

    def __init__(self, folder: Path, name: str, service: str, *flags: str) -> None:
        self._folder = folder
        self._ready = folder / f"{name}.json"
        self._args = ("serve", service, *_COMMON, f"--runtime.ready_file={self._ready}", *flags)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts it."""
        self._ready.unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.common.cli", *self._args, stdout=log, stderr=log
            )

    async def ready(self) -> str:
        """Returns the address once it serves."""
        async with asyncio.timeout(START_S):
            while not self._ready.exists():
                assert self._process is not None
                assert self._process.returncode is None, (self._folder / "log").read_text()
                await asyncio.sleep(0.05)
        address: str = json.loads(self._ready.read_text())["address"]
        return address

    async def metric(self, name: str) -> float:
        """Returns a metric of the process, 0 when it does not answer."""
        with suppress(OSError, TimeoutError):
            admin = json.loads(self._ready.read_text())["admin"]
            async with asyncio.timeout(20):
                _, body = await http_get(admin, "/metrics")
            values = (line.split() for line in body.splitlines() if not line.startswith("#"))
            return sum(float(value) for found, value in values if found == name)
        return 0.0

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """Ends it by SIGKILL and waits for that."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@dataclass
class NodeProcesses:
    """Nodes and a STORE over them, all running."""

    folder: Path
    nodes: list[Process]
    store: Process
    channels: Channels
    client: StoreClient
    capacity: int = 0
    _clients: list[StoreClient] = field(default_factory=list)

    async def put_all(self, blocks: Sequence[Block]) -> None:
        """Puts blocks, each until its group has a primary that takes it."""
        for block in blocks:
            while not (await self.client.put(block)).is_stored:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def whole(self) -> None:
        """Waits until every node answers again: its lease may have ended meanwhile."""
        while (await self.counts())[0] != self.capacity:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def rebuilt(self) -> int:
        """Returns how many shards the running nodes have rebuilt since their starts."""
        name = "pelagos_storage_node_repaired_shards"
        return int(sum([await node.metric(name) for node in self.nodes]))

    async def repaired(self, num_shards: int) -> None:
        """Waits until so many shards were rebuilt in all, and no block waits for it."""
        queue = "pelagos_storage_node_repair_queue_blocks"
        while await self.rebuilt() < num_shards or any(  # noqa: ASYNC110
            [await node.metric(queue) for node in self.nodes]
        ):
            await asyncio.sleep(0.2)

    async def counts(self) -> tuple[int, int]:
        """Returns (slots, slots in use) over all nodes that answer; zeros when STORE is late."""
        try:
            stat = await self.client.stat()
        except Failure:
            return 0, 0
        return stat.capacity_bytes, stat.used_bytes

    async def describe(self) -> str:
        """Returns what a wait that does not end needs to be understood."""
        names = ("repaired_shards", "repair_queue_blocks", "groups_led", "lost_blocks")
        lines = [f"slots, and in use: {await self.counts()}, all: {self.capacity}"]
        for number, node in enumerate(self.nodes):
            values = [await node.metric(f"pelagos_storage_node_{name}") for name in names]
            lines.append(f"node {number}: {dict(zip(names, values, strict=True))}")
        return "\n".join([*lines, (self.folder / "log").read_text()[-3000:]])

    @asynccontextmanager
    async def within(self, limit_s: float, what: str) -> AsyncIterator[None]:
        """Bounds a wait; one that does not end says what there was to see."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise AssertionError(f"{what}: not in {limit_s:g} s\n{await self.describe()}") from None

    async def restart_all(self) -> None:
        """Kills every process of the store at once and starts all of them again."""
        for process in (*self.nodes, self.store):
            await process.kill()
        for process in (*self.nodes, self.store):
            await process.start()
        await asyncio.gather(*(process.ready() for process in self.nodes))
        self._clients.append(self.client)
        self.client = StoreClient(self.channels, await self.store.ready())

    async def close(self) -> None:
        """Ends the connections."""
        for client in (*self._clients, self.client):
            await client.close()
        await self.channels.close()


@asynccontextmanager
async def node_processes(
    folder: Path, num_nodes: int = 12, read_timeout_ms: int = 20_000, put_timeout_ms: int = 20_000
) -> AsyncIterator[NodeProcesses]:
    """Runs storage nodes and a STORE over them as processes."""
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(running_etcd(folder / "etcd"))
        nodes = [
            Process(
                folder,
                f"node-{n}",
                "storage-node",
                f"--dir={folder / f'node-{n}'}",
                f"--node_id=n{n:02d}",
                f"--runtime.etcd={etcd.endpoint}",
                *("--capacity_bytes=4194304", "--segment_bytes=1048576", "--payload_bytes=5000"),
                *("--num_groups=64", "--scrub_bytes_per_s=0", "--keeper_every_s=0.2"),
            )
            for n in range(num_nodes)
        ]
        store = Process(
            folder,
            "store",
            "store",
            "--backend=nodes",
            f"--runtime.etcd={etcd.endpoint}",
            "--payload_bytes=5000",
            f"--read_timeout_ms={read_timeout_ms}",
            f"--put_timeout_ms={put_timeout_ms}",
        )
        for process in (*nodes, store):
            await process.start()
            stack.push_async_callback(process.kill)
        await asyncio.gather(*(process.ready() for process in nodes))
        channels = Channels()
        found = NodeProcesses(
            folder, nodes, store, channels, StoreClient(channels, await store.ready())
        )
        stack.push_async_callback(found.close)
        yield found


class Load:
    """Reads random blocks for as long as it runs; every answer is right or counted as a miss."""

    def __init__(
        self, store: StoreClient, blocks: Sequence[Block], log: Path, batch: int = 4
    ) -> None:
        self.log = log
        self._store = store
        self._blocks = blocks
        self._batch = batch
        self.num_right = 0
        self.misses: list[str] = []
        self.read_s: list[float] = []  # how long each read of a batch took
        self.longest_gap_s = 0.0  # without a right block
        self._last_right_s = 0.0
        self._rng = random.Random(1)

    async def run(self) -> None:
        """Reads for ever."""
        loop = asyncio.get_running_loop()
        self._last_right_s = loop.time()
        while True:
            some = self._rng.sample(self._blocks, self._batch)
            started_s = loop.time()
            async with self._store.fetch(b"".join(b.key for b in some), LAYOUT) as parts:
                async for part in parts:
                    if part.is_ok:
                        assert part.payload == some[part.index].payload, "wrong bytes"
                        self.num_right += 1
                        self._right_at(loop.time())
                    else:
                        self.misses.append(part.reason)
            self.read_s.append(loop.time() - started_s)

    def _right_at(self, now_s: float) -> None:
        self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_right_s)
        self._last_right_s = now_s

    def forget(self) -> None:
        """Begins a new measurement."""
        self.read_s.clear()
        self.longest_gap_s = 0.0

    async def progress(self, count: int, may_miss: bool = False) -> None:
        """Waits until so many more blocks were read right, and none was missed on the way."""
        target = self.num_right + count
        while self.num_right < target:
            assert may_miss or not self.misses, f"{self.misses}\n{self.log.read_text()[-3000:]}"
            await asyncio.sleep(0.05)


@asynccontextmanager
async def loaded(n: NodeProcesses, blocks: Sequence[Block], batch: int = 4) -> AsyncIterator[Load]:
    """Runs a load beside the block. A load that fails ends the block too: whoever waits for its
    progress would wait for ever."""
    load = Load(n.client, blocks, n.folder / "log", batch)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(load.run())
        try:
            yield load
        finally:
            task.cancel()


async def all_right(client: StoreClient, blocks: Sequence[Block]) -> None:
    """Waits until every block is read; the caller's deadline bounds the wait."""
    keys = b"".join(block.key for block in blocks)
    while True:
        async with client.fetch(keys, LAYOUT) as parts:
            found = [part async for part in parts]
        for part in found:
            assert not part.is_ok or part.payload == blocks[part.index].payload
        if all(part.is_ok for part in found):
            return
        await asyncio.sleep(0.1)
