"""One life of a store in the crash campaign: a real process that is killed while it works.

It says what it is about to do and how that ended, line by line, into a pipe that outlives it. It is
forked from the campaign's process, which has everything imported and runs no thread.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.kvstore.backends import local, segments_plain
from services.kvstore.backends.base import StorageAway
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.gc.collector import Collector
from services.kvstore.gc.policy import Waterlines
from services.kvstore.storage import meta as meta_module
from services.kvstore.storage.node import Node
from services.kvstore.store.blocks import EmbeddedBlocks
from services.kvstore.store.put import Putter
from tests.campaign.kv_damage import Part, copy_files
from tests.campaign.kv_plan import (
    BLOCK_TOKENS,
    LAYOUT,
    NUM_CHAINS,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    Life,
    Op,
    Plan,
    block_of,
    keys_of,
    payload_of,
    tenant_of,
    tokens_of,
)

_OP_DEADLINE_S = 60.0


def fork_life(plan: Plan, life: Life | None, folder: Path) -> tuple[int, int]:
    """Starts a life over the store in `folder`; without one, only what is there is checked.

    Returns (process id, file descriptor to read what it says).
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    status = 1
    try:
        asyncio.run(_Life(plan, life, folder, writing).run())
        status = 0
    except BaseException as error:
        _say(writing, {"failed": repr(error), "where": traceback.format_exc()[-1500:]})
    finally:
        os._exit(status)


def _say(file: int, what: dict[str, Any]) -> None:
    os.write(file, json.dumps(what).encode() + b"\n")


class _Life:
    def __init__(self, plan: Plan, life: Life | None, folder: Path, out: int) -> None:
        self._plan = plan
        self._life = life
        self._store_dir = folder / "store"
        self._flushed_dir = folder / "flushed"
        self._out = out
        self._num_evicted = 0

    def say(self, **what: Any) -> None:
        _say(self._out, what)

    async def run(self) -> None:
        logging.disable()
        if self._life is not None and self._life.max_file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._life.max_file_bytes, -1))
        if self._life is not None and self._life.torn_write:
            _DyingWrites(self._life.torn_write).install()
        node = await self._open()
        lines = Waterlines(low=0.5, high=0.7, reject=0.9, emergency=1.0)
        blocks = EmbeddedBlocks(node, lines, durable=self._plan.durable)
        await self._check_all(blocks)
        if self._life is None:
            await self._put_one_more(node, blocks)
            await node.close()
        else:
            await self._work(node, blocks, lines)
        self.say(ended=True)

    async def _open(self) -> Node:
        plan = self._plan
        if plan.plain:
            local._segment_store = lambda: segments_plain.PlainSegmentStore
        config = LocalBackendConfig(
            dir=self._store_dir / "segments",
            capacity_bytes=plan.num_slots * SLOT_BYTES,
            segment_bytes=plan.segment_slots * SLOT_BYTES,
            payload_bytes=PAYLOAD_BYTES,
            sync_every_s=0.001,
        )
        node = await Node.open(await LocalBackend.open(config), self._store_dir / "meta.log")
        if self._life is not None and self._life.fault == "power":
            _Flushes(self._store_dir, self._flushed_dir).watch(node)
        self.say(opened=True)
        return node

    async def _check_all(self, blocks: EmbeddedBlocks) -> None:
        for number in range(NUM_CHAINS):
            for key in keys_of(number, self._plan.seed)[1:]:
                self.say(seen=key.hex(), as_=await _look(blocks, key))
        self.say(checked=True)

    async def _work(self, node: Node, blocks: EmbeddedBlocks, lines: Waterlines) -> None:
        assert self._life is not None
        putter = Putter(blocks, 1 << 20, 4)
        collector = Collector(node, lines)
        evict = node.evict

        async def evict_and_say(keys16: Sequence[bytes], reason: str) -> int:
            self.say(leaving=[key16.hex() for key16 in keys16])
            return await evict(keys16, reason)

        node.evict = evict_and_say  # type: ignore[method-assign]
        waiting = iter(enumerate(self._life.ops))

        async def worker() -> None:
            for number, op in waiting:
                self.say(begins=number)
                async with asyncio.timeout(_OP_DEADLINE_S):
                    result = await self._do(op, node, blocks, putter, collector)
                self.say(answered=number, result=result)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._life.num_parallel):
                group.create_task(worker())

    async def _put_one_more(self, node: Node, blocks: EmbeddedBlocks) -> None:
        """A store that went through all of this still takes puts."""
        num_slots, num_used = await node.usage()
        if num_used >= 0.9 * num_slots:
            return
        op = Op("put", chain=NUM_CHAINS)
        result = await self._do(op, node, blocks, Putter(blocks, 1 << 20, 4), None)
        if (
            result != "committed"
            or await _look(blocks, block_of(op, self._plan.seed).key) != "exact"
        ):
            self.say(failed=f"a put after it all was {result}")

    async def _do(
        self,
        op: Op,
        node: Node,
        blocks: EmbeddedBlocks,
        putter: Putter,
        collector: Collector | None,
    ) -> str:
        keys = keys_of(op.chain, self._plan.seed)
        if op.kind == "put":
            tokens = tokens_of(op.chain, self._plan.seed)
            size = 4 * BLOCK_TOKENS
            of_block = tokens[op.block * size : (op.block + 1) * size]
            return (await putter.put(block_of(op, self._plan.seed), of_block)).value
        if op.kind == "read":
            return await _look(blocks, keys[op.block + 1])
        if op.kind == "touch":
            await blocks.touch(b"".join(keys[1:]), 2)
        elif op.kind == "pin":
            await blocks.pin(f"{op.chain}", b"".join(key[:16] for key in keys[1:]), 0.05)
        elif op.kind == "collect" and collector is not None:
            await collector.collect(with_orphans=True)
        elif op.kind == "scrub":
            report = await node.backend.scrub(0)
            return f"{len(report.bad)} bad"
        elif op.kind == "erase":
            try:
                await blocks.delete_tenant(tenant_of(op.chain))
            except StorageAway:
                return "away"
        return "done"


