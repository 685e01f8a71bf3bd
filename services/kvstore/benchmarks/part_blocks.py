"""Getting and putting blocks of 112 KiB on the local disk, in the page cache.

Peers: `preadv` on the same segments, a plain file per block, LMCache's file adapters, Redis.
"""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any, Final

from services.kvstore.benchmarks.part_match import redis_server
from services.kvstore.benchmarks.timing import Case, Section, ratio, take_turns
from services.kvstore.checksums import native
from services.kvstore.placement import (
    OBJECT_HEADER_BYTES,
    SHARD_HEADER_BYTES,
    WHOLE,
    slot_bytes,
)
from services.kvstore.store.blocks import NewBlock, whole_shard

PAYLOAD: Final = 114_688
LAYOUT: Final = bytes(32)
_SEGMENT: Final = 64 << 20
_BATCH: Final = 64  # blocks a turn


def run(quick: bool, log: Callable[[str], None], directory: Path) -> list[Section]:
    """Measures everything of this part, in files below `directory`."""
    num_turns = 6 if quick else 15
    with tempfile.TemporaryDirectory(dir=directory) as work, contextlib.ExitStack() as stack:
        systems = _systems(Path(work), (num_turns + 2) * _BATCH, log, stack)
        put, get = _put(systems, num_turns), _get(systems, num_turns)
        return [get, put]


class Slots:
    """The ring of slots that FETCH writes into: shared memory, larger than the caches."""

    def __init__(self, num: int) -> None:
        self._memory = mmap(-1, num * PAYLOAD)
        self.slots = [memoryview(self._memory)[i * PAYLOAD : (i + 1) * PAYLOAD] for i in range(num)]
        for slot in self.slots:
            slot[:] = os.urandom(PAYLOAD)


class Ours:
    """Blocks whole in the native segment store."""

    name = "ours"

    def __init__(self, directory: Path, source: Slots, target: Slots) -> None:
        self._size = slot_bytes(PAYLOAD, WHOLE)
        self._dir = directory / "ours"
        num_segments = len(source.slots) * self._size // _SEGMENT + 2
        self._store = native.SegmentStore(str(self._dir), self._size, _SEGMENT, num_segments)
        self._source, self._target = source, target
        self._keys = [os.urandom(32) for _ in source.slots]

    def put(self, block: int) -> None:
        """Stores a block: headers, digest, checksum, slot, log record."""
        new = NewBlock(
            key=self._keys[block],
            parent=bytes(32),
            layout=LAYOUT,
            block_index=1,
            num_tokens=128,
            ttl_class=1,
            payload=self._source.slots[block],
        )
        self._store.put(whole_shard(new, block, 1e9))

    def get(self, block: int) -> None:
        """Reads a block and checks header, key, layout, length and digest."""
        slot = self._target.slots[block]
        _, failed = self._store.get_object(self._keys[block], 0, block, LAYOUT, slot)
        assert failed == 0

    def preadv(self) -> Callable[[int], None]:
        """Returns a plain read of the same bytes of the same segments."""
        segments = sorted(self._dir.glob("seg-*"))
        files = [os.open(path, os.O_RDONLY) for path in segments]
        per_segment = _SEGMENT // self._size
        skip = SHARD_HEADER_BYTES + OBJECT_HEADER_BYTES

        def read(block: int) -> None:
            segment, slot = divmod(block, per_segment)
            target = self._target.slots[block]
            done = os.preadv(files[segment], [target], slot * self._size + skip)
            assert done == PAYLOAD

        return read


class PlainFiles:
    """A file per block, without any check."""

    name = "a file per block"

    def __init__(self, directory: Path, source: Slots, target: Slots) -> None:
        self._dir = directory / "files"
        self._dir.mkdir()
        self._source, self._target = source, target

    def put(self, block: int) -> None:
        """Writes a file under another name, then renames it."""
        path = self._dir / f"{block:08x}"
        with open(f"{path}.new", "wb", buffering=0) as file:
            file.write(self._source.slots[block])
        os.rename(f"{path}.new", path)

    def get(self, block: int) -> None:
        """Reads a file."""
        with open(self._dir / f"{block:08x}", "rb", buffering=0) as file:
            assert file.readinto(self._target.slots[block]) == PAYLOAD


class RedisBlocks:
    """Values in Redis."""

    name = "Redis SET / GET"

    def __init__(self, client: Any, pid: int, source: Slots, target: Slots) -> None:
        self._client, self.helpers = client, (pid,)
        self._source, self._target = source, target

    def put(self, block: int) -> None:
        """Sets a value."""
        self._client.set(f"{block:08x}", self._source.slots[block])

    def get(self, block: int) -> None:
        """Gets a value into its slot."""
        self._target.slots[block][:] = self._client.get(f"{block:08x}")


