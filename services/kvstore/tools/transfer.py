"""`pelagos kv export` and `import`: blocks of a store to an archive and back, as they are stored.

Both take the flags of `pelagos serve store`, so that they find what that process would find. An
export reads beside the stores that run; so does everything over storage nodes, which are found by
`--runtime.etcd`. An import writes as the store of that configuration, which
must not be running; into a shared storage it may write under a `--dir` of its own instead, beside
the stores that run, and they take the blocks up as they would any other's. An archive is read
through before anything is changed; an import that was broken off is run again and goes on, for
what is there already is left.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.clock import SYSTEM_CLOCK
from services.kvstore.backends.base import ShardRef, SharedBackend, StorageAway
from services.kvstore.backends.shared import open_shared
from services.kvstore.backends.verify import check_object, ref_of
from services.kvstore.config import SHARED_BACKENDS, StoreConfig
from services.kvstore.formats import ObjectHeader, ShardHeader
from services.kvstore.hash_chain import tenant_tag
from services.kvstore.inspect_files import Found, shards_in
from services.kvstore.placement import OBJECT_HEADER_BYTES, SHARD_HEADER_BYTES
from services.kvstore.storage.node import Node
from services.kvstore.storage.shared_node import SharedNode
from services.kvstore.store.blocks import BlockStore, EmbeddedBlocks, NewBlock, Outcome
from services.kvstore.store.cluster import ClusterBlocks
from services.kvstore.store.main import open_node
from services.kvstore.tools.archive import ArchiveWriter, check_archive, read_archive
from services.kvstore.tools.over_nodes import over_nodes
from services.kvstore.tools.selection import in_force, of_tenant, parents_first, prefix_of

_READS_AT_ONCE = 64

Read = Callable[[], Awaitable[bytes | None]]  # an object, header and payload


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    num_blocks: int
    num_bytes: int
    num_damaged: int


@dataclass
class Imported:
    """What became of an archive's blocks."""

    stored: int = 0
    known: int = 0
    without_parent: int = 0
    no_room: int = 0


async def export_blocks(
    config: StoreConfig, out: Path, *, tenant: str = "", chain: bytes = b""
) -> Exported:
    """Writes the blocks of a tenant, or of one prompt's prefix, or all.

    Raises: ValueError for a selection that finds nothing; Failure or StorageAway for a storage that
        is away; OSError.
    """
    if config.backend == "nodes":
        async with over_nodes(config) as blocks:
            return await _export(await _in_nodes(blocks), out, tenant, chain)
    if config.backend in SHARED_BACKENDS:
        # A reader takes no running store's name from it.
        with tempfile.TemporaryDirectory(prefix="pelagos-kv-") as folder:
            opened = await open_shared(replace(config, dir=Path(folder)), SYSTEM_CLOCK)
            try:
                return await _export(await _in_shared(opened.backend), out, tenant, chain)
            finally:
                await opened.backend.close()
                opened.close()
    return await _export(await asyncio.to_thread(_in_files, config.dir), out, tenant, chain)


async def _export(
    found: list[tuple[ObjectHeader, Read]], out: Path, tenant: str, chain: bytes
) -> Exported:
    blocks = in_force(found)
    if tenant:
        blocks = of_tenant(blocks, tenant_tag(tenant))
    if chain:
        blocks = prefix_of(blocks, chain)
    if not blocks:
        raise ValueError("no block fits")
    num_damaged = 0
    with ArchiveWriter(out) as archive:
        for header, read in parents_first(blocks):
            data = await read()
            if data is None or not _is_right(data, header):
                num_damaged += 1
                continue
            archive.add(data)
    return Exported(archive.num_blocks, archive.num_bytes, num_damaged)


def _is_right(data: bytes, wanted: ObjectHeader) -> bool:
    """Returns whether the object is still the one that was listed, whole and sound."""
    head, payload = data[:OBJECT_HEADER_BYTES], data[OBJECT_HEADER_BYTES:]
    header = ObjectHeader.parse(head)
    same_put = header is not None and header.put_id == wanted.put_id
    return same_put and not check_object(head, payload, wanted.key, wanted.layout)


