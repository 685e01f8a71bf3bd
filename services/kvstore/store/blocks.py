"""Blocks as STORE reads and writes them, over whatever holds their shards.

`EmbeddedBlocks` keeps every block whole in one node of this process. The erasure-coded cluster
(`store/cluster.py`) offers the same methods.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from services.common.clock import SYSTEM_CLOCK, Clock
from services.kvstore.backends.base import PutStatus, ReadStatus, ShardRef
from services.kvstore.checksums import Buffer, crc32c, xxh3_128
from services.kvstore.erasure import cut
from services.kvstore.formats import (
    EC_CAUCHY,
    EC_REPLICATION,
    FLAG_APPROXIMATE,
    FLAG_SEALED,
    NO_KEY16,
    NO_SEAL,
    ObjectHeader,
    Record,
    State,
    pack_object_header,
    pack_shard_header,
)
from services.kvstore.gc.policy import Waterlines, admits_put
from services.kvstore.index_table import EPOCH_S
from services.kvstore.limits import PIN_TTL_S
from services.kvstore.placement import OBJECT_HEADER_BYTES, WHOLE, Profile, shard_bytes
from services.kvstore.seal import Sealer
from services.kvstore.storage.meta import CommitOutcome, LogPart
from services.kvstore.storage.node import Node

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewBlock:
    """A finished block on its way into the store."""

    key: bytes
    parent: bytes  # the root for the first block
    layout: bytes
    block_index: int  # 1-based
    num_tokens: int
    ttl_class: int
    payload: Buffer
    flags: int = 0
    writer: bytes = bytes(16)
    tenant_tag: bytes = bytes(16)
    digest: bytes = b""  # as the writer computed it; empty: not known
    seal: bytes = NO_SEAL  # nonce and tag when the payload is encrypted

    @property
    def parent16(self) -> bytes:
        """Returns the parent's index key; zeros for the first block, whose parent is the root."""
        return NO_KEY16 if self.block_index <= 1 else self.parent[:16]


class Outcome(enum.Enum):
    """How a put ended."""

    COMMITTED = "committed"
    EXISTS = "exists"
    NO_PARENT = "no_parent"
    DROPPED = "dropped"
    TORN = "torn"  # the bytes are not those the writer made


@dataclass(frozen=True)
class BlockRead:
    """How a read ended. The payload is in the buffer given, `num_bytes` long, only when OK."""

    status: ReadStatus
    num_bytes: int = 0
    approximate: bool = False


@dataclass(frozen=True)
class StoreStat:
    """Counts of a block store."""

    num_blocks: int
    used_bytes: int
    capacity_bytes: int
    backend: str
    num_pins: int


# Gives a buffer of exactly so many bytes, or None when there is none so large.
Room = Callable[[int], Buffer | None]


class BlockStore(Protocol):
    """What STORE needs of the storage below it."""

    def block_bytes(self, key: bytes) -> int | None:
        """Returns about how long a stored block is, exactly where that is known without reading;
        None when it is not known to be stored."""
        ...

    async def get(self, key: bytes, layout: bytes, room: Room) -> BlockRead:
        """Reads a block into what `room` gives for its length, and checks all of it."""
        ...

    def is_stored(self, block: NewBlock) -> bool:
        """Returns whether a put of the block would change nothing."""
        ...

    async def write(self, block: NewBlock) -> int | None:
        """Writes the shards of a block, visible to nobody yet; returns the put id, None when
        there is no room."""
        ...

    async def commit(self, block: NewBlock, put_id: int) -> Outcome:
        """Makes a written block visible, or takes its shards back."""
        ...

    async def take_back(self, block: NewBlock, put_id: int) -> None:
        """Frees the shards of a write that will not be committed."""
        ...

    def exists(self, keys: bytes) -> bytes:
        """Returns a byte per key of 32 bytes, 1 when stored."""
        ...

    def index_of(self, key: bytes) -> int | None:
        """Returns the number of a stored block in its chain; None when it is not stored."""
        ...

    async def touch(self, keys: bytes, ttl_class: int) -> int:
        """Renews access of blocks; returns how many moved."""
        ...

    async def pin(self, pin_id: str, keys16: bytes, ttl_s: float) -> int:
        """Holds blocks against eviction; no keys release the pin."""
        ...

    async def renew_pin(self, pin_id: str) -> None:
        """Gives a pin new life."""
        ...

    def follow(
        self, log_id: str, from_seq: int, heartbeat_s: float
    ) -> AsyncGenerator[LogPart, None]:
        """Yields the commit log for ever."""
        ...

    def wake_followers(self) -> None:
        """Makes every follower of the log come round at once."""
        ...

    async def delete_tenant(self, tag: bytes) -> int:
        """Erases a tenant's blocks; returns how many."""
        ...

    async def stat(self) -> StoreStat:
        """Returns the counts."""
        ...


