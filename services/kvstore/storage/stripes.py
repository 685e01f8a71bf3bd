"""What shards that were found say of a block: which are there, what its record is. Pure.

Source: kvcache-and-balancing.md, sections 7 to 9.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.kvstore.checksums import crc32c
from services.kvstore.erasure import rebuild
from services.kvstore.formats import Record, ShardHeader, State
from services.kvstore.index_table import EPOCH_S
from services.kvstore.placement import SHARD_HEADER_BYTES, Profile
from services.kvstore.storage.pgmap import PgMap


def num_shards_in(bitmap: int) -> int:
    """Returns how many shards a bitmap names."""
    return bitmap.bit_count()


def fits(header: ShardHeader, pgmap: PgMap) -> bool:
    """Returns whether a shard is one of a stripe as the map has them."""
    profile = pgmap.profile
    return header.is_usable and (header.k, header.m) == (profile.k, profile.m)


def bitmap_of(shards: Iterable[int]) -> int:
    """Returns the bitmap that names these shards."""
    bits = 0
    for shard in shards:
        bits |= 1 << shard
    return bits


def num_distinct(shards: Iterable[tuple[ShardHeader, str]]) -> int:
    """Returns how many different shards were found, wherever they lie."""
    return num_shards_in(bitmap_of(header.shard for header, _ in shards))


def bitmap_in_place(shards: Iterable[tuple[ShardHeader, str]], pgmap: PgMap) -> int:
    """Returns which shards lie on the node that the map has them on."""
    return bitmap_of(
        header.shard for header, node in shards if pgmap.node_of(header.key16, header.shard) == node
    )


def state_of(bitmap: int, pgmap: PgMap) -> State:
    """Returns the state of a block with these shards: with less than one to spare, DEGRADED."""
    enough = min(pgmap.profile.k + 1, pgmap.profile.num_shards)
    return State.COMMITTED if num_shards_in(bitmap) >= enough else State.DEGRADED


def record_of(header: ShardHeader, bitmap: int, pgmap: PgMap, epoch: int) -> Record:
    """Returns the record of a block, rebuilt from its shards; used now at the latest, whatever the
    clock of its writer said."""
    return Record(
        put_id=header.put_id,
        block_index=header.block_index,
        created_s=header.created_s,
        access_epoch=min(header.created_s // EPOCH_S, epoch),
        shards=bitmap,
        state=state_of(bitmap, pgmap),
        ttl_class=header.ttl_class,
        flags=header.flags,
        parent16=header.parent16,
    )


def rebuilt_shards(
    shards: dict[int, bytes], targets: list[int], profile: Profile
) -> dict[int, bytes]:
    """Returns whole shards (header and data) for the targets; for a thread."""
    some = sorted(shards.items())[: profile.k]
    template = ShardHeader.parse(some[0][1][:SHARD_HEADER_BYTES])
    assert template is not None
    present = [(index, memoryview(shard)[SHARD_HEADER_BYTES:]) for index, shard in some]
    rebuilt = {}
    for shard, part in zip(targets, rebuild(present, targets, profile), strict=True):
        fields = {**template.__dict__, "shard": shard, "data_crc": crc32c(part)}
        rebuilt[shard] = ShardHeader(**fields).pack() + part
    return rebuilt
