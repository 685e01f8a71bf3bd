"""Two writers, one reader and one eviction of one key, in every order (T-EC-MIX, section 21.2).

    python -m tests.campaign.kv_races            # every interleaving, over nodes and embedded
    python -m tests.campaign.kv_races --bound 2  # those with at most two preemptions

The code is the real one: how STORE cuts, writes, commits, reads and assembles, the primary's
records and evictions. What is in memory here is a disk: an embedded one of two slots, so that they
are given away and overwritten in the middle of a read, and the disks of three nodes under 2+1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from services.common.clock import VirtualClock
from services.kvstore.backends.base import BackendStat, PutStatus, ReadStatus, ShardRef
from services.kvstore.checksums import xxh3_128
from services.kvstore.formats import ObjectHeader, ShardHeader
from services.kvstore.gc.policy import Waterlines
from services.kvstore.placement import Profile
from services.kvstore.storage.leader import Leader
from services.kvstore.storage.meta import Meta
from services.kvstore.storage.node import Node
from services.kvstore.storage.pgmap import PgMap
from services.kvstore.storage.server import MetaServicer
from services.kvstore.store import blocks as blocks_module
from services.kvstore.store import cluster as cluster_module
from services.kvstore.store.blocks import EmbeddedBlocks, NewBlock
from services.kvstore.store.cluster import ClusterBlocks, ClusterConfig
from tests.campaign.explore import Explored, Gate, World, current_actor, explore

KEY = bytes(range(32))
LAYOUT = bytes([9]) * 32
PAYLOADS = {"a": b"A" * 700, "b": b"B" * 700}


def block_of(name: str) -> NewBlock:
    """Returns the block as one of the writers has it: the same key, other bytes."""
    return NewBlock(
        key=KEY, parent=bytes(32), layout=LAYOUT, block_index=1, num_tokens=128, ttl_class=2,
        payload=PAYLOADS[name],
    )  # fmt: skip


class Readings:
    """What readers got; only whole payloads of one writer are right."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def read(self, gate: Gate, get: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        """Reads the key once."""
        await gate.step("begin", lambda: None)
        room: list[bytearray] = []

        def take(num_bytes: int) -> bytearray:
            room.append(bytearray(num_bytes))
            return room[-1]

        found = await get(KEY, LAYOUT, take)
        if found.status is not ReadStatus.OK:
            self.seen.append("miss")
            return
        got = bytes(room[-1])
        names = [name for name, payload in PAYLOADS.items() if payload == got]
        assert names, "a payload that nobody has put"
        self.seen.append(names[0])


class TwoSlots:
    """A disk of two slots whose reads and writes are not atomic: a BlockBackend for one block."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.slots = [bytearray(1200), bytearray(1200)]
        self.index: dict[ShardRef, int] = {}
        self.free = [1, 0]

    def fingerprint(self) -> bytes:
        return repr((self.slots, sorted(self.index.items()), self.free)).encode()

    async def put_shard(self, pieces: Sequence[Any], durable: bool = False) -> PutStatus:
        data = b"".join(map(bytes, pieces))
        header = ShardHeader.parse(data[:128])
        assert header is not None
        slot = await self._gate.step("take slot", lambda: self.free.pop() if self.free else None)
        if slot is None:
            return PutStatus.FULL
        half = len(data) // 2
        await self._gate.step("write half", lambda: self._write(slot, 0, data[:half]))
        await self._gate.step("write rest", lambda: self._write(slot, half, data[half:]))
        ref = ShardRef(header.key16, header.shard, header.put_id)
        await self._gate.step("name slot", lambda: self.index.__setitem__(ref, slot))
        return PutStatus.BUFFERED

    def _write(self, slot: int, at: int, data: bytes) -> None:
        self.slots[slot][at : at + len(data)] = data

    async def get_object(
        self, ref: ShardRef, key: bytes, layout: bytes, out: Any
    ) -> tuple[bytes | None, ReadStatus]:
        slot = await self._gate.step("find slot", lambda: self.index.get(ref))
        if slot is None:
            return None, ReadStatus.ABSENT
        first = await self._gate.step("read half", lambda: bytes(self.slots[slot][:500]))
        data = first + await self._gate.step("read rest", lambda: bytes(self.slots[slot][500:]))
        # What the native store checks of a block stored whole.
        header = ShardHeader.parse(data[:128])
        if header is None or (header.key16, header.shard, header.put_id) != (
            ref.key16, ref.shard, ref.put_id,
        ):  # fmt: skip
            return None, ReadStatus.REUSED
        found = ObjectHeader.parse(data[128:384])
        payload = data[384 : 128 + header.shard_bytes]
        if found is None or found.key != key or found.payload_digest != xxh3_128(payload):
            return None, ReadStatus.PAYLOAD
        memoryview(out)[:] = payload
        return data[128:384], ReadStatus.OK

    def object_bytes(self, ref: ShardRef) -> int | None:
        return 256 + 700 if ref in self.index else None

    async def delete_shards(self, refs: Sequence[ShardRef], erase: bool = False) -> int:
        return await self._gate.step(f"free {len(refs)}", lambda: sum(map(self._free, refs)))

    def _free(self, ref: ShardRef) -> bool:
        slot = self.index.pop(ref, None)
        if slot is None:
            return False
        self._write(slot, 0, bytes(128))
        self.free.append(slot)
        return True

    async def stat(self) -> BackendStat:
        return BackendStat(100, 0, 1200, 2400)