class EmbeddedBlocks:
    """Every block whole, in one node of this process."""

    def __init__(
        self,
        node: Node,
        lines: Waterlines,
        *,
        durable: bool = False,
        name: str = "local",
        sealer: Sealer | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._node = node
        self._meta = node.meta
        self._lines = lines
        self._durable = durable
        self._name = name
        self._sealer = sealer
        self._clock = clock
        self.num_corrupt = 0
        self.num_sealed_away = 0  # reads of blocks that our key does not open
        self.wants_room = asyncio.Event()  # set when a put was refused for want of a slot

    def block_bytes(self, key: bytes) -> int | None:
        """Returns the payload length of a stored block."""
        fields = self._meta.get(key[:16])
        if fields is None:
            return None
        length = self._node.backend.object_bytes(ShardRef(key[:16], 0, fields[0]))
        return None if length is None else length - OBJECT_HEADER_BYTES

    async def get(self, key: bytes, layout: bytes, room: Room) -> BlockRead:
        """Reads and checks a block; one that proves damaged is forgotten."""
        fields = self._meta.get(key[:16])
        size = self.block_bytes(key)
        if fields is None or size is None:
            return BlockRead(ReadStatus.ABSENT)
        out = room(size)
        if out is None:
            return BlockRead(ReadStatus.WRONG_LAYOUT)
        ref = ShardRef(key[:16], 0, fields[0])
        header, status = await self._node.backend.get_object(ref, key, layout, out)
        if header is not None:
            status = unseal(self._sealer, header, out)
        if status is not ReadStatus.OK:
            self.num_corrupt += status.is_damage
            self.num_sealed_away += status is ReadStatus.SEALED
            # What nobody here can open is forgotten too, or it would keep its key for days.
            is_gone = status.is_damage or status in (ReadStatus.ABSENT, ReadStatus.SEALED)
            if is_gone:
                await self._node.drop(key[:16], fields[0])
            return BlockRead(status)
        return BlockRead(ReadStatus.OK, len(out), bool(fields[7] & FLAG_APPROXIMATE))

    def is_stored(self, block: NewBlock) -> bool:
        """Returns whether a put would change nothing: an exact block takes an approximate one's
        place, never the other way round."""
        fields = self._meta.get(block.key[:16])
        if fields is None:
            return False
        return bool(block.flags & FLAG_APPROXIMATE) or not fields[7] & FLAG_APPROXIMATE

    async def write(self, block: NewBlock) -> int | None:
        """Writes the block whole; None when there is no room."""
        num_slots, num_used = await self._node.usage()
        if num_used > self._lines.high * num_slots:
            self.wants_room.set()
        if not admits_put(num_slots, num_used, block.ttl_class, self._lines):
            return None
        put_id = secrets.randbits(64)
        pieces = whole_shard(sealed(self._sealer, block), put_id, self._clock.wall_s())
        try:
            status = await self._node.backend.put_shard(pieces, self._durable)
        except ValueError:
            # Larger than a slot: the configuration's payload_bytes is not this model's.
            log.error("block does not fit a slot", extra={"num_bytes": len(block.payload)})
            return None
        if status is PutStatus.FULL:
            self.wants_room.set()
        return put_id if status.is_stored else None

    async def commit(self, block: NewBlock, put_id: int) -> Outcome:
        """Makes a written block visible; the first commit of a key wins."""
        now_s = int(self._clock.wall_s())
        record = Record(
            put_id=put_id,
            block_index=block.block_index,
            created_s=now_s,
            access_epoch=now_s // EPOCH_S,
            shards=1,
            state=State.COMMITTED,
            ttl_class=block.ttl_class,
            flags=block.flags,
            parent16=block.parent16,
        )
        if self._node.backend.object_bytes(ShardRef(block.key[:16], 0, put_id)) is None:
            return Outcome.DROPPED  # its tenant's blocks were erased meanwhile
        done = self._meta.commit(block.key[:16], record)
        if done.outcome in (CommitOutcome.EXISTS, CommitOutcome.NO_PARENT):
            await self.take_back(block, put_id)
            exists = done.outcome is CommitOutcome.EXISTS
            return Outcome.EXISTS if exists else Outcome.NO_PARENT
        if done.replaced_put_id is not None:
            await self._node.backend.delete_shards(
                [ShardRef(block.key[:16], 0, done.replaced_put_id)]
            )
        if self._durable:
            await asyncio.to_thread(self._meta.sync)
        return Outcome.COMMITTED

    async def take_back(self, block: NewBlock, put_id: int) -> None:
        """Frees the shard of a write that will not be committed."""
        await self._node.backend.delete_shards([ShardRef(block.key[:16], 0, put_id)])

    def exists(self, keys: bytes) -> bytes:
        """Returns a byte per key, 1 when stored."""
        return bytes(self._meta.has(keys[at : at + 16]) for at in range(0, len(keys), 32))

    def index_of(self, key: bytes) -> int | None:
        """Returns the number of a stored block in its chain."""
        fields = self._meta.get(key[:16])
        return None if fields is None else fields[1]

    async def touch(self, keys: bytes, ttl_class: int) -> int:
        """Renews access of blocks."""
        return self._meta.touch(keys, 32, ttl_class)

    async def pin(self, pin_id: str, keys16: bytes, ttl_s: float) -> int:
        """Holds blocks against eviction."""
        return self._meta.pin(pin_id, keys16, ttl_s, self._clock.now_s())

    async def renew_pin(self, pin_id: str) -> None:
        """Gives a pin new life."""
        self._meta.renew_pin(pin_id, PIN_TTL_S, self._clock.now_s())

    def follow(
        self, log_id: str, from_seq: int, heartbeat_s: float
    ) -> AsyncGenerator[LogPart, None]:
        """Yields the commit log for ever."""
        return self._meta.follow(log_id, from_seq, heartbeat_s)

    def wake_followers(self) -> None:
        """Makes every follower of the log come round at once."""
        self._meta.wake_followers()

    async def delete_tenant(self, tag: bytes) -> int:
        """Erases a tenant's blocks."""
        return await self._node.delete_tenant(tag)

    async def stat(self) -> StoreStat:
        """Returns the counts."""
        stat = await self._node.backend.stat()
        blocks = sum(n for state, _, n in self._meta.table.census() if state <= State.DEGRADED)
        return StoreStat(
            blocks,
            stat.num_used * stat.slot_bytes,
            stat.num_slots * stat.slot_bytes,
            self._name,
            self._meta.num_pins,
        )


def sealed(sealer: Sealer | None, block: NewBlock) -> NewBlock:
    """Returns the block as it is to be stored."""
    if sealer is None:
        return block
    payload, seal = sealer.seal(block.payload, block.tenant_tag, block.key, block.layout)
    flags = block.flags | FLAG_SEALED
    return replace(block, payload=payload, seal=seal, flags=flags, digest=xxh3_128(payload))


def unseal(sealer: Sealer | None, header: bytes, payload: Buffer) -> ReadStatus:
    """Opens a payload in place if it is encrypted; SEALED, and unusable, when our key does not."""
    found = ObjectHeader.parse(header)
    assert found is not None, "the backend has checked it"
    if not found.flags & FLAG_SEALED:
        return ReadStatus.OK
    if sealer is None:
        return ReadStatus.SEALED
    is_open = sealer.open(payload, found.seal, found.tenant_tag, found.key, found.layout)
    return ReadStatus.OK if is_open else ReadStatus.SEALED


def object_header(block: NewBlock, put_id: int, wall_s: float) -> bytes:
    """Returns the header of a block's object."""
    return pack_object_header(
        key=block.key,
        parent=block.parent,
        layout=block.layout,
        block_index=block.block_index,
        num_tokens=block.num_tokens,
        ttl_class=block.ttl_class,
        payload_bytes=len(block.payload),
        payload_digest=block.digest or xxh3_128(block.payload),
        put_id=put_id,
        created_ms=int(wall_s * 1000),
        writer=block.writer,
        tenant_tag=block.tenant_tag,
        flags=block.flags,
        seal=block.seal,
    )


def whole_shard(block: NewBlock, put_id: int, wall_s: float) -> list[Buffer]:
    """Returns the pieces of the one shard of a block stored whole."""
    header = object_header(block, put_id, wall_s)
    data_crc = crc32c(block.payload, crc32c(header))
    return [_shard_header(block, put_id, wall_s, WHOLE, data_crc), header, block.payload]


def cut_shards(block: NewBlock, put_id: int, wall_s: float, profile: Profile) -> list[bytes]:
    """Returns all shards of a block, header and data."""
    header = _shard_header(block, put_id, wall_s, profile)
    return cut(header, [object_header(block, put_id, wall_s), block.payload], profile)


def _shard_header(
    block: NewBlock, put_id: int, wall_s: float, profile: Profile, data_crc: int = 0
) -> bytes:
    size = OBJECT_HEADER_BYTES + len(block.payload)
    return pack_shard_header(
        shard=0,
        k=profile.k,
        m=profile.m,
        algorithm=EC_REPLICATION if profile.k == 1 else EC_CAUCHY,
        ttl_class=block.ttl_class,
        shard_bytes=shard_bytes(size, profile),
        object_bytes=size,
        block_index=block.block_index,
        key16=block.key[:16],
        parent16=block.parent16,
        put_id=put_id,
        created_s=int(wall_s),
        data_crc=data_crc,
        flags=block.flags,
    )