def _in_files(folder: Path) -> list[tuple[ObjectHeader, Read]]:
    """Returns what lies whole in the segment files below a folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    blocks: list[tuple[ObjectHeader, Read]] = []
    for found in shards_in(folder, verify=False):
        if found.header.k != 1:
            raise ValueError("these are files of a storage node: they hold shards, not blocks")
        path = folder / found.file
        header = ObjectHeader.parse(_bytes_at(path, found, OBJECT_HEADER_BYTES))
        if header is not None:
            blocks.append((header, _reader(path, found)))
    return blocks


def _reader(path: Path, found: Found) -> Read:
    async def read() -> bytes | None:
        data = await asyncio.to_thread(_bytes_at, path, found, found.header.object_bytes)
        return data if len(data) == found.header.object_bytes else None

    return read


def _bytes_at(path: Path, found: Found, num_bytes: int) -> bytes:
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(found.offset + SHARD_HEADER_BYTES)
        return file.read(num_bytes)
    return b""


async def _in_shared(backend: SharedBackend) -> list[tuple[ObjectHeader, Read]]:
    """Returns what a shared storage holds."""
    blocks: dict[ShardRef, tuple[ObjectHeader, Read]] = {}  # what moves meanwhile may come twice
    async for headers in backend.list_headers():
        for at in range(0, len(headers), SHARD_HEADER_BYTES):
            shard = ShardHeader.parse(headers[at : at + SHARD_HEADER_BYTES])
            if shard is None:
                continue
            ref = ref_of(shard)
            raw = await backend.object_header(ref)
            header = ObjectHeader.parse(raw) if raw is not None else None
            if header is not None:
                blocks[ref] = (header, _shared_reader(backend, ref))
    return list(blocks.values())


async def _in_nodes(blocks: ClusterBlocks) -> list[tuple[ObjectHeader, Read]]:
    """Returns what storage nodes hold; each block is read once to be known, and again to be
    written, for all of them do not fit into memory."""
    found: list[tuple[ObjectHeader, Read]] = []
    keys = blocks.index.keys()
    for at in range(0, len(keys), _READS_AT_ONCE):
        part = keys[at : at + _READS_AT_ONCE]
        for key16, data in zip(
            part, await asyncio.gather(*map(blocks.read_stored, part)), strict=True
        ):
            header = ObjectHeader.parse((data or b"")[:OBJECT_HEADER_BYTES])
            if header is not None:
                found.append((header, functools.partial(blocks.read_stored, key16)))
    return found


def _shared_reader(backend: SharedBackend, ref: ShardRef) -> Read:
    async def read() -> bytes | None:
        data, _ = await backend.get_shard(ref)
        return None if data is None else data[SHARD_HEADER_BYTES:]

    return read


async def import_blocks(config: StoreConfig, file: Path) -> Imported:
    """Stores the blocks of an archive that are not there yet.

    Raises: ArchiveError before anything is changed, for an archive that is not whole; Failure for
        a storage that is away or in use.
    """
    await asyncio.to_thread(check_archive, file)
    if config.backend == "nodes":
        async with over_nodes(config) as blocks:
            return await _import(blocks, file)
    if config.backend in SHARED_BACKENDS:
        opened = await open_shared(config, SYSTEM_CLOCK)
        try:
            node: Node = await SharedNode.open_shared(opened.backend, None)
            try:
                return await _import_into(node, config, file)
            finally:
                await node.close()
        except StorageAway:
            await opened.backend.close()
            raise
        finally:
            opened.close()
    node = await open_node(config, SYSTEM_CLOCK)
    try:
        return await _import_into(node, config, file)
    finally:
        await node.close()


async def _import_into(node: Node, config: StoreConfig, file: Path) -> Imported:
    done = await _import(EmbeddedBlocks(node, config.lines), file)
    await node.sync()
    return done


async def _import(blocks: BlockStore, file: Path) -> Imported:
    done = Imported()
    for header, payload in read_archive(file):
        block = _new_block(header, payload)
        if blocks.is_stored(block):
            done.known += 1
            continue
        if block.block_index > 1 and blocks.exists(block.parent) != b"\1":
            done.without_parent += 1
            continue
        put_id = await blocks.write(block)
        if put_id is None:
            done.no_room += 1
            continue
        outcome = await blocks.commit(block, put_id)
        done.stored += outcome is Outcome.COMMITTED
        done.known += outcome is Outcome.EXISTS
    return done


def _new_block(header: ObjectHeader, payload: bytes) -> NewBlock:
    return NewBlock(
        key=header.key,
        parent=header.parent,
        layout=header.layout,
        block_index=header.block_index,
        num_tokens=header.num_tokens,
        ttl_class=header.ttl_class,
        payload=payload,
        flags=header.flags,
        writer=header.writer,
        tenant_tag=header.tenant_tag,
        digest=header.payload_digest,
        seal=header.seal,
    )
