"""A folder that several hosts mount as a medium: 3FS, CephFS, Lustre, GlusterFS, NFS, or one disk.

What it asks of the file system is little: one writer per file, whole writes at the end of a file,
fdatasync, creation that fails for a name that exists, and a rename to a name that does not. No
locks, no shared writers, no rename over a file, no change of bytes once written: caches of other
hosts cannot hold anything stale. A file holds many blocks, for metadata services drown in small
files. Source: kvcache-and-balancing.md, section 11.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from services.kvstore.backends.base import StorageAway, StorageFull
from services.kvstore.backends.segment_index import is_ours
from services.kvstore.checksums import Buffer

T = TypeVar("T")
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# A byte range that cannot be read is damage; all else says that the mount is not there for us.
_DAMAGE: Final = frozenset((errno.EIO, errno.EBADMSG, errno.EISDIR, errno.EINVAL))
_MARK: Final = "pelagos-kv"
_MAX_PIECES: Final = 512  # of one call; the limit of the system is 1,024


class PosixMedium:
    """Files below one folder, which must exist: a mount that is not there must not be taken for an
    empty store. A mark in it tells the two apart. Create with `await PosixMedium.open(...)`."""

    appends = True

    def __init__(self, folder: Path, num_threads: int = 8) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-shared")
        self._is_closed = False
        self.mark = ""

    @classmethod
    async def open(cls, folder: Path, known_mark: str = "") -> PosixMedium:
        """Returns the medium; its `mark` is to be given the next time.

        Raises: StorageAway for a folder that is not there or not the one of that mark.
        """
        medium = cls(folder)
        try:
            medium.mark = await medium._run(medium._mark, not known_mark)
            if known_mark not in ("", medium.mark):
                raise StorageAway("the folder is not the one that was used before")
        except FileNotFoundError:
            await medium.close()
            raise StorageAway("the folder is not there, or was never used by a store") from None
        except BaseException:
            await medium.close()
            raise
        return medium

    def _mark(self, may_make: bool) -> str:
        path = self._folder / _MARK
        try:
            return path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            if not may_make:
                raise
        draft = path.with_name(f".{secrets.token_hex(8)}")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, f"{secrets.token_hex(16)}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
        try:
            # Unlike a rename, it fails where another host was faster.
            os.link(draft, path)
        except OSError as error:
            if error.errno != errno.EEXIST and not path.exists():
                os.rename(draft, path)  # a file system without links
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        _sync_folder(self._folder)
        return path.read_text(encoding="ascii").strip()

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        if self._is_closed:
            raise StorageAway("closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, functools.partial(work, *args))
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            if error.errno in _FULL:
                raise StorageFull(os.strerror(error.errno or 0)) from error
            if error.errno in _DAMAGE:
                raise
            raise StorageAway(os.strerror(error.errno or 0)) from error

    async def names(self) -> set[str]:
        """Returns all names. Raises StorageAway."""
        try:
            return await self._run(self._names)
        except OSError as error:
            raise StorageAway(os.strerror(error.errno or 0)) from error

    def _names(self) -> set[str]:
        found = set()
        if not (self._folder / _MARK).exists():
            raise OSError(errno.ENODEV, "the folder is not mounted")
        writers = [entry.name for entry in os.scandir(self._folder) if entry.is_dir()]
        for writer in writers:
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(self._folder / writer):
                    name = f"{writer}/{entry.name}"
                    if is_ours(name):
                        found.add(name)
        return found

    async def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Returns a range; see Medium."""
        return await self._run(self._read, name, offset, num_bytes)

    def _read(self, name: str, offset: int, num_bytes: int) -> bytes:
        # Opened each time: that is what makes NFS and its kind look at the file anew.
        file = os.open(self._folder / name, os.O_RDONLY)
        try:
            return os.pread(file, num_bytes, offset)
        finally:
            os.close(file)

    async def tail(self, name: str, num_bytes: int) -> tuple[bytes, int]:
        """Returns the last bytes and the whole length."""
        return await self._run(self._tail, name, num_bytes)

    def _tail(self, name: str, num_bytes: int) -> tuple[bytes, int]:
        file = os.open(self._folder / name, os.O_RDONLY)
        try:
            size = os.fstat(file).st_size
            return os.pread(file, num_bytes, max(size - num_bytes, 0)), size
        finally:
            os.close(file)

    async def create(self, name: str, pieces: Sequence[Buffer]) -> None:
        """Writes a new file, whole or not at all; see Medium."""
        await self._run(self._create, name, pieces)

    def _create(self, name: str, pieces: Sequence[Buffer]) -> None:
        path = self._folder / name
        if not (self._folder / _MARK).exists():
            raise OSError(errno.ENODEV, "the folder is not mounted")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not pieces:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            _sync_folder(path.parent)
            return
        # Under a name that nobody reads first; then it appears at once and complete.
        if path.exists():
            raise FileExistsError(name)
        draft = path.with_name(f".{path.name}")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(file, 0, pieces)
            os.fsync(file)
        except OSError:
            os.unlink(draft)
            raise
        finally:
            os.close(file)
        os.rename(draft, path)
        _sync_folder(path.parent)

    async def append(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        """Writes at the end of a file of ours; see Medium."""
        await self._run(self._append, name, offset, pieces)

    def _append(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        file = os.open(self._folder / name, os.O_WRONLY)
        try:
            _write_all(file, offset, pieces)
            os.fdatasync(file)
            # Taken away or removed meanwhile: whoever did that may not have seen what we wrote.
            if os.stat(self._folder / name).st_ino != os.fstat(file).st_ino:
                raise FileNotFoundError(name)
        finally:
            os.close(file)

    async def take(self, name: str, new: str) -> None:
        """Makes somebody else's file ours; see Medium."""
        await self._run(self._take, name, new)

    def _take(self, name: str, new: str) -> None:
        source, target = self._folder / name, self._folder / new
        target.parent.mkdir(mode=0o700, exist_ok=True)
        if target.exists():
            raise FileExistsError(new)
        os.rename(source, target)
        _sync_folder(target.parent)
        _sync_folder(source.parent)

    async def delete(self, name: str) -> None:
        """Removes a file."""
        await self._run(self._delete, name)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / name)

    async def close(self) -> None:
        """Lets go; a call that hangs in the file system is not waited for."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


def _write_all(file: int, offset: int, pieces: Sequence[Buffer]) -> None:
    for at in range(0, len(pieces), _MAX_PIECES):
        part = list(pieces[at : at + _MAX_PIECES])
        size = sum(map(len, part))
        written = os.pwritev(file, part, offset)
        if written != size:  # cut short by a device that is full, or by a signal: once more, whole
            whole = b"".join(bytes(piece) for piece in part)
            while written < size:
                done = os.pwrite(file, whole[written:], offset + written)
                if done == 0:
                    raise OSError(errno.ENOSPC, "the file is cut short")
                written += done
        offset += size


def _sync_folder(folder: Path) -> None:
    """Makes a new name durable; some file systems have no fsync of folders and need none."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(file)
