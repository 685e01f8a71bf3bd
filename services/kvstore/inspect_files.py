"""Reads the segment files of a store that is not running: what is there, and whether it is sound.

Nothing is locked or changed. Slots begin at pages, so every page that begins like a shard is looked
at; a shard that was deleted may still lie in its slot and is listed with the rest. The headers that
end a segment of a shared storage are no shards, though one in 32 of them begins at a page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.kvstore.backends.segment_index import TRAILER_BYTES, footer_headers
from services.kvstore.checksums import crc32c, xxh3_128
from services.kvstore.formats import ObjectHeader, ShardHeader
from services.kvstore.placement import OBJECT_HEADER_BYTES, PAGE_BYTES, SHARD_HEADER_BYTES


@dataclass(frozen=True)
class Found:
    """One shard in a file. `fault` is empty when everything agrees."""

    file: str
    offset: int
    header: ShardHeader
    fault: str


def shards_in(folder: Path, verify: bool) -> Iterator[Found]:
    """Yields the shards of all segment files below a folder."""
    for path in sorted(folder.rglob("seg-[0-9]*")):
        if path.is_symlink() or not path.is_file():
            continue  # a folder, or a pipe, which would be waited for without end
        try:
            opened = path.open("rb")
        except FileNotFoundError:
            continue  # a store that runs has let it go
        with opened as file:
            size = os.fstat(file.fileno()).st_size
            end = size - _footer_bytes(file, size)
            for offset in range(0, end - SHARD_HEADER_BYTES + 1, PAGE_BYTES):
                file.seek(offset)
                header = ShardHeader.parse(file.read(SHARD_HEADER_BYTES))
                if header is None:
                    continue
                # A length that lies makes no room for what the file does not have.
                data = file.read(min(header.shard_bytes, size)) if verify else b""
                fault = _fault_of(header, data) if verify else ""
                yield Found(str(path.relative_to(folder)), offset, header, fault)


def _footer_bytes(file: BinaryIO, size: int) -> int:
    """Returns how much of a file is the list of its headers; 0 when it has none that is whole."""
    need = min(TRAILER_BYTES, size)
    while need:
        file.seek(size - need)
        tail = file.read(need)
        headers, more = footer_headers(tail)
        if headers is not None:
            return len(headers) * SHARD_HEADER_BYTES + TRAILER_BYTES
        # A count that lies asks for more than the file has.
        need = more if need < more <= size else 0
    return 0


def _fault_of(header: ShardHeader, data: bytes) -> str:
    if len(data) != header.shard_bytes:
        return "cut short"
    if crc32c(data) != header.data_crc:
        return "checksum"
    if header.k == 1:
        found = ObjectHeader.parse(data[:OBJECT_HEADER_BYTES])
        payload = data[OBJECT_HEADER_BYTES : header.object_bytes]
        if found is None:
            return "object header"
        if found.key[:16] != header.key16:
            return "key"
        if found.payload_bytes != len(payload) or found.payload_digest != xxh3_128(payload):
            return "payload"
    return ""