async def _look(blocks: EmbeddedBlocks, key: bytes) -> str:
    """Reads a block as FETCH does and says what came: a miss, or which bytes."""
    room: list[bytearray] = []

    def take(num_bytes: int) -> bytearray:
        room.append(bytearray(num_bytes))
        return room[-1]

    read = await blocks.get(key, LAYOUT, take)
    if read.status != 0:
        return "miss"
    found = bytes(room[-1])
    if found == payload_of(key, 0):
        return "exact"
    return "approximate" if found == payload_of(key, 1) else "wrong"


class _Flushes:
    """Keeps copies of what is on the disk for sure: the files as they were when a flush began that
    has ended since."""

    def __init__(self, store: Path, flushed: Path) -> None:
        self._store = store
        self._flushed = flushed
        self._number: dict[Part, int] = {"segments": 0, "meta": 0}
        self._turns: dict[Part, threading.Lock] = {
            "segments": threading.Lock(),
            "meta": threading.Lock(),
        }

    def watch(self, node: Node) -> None:
        """Watches every flush of a node that was opened just now, when all was flushed."""
        self._around("segments", lambda: None)
        self._around("meta", lambda: None)
        backend = node.backend
        assert isinstance(backend, LocalBackend)
        backend._store = _WithSync(backend._store, functools.partial(self._around, "segments"))
        node.meta.sync = functools.partial(  # type: ignore[method-assign]
            self._around, "meta", node.meta.sync
        )

    def _around(self, part: Part, sync: Callable[[], Any]) -> Any:
        with self._turns[part]:
            self._number[part] += 1
            number, folder = self._number[part], self._flushed / part
            copy_files(self._store, folder / f"{number}.part", part)
            result = sync()
            os.rename(folder / f"{number}.part", folder / f"{number}")
            shutil.rmtree(folder / f"{number - 1}", ignore_errors=True)
            return result


class _WithSync:
    """A segment store whose flushes are seen."""

    def __init__(self, store: Any, around: Callable[[Callable[[], Any]], Any]) -> None:
        self._store = store
        self._around = around
        self._mutex = threading.Lock()
        self._last_put = -1  # largest number of a put that has ended

    def put(self, pieces: Any) -> int:
        number = int(self._store.put(pieces))
        with self._mutex:
            self._last_put = max(self._last_put, number)
        return number

    def sync(self) -> int:
        # A put that goes by while the files are copied is in the flush and may not be in the
        # copies: it is called durable by the next one.
        with self._mutex:
            last_put = self._last_put
        return min(int(self._around(self._store.sync)), last_put + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _DyingWrites:
    """Kills the process in the middle of its n-th write: a part is on the disk, the rest is not."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._lock = threading.Lock()

    def install(self) -> None:
        """Takes the place of `os` in the modules that write."""
        segments_plain.os = self  # type: ignore[attr-defined]
        meta_module.os = self  # type: ignore[attr-defined]

    def pwrite(self, file: int, data: bytes, offset: int) -> int:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.pwrite(file, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
        return os.pwrite(file, data, offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)