class LmCache:
    """One of LMCache's file adapters, a batch a task, as its own check tool drives it."""

    def __init__(self, kind: str, directory: Path, source: Slots, target: Slots) -> None:
        import torch
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config  # noqa: F401
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        self.name = f"LMCache, adapter {kind}"
        self._config = _lmcache_config(kind, directory / kind)
        whole = torch.frombuffer(source.slots[0].obj, dtype=torch.uint8)
        memory = L1MemoryDesc(ptr=whole.data_ptr(), size=whole.numel(), align_bytes=1)
        self._adapter = create_l2_adapter(self._config, l1_memory_desc=memory)

        def objects(slots: Sequence[memoryview]) -> list[Any]:
            made = []
            for slot in slots:
                data = torch.frombuffer(slot, dtype=torch.uint8)
                meta = MemoryObjMetadata(
                    shape=data.shape,
                    dtype=data.dtype,
                    address=data.data_ptr(),
                    phy_size=PAYLOAD,
                    fmt=MemoryFormat.KV_2LTD,
                    ref_count=1,
                )
                made.append(TensorMemoryObj(data, meta, parent_allocator=None))
            return made

        self._sources, self._targets = objects(source.slots), objects(target.slots)
        self._keys = [
            ObjectKey(chunk_hash=os.urandom(32), model_name="model", kv_rank=0)
            for _ in source.slots
        ]

    def put_batch(self, blocks: range) -> None:
        """Stores a batch."""
        keys = [self._keys[i] for i in blocks]
        task = self._adapter.submit_store_task(keys, [self._sources[i] for i in blocks])
        _await_event(self._adapter.get_store_event_fd())
        assert self._adapter.pop_completed_store_tasks()[task].is_successful()

    def get_batch(self, blocks: range) -> None:
        """Loads a batch."""
        keys = [self._keys[i] for i in blocks]
        task = self._adapter.submit_load_task(keys, [self._targets[i] for i in blocks])
        _await_event(self._adapter.get_load_event_fd())
        found = self._adapter.query_load_result(task)
        assert all(found.test(i) for i in range(len(blocks)))

    def close(self) -> None:
        """Ends the adapter's threads."""
        self._adapter.close()


def _lmcache_config(kind: str, directory: Path) -> Any:
    import argparse
    import json

    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

    directory.mkdir()
    spec = json.dumps({"type": kind, "base_path": str(directory)})
    return parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec])).adapters[0]


def _await_event(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(60_000)
    os.read(descriptor, 8)


def _systems(
    directory: Path, num: int, log: Callable[[str], None], stack: contextlib.ExitStack
) -> list[Any]:
    source, target = Slots(num), Slots(num)
    systems: list[Any] = [Ours(directory, source, target), PlainFiles(directory, source, target)]
    for kind in ("fs", "fs_native"):
        try:
            adapter = LmCache(kind, directory, source, target)
        except Exception as error:  # whatever a peer's import or start needs and does not find
            log(f"LMCache's adapter {kind} left out: {error!r}")
        else:
            stack.callback(adapter.close)
            systems.append(adapter)
    try:
        client, pid = stack.enter_context(redis_server())
    except (OSError, ImportError) as error:
        log(f"Redis left out: {error!r}")
    else:
        systems.append(RedisBlocks(client, pid, source, target))
    return systems


def _batch(system: Any, method: str, turn: int) -> None:
    blocks = range(turn * _BATCH, (turn + 1) * _BATCH)
    if hasattr(system, f"{method}_batch"):
        getattr(system, f"{method}_batch")(blocks)
        return
    one = getattr(system, method)
    for block in blocks:
        one(block)


def _cases(systems: Sequence[Any], method: str) -> list[Case]:
    return [
        Case(system.name, partial(_batch, system, method), getattr(system, "helpers", ()))
        for system in systems
    ]


def _put(systems: Sequence[Any], num_turns: int) -> Section:
    section = Section(
        "Put of a block, buffered",
        "All write into the page cache and sync nothing. Ours also computes the digest of the"
        " payload, the checksum of the slot, and appends the log record that survives kill -9.",
    )
    times = take_turns(_cases(systems, "put"), num_turns)
    section.add(times, lambda s: _BATCH * PAYLOAD / s / 1e9, "GB/s")
    return section


def _get(systems: Sequence[Any], num_turns: int) -> Section:
    section = Section(
        "Verified get of a block",
        "From the page cache into a ring of slots in shared memory, both larger than the caches."
        " Ours checks header, full key, layout, length and digest of every block; nobody else"
        " checks anything.",
    )
    read = systems[0].preadv()

    def preadv(turn: int) -> None:
        for block in range(turn * _BATCH, (turn + 1) * _BATCH):
            read(block)

    times = take_turns([*_cases(systems, "get"), Case("preadv, same segments", preadv)], num_turns)
    section.add(times, lambda s: _BATCH * PAYLOAD / s / 1e9, "GB/s")
    share = ratio(times, "preadv, same segments", "ours")
    section.claim_at_least("verified local get over preadv, bytes per second", 0.8, share, "")
    return section
