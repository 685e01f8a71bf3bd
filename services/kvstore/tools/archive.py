"""A file of blocks that checks itself: what `pelagos kv export` writes and `import` reads.

    "PELKVAR1", then per block: "BLK1", u32 length, object header (256 B) and payload, and the
    xxh3-128 of those; last "END1", u64 count, SHA-256 of everything before it.

Blocks are as they are stored, encrypted ones too, parents before their children. A file without its
end is no archive: it is written under another name and renamed when it is whole and on the disk.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

from services.kvstore.checksums import xxh3_128
from services.kvstore.formats import ObjectHeader
from services.kvstore.placement import OBJECT_HEADER_BYTES

_MAGIC: Final = b"PELKVAR1"
_BLOCK, _END = b"BLK1", b"END1"
_HEAD: Final = struct.Struct("<4sI")
_TAIL: Final = struct.Struct("<4sQ32s")
_DIGEST_BYTES: Final = 16
# A length past this is damage, and must not be allocated.
_MAX_OBJECT_BYTES: Final = 64 << 20


class ArchiveError(ValueError):
    """A file that is no archive, or is not whole; says where."""


class ArchiveWriter:
    """Writes an archive; `with` makes it appear whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Under a name of its own: two exports at a time do not write into one file, and nobody who
        # may write into the folder can have laid one of that name out for us.
        self._draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None
        self.num_blocks = 0
        self.num_bytes = 0

    def __enter__(self) -> ArchiveWriter:
        # KV is user data: nobody else reads it (S-11).
        try:
            descriptor = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            # By the name that was asked for; the other one is nobody's business.
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self._path)) from None
        self._file = os.fdopen(descriptor, "wb")
        self._write(_MAGIC)
        return self

    def add(self, object_bytes: bytes) -> None:
        """Adds one object, header and payload."""
        self._write(_HEAD.pack(_BLOCK, len(object_bytes)))
        self._write(object_bytes)
        self._write(xxh3_128(object_bytes))
        self.num_blocks += 1

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._hash.update(data)
        self._file.write(data)
        self.num_bytes += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            with self._file as file:
                if kind is None:
                    file.write(_TAIL.pack(_END, self.num_blocks, self._hash.digest()))
                    file.flush()
                    os.fsync(file.fileno())
            if kind is None:
                self._draft.rename(self._path)
        finally:
            # Also when what was buffered finds the disk full, or the name is that of a folder.
            self._draft.unlink(missing_ok=True)


def read_archive(path: Path) -> Iterator[tuple[ObjectHeader, bytes]]:
    """Yields (header, payload) of every block, each checked before it is given.

    Raises: ArchiveError at the first fault, also for a missing end; OSError.
    """
    if not path.is_file() and path.exists():
        raise ArchiveError("this is no file")  # of a pipe nobody may ever write the end
    with path.open("rb") as file:
        digest = hashlib.sha256()
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ArchiveError("this is no archive of blocks")
        digest.update(_MAGIC)
        count = 0
        while True:
            where = f"block {count + 1}"
            start = file.read(_HEAD.size)
            if start[:4] == _END:
                _check_end(start + file.read(_TAIL.size - _HEAD.size), count, digest.digest())
                if file.read(1):
                    raise ArchiveError("there is more behind the end")
                return
            if len(start) < _HEAD.size or start[:4] != _BLOCK:
                raise ArchiveError(f"{where}: damaged, or the file is cut short")
            length = _HEAD.unpack(start)[1]
            if not OBJECT_HEADER_BYTES < length <= _MAX_OBJECT_BYTES:
                raise ArchiveError(f"{where}: a length of {length} bytes")
            data, sum_ = file.read(length), file.read(_DIGEST_BYTES)
            if len(sum_) < _DIGEST_BYTES:
                raise ArchiveError(f"{where}: the file is cut short")
            if xxh3_128(data) != sum_:
                raise ArchiveError(f"{where}: damaged")
            header, payload = ObjectHeader.parse(data[:OBJECT_HEADER_BYTES]), data[256:]
            if header is None or header.payload_bytes != len(payload):
                raise ArchiveError(f"{where}: its header is damaged")
            if not header.is_usable:
                raise ArchiveError(f"{where}: its header says what no store writes")
            if header.payload_digest != xxh3_128(payload):
                raise ArchiveError(f"{where}: its payload is not what was stored")
            for part in (start, data, sum_):
                digest.update(part)
            count += 1
            yield header, payload


def _check_end(raw: bytes, count: int, digest: bytes) -> None:
    if len(raw) < _TAIL.size:
        raise ArchiveError("the file is cut short in its end")
    _, told, sum_ = _TAIL.unpack(raw)
    if told != count:
        raise ArchiveError(f"{count} blocks are there, {told} were written")
    if sum_ != digest:
        raise ArchiveError("blocks are missing, doubled or in another order")


def check_archive(path: Path) -> int:
    """Returns how many blocks a whole archive has. Raises ArchiveError; OSError."""
    return sum(1 for _ in read_archive(path))
