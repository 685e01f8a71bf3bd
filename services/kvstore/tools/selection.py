"""Which blocks of a store an export takes, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from services.kvstore.formats import FLAG_APPROXIMATE, ObjectHeader

T = TypeVar("T")


def in_force(found: Iterable[tuple[ObjectHeader, T]]) -> dict[bytes, tuple[ObjectHeader, T]]:
    """Returns one put of each key: an exact one before an approximate one, then the newest."""
    best: dict[bytes, tuple[ObjectHeader, T]] = {}
    for header, place in found:
        known = best.get(header.key)
        if known is None or _rank(header) > _rank(known[0]):
            best[header.key] = (header, place)
    return best


def _rank(header: ObjectHeader) -> tuple[bool, int, int]:
    return not header.flags & FLAG_APPROXIMATE, header.created_ms, header.put_id


def of_tenant(
    blocks: Mapping[bytes, tuple[ObjectHeader, T]], tag: bytes
) -> dict[bytes, tuple[ObjectHeader, T]]:
    """Returns the blocks that carry a tenant's tag."""
    return {key: item for key, item in blocks.items() if item[0].tenant_tag == tag}


def prefix_of(
    blocks: Mapping[bytes, tuple[ObjectHeader, T]], key_start: bytes
) -> dict[bytes, tuple[ObjectHeader, T]]:
    """Returns the block whose key begins so, and all its parents: one prompt's prefix.

    Raises: ValueError when no block, or more than one, has such a key, a parent is missing, or the
        blocks are each other's parents.
    """
    last = [key for key in blocks if key.startswith(key_start)]
    if len(last) != 1:
        raise ValueError(f"{len(last)} blocks have a key that begins so")
    chosen: dict[bytes, tuple[ObjectHeader, T]] = {}
    key = last[0]
    while True:
        item = blocks.get(key)
        if item is None:
            raise ValueError(f"the prefix has a hole before block {len(chosen)} from its end")
        if key in chosen:
            raise ValueError("the prefix has no first block: its blocks go round in a ring")
        chosen[key] = item
        if item[0].block_index <= 1:
            return chosen
        key = item[0].parent


def parents_first(
    blocks: Mapping[bytes, tuple[ObjectHeader, T]],
) -> list[tuple[ObjectHeader, T]]:
    """Returns the blocks in an order in which they can be stored again."""
    return sorted(blocks.values(), key=lambda item: (item[0].block_index, item[0].key))