class EmbeddedWorld:
    """One embedded store, used by all."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.clock = VirtualClock()
        self.disk = TwoSlots(gate)
        self.node = Node(self.disk, Meta(None, self.clock.wall_s), self.clock)  # type: ignore[arg-type]
        self.blocks = EmbeddedBlocks(self.node, Waterlines(), clock=self.clock)
        self.readings = Readings()
        self.outcomes: list[str] = []

    def actors(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        return {
            "a": lambda: self._put("a"),
            "b": lambda: self._put("b"),
            "gc": self._evict,
            "reader": lambda: self.readings.read(self._gate, self.blocks.get),
        }

    async def _put(self, name: str) -> None:
        block = block_of(name)
        put_id = await self.blocks.write(block)
        if put_id is not None:
            self.outcomes.append((await self.blocks.commit(block, put_id)).value)

    async def _evict(self) -> None:
        await self._gate.step("decide", lambda: None)
        await self.node.evict([KEY[:16]], "gc")

    def fingerprint(self) -> bytes:
        table = self.node.meta.table.get(KEY[:16])
        return self.disk.fingerprint() + repr((table, self.readings.seen, self.outcomes)).encode()

    def check(self) -> None:
        fields = self.node.meta.get(KEY[:16])
        if fields is not None:
            ref = ShardRef(KEY[:16], 0, fields[0])
            assert ref in self.disk.index, "a record names a shard that was freed"
        named = len(self.disk.index)
        assert named == (fields is not None), f"{named} shards are left behind"
        assert named + len(self.disk.free) == 2, "a slot is lost"


class NodesWorld:
    """Three nodes under 2+1, a STORE for each writer and one for the reader."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.clock = VirtualClock()
        self.pgmap = PgMap(1, Profile(2, 1), (("n0", "n1", "n2"),))
        self.disks: dict[str, dict[ShardRef, bytes]] = {name: {} for name in ("n0", "n1", "n2")}
        self.leader = Leader(
            "n0", Meta(None, self.clock.wall_s, num_groups=1), self, self,  # type: ignore[arg-type]
            repair_bytes_per_s=1e9, clock=self.clock,
        )  # fmt: skip
        self.leader.led = frozenset({0})
        self.primary = MetaServicer(self.leader, self, self.clock)  # type: ignore[arg-type]
        self.readings = Readings()
        self.outcomes: list[str] = []
        config = ClusterConfig(700, hedge_s=1e3, read_timeout_s=1e4, put_timeout_s=1e4)
        self.stores = {
            name: ClusterBlocks(self, self, self, config, self.clock)  # type: ignore[arg-type]
            for name in ("a", "b", "reader")
        }

    # As the view, the links and the index of everybody.
    def up(self) -> dict[str, str]:
        return dict.fromkeys(self.disks, "here")

    def get(self, node: str) -> _MemoryLink:
        return _MemoryLink(self._gate, node, self.disks[node])

    def find(self, key16: bytes) -> Any:
        return self.leader.meta.get(key16)

    def note(self, key16: bytes, fields: Any) -> None:
        pass

    async def tell(self, method: str, request: Any) -> Any:
        """Takes the place of the wire between STORE and the primary."""
        await self._gate.step(method, lambda: None)
        return await getattr(self.primary, method)(request, None)

    def actors(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        return {
            "a": lambda: self._put("a"),
            "b": lambda: self._put("b"),
            "gc": self._evict,
            "reader": lambda: self.readings.read(self._gate, self.stores["reader"].get),
        }

    async def _put(self, name: str) -> None:
        store, block = self.stores[name], block_of(name)
        put_id = await store.write(block)
        if put_id is not None:
            self.outcomes.append((await store.commit(block, put_id)).value)

    async def _evict(self) -> None:
        await self._gate.step("decide", lambda: None)
        await self.leader.evict([KEY[:16]], "gc")

    def fingerprint(self) -> bytes:
        disks = [sorted(disk) for disk in self.disks.values()]
        record = self.leader.meta.table.get(KEY[:16])
        return repr((disks, record, self.readings.seen, self.outcomes)).encode()

    def check(self) -> None:
        fields = self.leader.meta.get(KEY[:16])
        there = {ref.put_id for disk in self.disks.values() for ref in disk}
        if fields is not None:
            assert all(len(disk) == 1 for disk in self.disks.values()), "shards are missing"
            assert there == {fields[0]}, "shards of a put that lost are left behind"
        else:
            assert not there, "shards are left behind"


class _MemoryLink:
    """A node's DATA half, in order: what one sender asks of it arrives one after the other."""

    latency_s = 0.0

    def __init__(self, gate: Gate, node: str, disk: dict[ShardRef, bytes]) -> None:
        self._gate = gate
        self._node = node
        self._disk = disk
        self.meta = _Stub(node)

    def get(self, ref: ShardRef) -> asyncio.Future[tuple[bytes | None, ReadStatus]]:
        return asyncio.ensure_future(self._get(ref))

    async def _get(self, ref: ShardRef) -> tuple[bytes | None, ReadStatus]:
        data = await self._gate.step(f"get {self._node}", lambda: self._disk.get(ref))
        return data, ReadStatus.ABSENT if data is None else ReadStatus.OK

    def put(self, shard: bytes, epoch: int, durable: bool) -> asyncio.Future[PutStatus | None]:
        return asyncio.ensure_future(self._put(shard))

    async def _put(self, shard: bytes) -> PutStatus:
        header = ShardHeader.parse(shard[:128])
        assert header is not None
        ref = ShardRef(header.key16, header.shard, header.put_id)
        # The two writers go through the nodes in opposite orders.
        at = "put" if current_actor.get() == "a" else f"put {9 - int(self._node[1])}"
        await self._gate.step(f"{at} {self._node}", lambda: self._disk.__setitem__(ref, shard))
        return PutStatus.BUFFERED

    async def delete(self, refs: Sequence[ShardRef], epoch: int, erase: bool = False) -> int:
        await self._gate.step(f"free {self._node}", lambda: [self._disk.pop(r, None) for r in refs])
        return len(refs)


class _Stub:
    def __init__(self, node: str) -> None:
        self._node = node

    def __getattr__(self, method: str) -> str:
        return method


@contextmanager
def repeatable(world: Callable[[], NodesWorld | EmbeddedWorld]) -> Iterator[None]:
    """Makes what the code draws and where it runs the same in every run of a schedule."""

    async def inline(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    async def call(method: str, request: Any, *, timeout_s: float) -> Any:
        found = world()
        assert isinstance(found, NodesWorld)
        return await found.tell(method, request)

    names = {"a": 0xA, "b": 0xB}
    draw = mock.Mock(
        randbits=lambda bits: names[current_actor.get()], token_bytes=lambda size: bytes(size)
    )
    with (
        mock.patch.object(blocks_module, "secrets", draw),
        mock.patch.object(cluster_module, "secrets", draw),
        mock.patch.object(cluster_module.asyncio, "to_thread", inline),
        mock.patch.object(cluster_module, "call", call),
    ):
        yield


def explore_races(
    kind: type[World], max_preemptions: int | None = None
) -> tuple[Explored, set[str]]:
    """Explores one kind of store; returns how far, and all that readers ever saw."""
    current: list[Any] = []
    seen: set[str] = set()

    def make(gate: Gate) -> World:
        if current:
            seen.update(current[-1].readings.seen)
        current[:] = [kind(gate)]  # type: ignore[call-arg]
        return current[-1]

    with (
        repeatable(lambda: current[-1]),
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
    ):
        done = runner.run(explore(make, max_preemptions))
    seen.update(itertools.chain.from_iterable(world.readings.seen for world in current))
    return done, seen


def main(argv: list[str] | None = None) -> int:
    """Explores both and says how far it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bound", type=int, help="preemptions at most; default: no bound")
    args = parser.parse_args(argv)
    logging.disable()  # a read that finds nothing is what is looked for here
    for kind in (EmbeddedWorld, NodesWorld):
        done, seen = explore_races(kind, args.bound)
        print(f"{kind.__name__}: {done}, readers saw {sorted(seen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
