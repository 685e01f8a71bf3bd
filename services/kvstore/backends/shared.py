"""Opens the shared storage that a configuration names, and says clearly why it cannot."""

from __future__ import annotations

import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.kvstore.backends.base import SharedBackend, StorageAway
from services.kvstore.backends.medium import Medium
from services.kvstore.backends.posix import PosixMedium
from services.kvstore.backends.redis import RedisBackend, RedisConfig
from services.kvstore.backends.s3 import S3Config, S3Medium
from services.kvstore.backends.segment_writer import SegmentedConfig
from services.kvstore.backends.segmented import SegmentedBackend
from services.kvstore.config import StoreConfig


class WriterLock:
    """Keeps a second process of this machine from writing under the same name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise Failure(
                Reason.CONFLICT, f"another STORE uses {folder}: give each a `dir` of its own"
            ) from None

    def close(self) -> None:
        """Lets another process write."""
        os.close(self._file)


def writer_name(folder: Path, wanted: str) -> str:
    """Returns the name under which this STORE writes; made once and kept on this machine."""
    if wanted:
        return wanted
    path = folder / "writer-id"
    name = _kept(path)
    if not name:
        name = f"w-{secrets.token_hex(8)}"
        path.write_text(f"{name}\n", encoding="ascii")
    return name


def _kept(path: Path) -> str:
    """Returns the line that a file holds; empty when there is no such file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


@dataclass(frozen=True)
class Opened:
    """A shared storage in use by this process."""

    backend: SharedBackend
    lock: WriterLock

    def close(self) -> None:
        """Lets another process write; the backend is closed by its node."""
        self.lock.close()


async def open_shared(config: StoreConfig, clock: Clock) -> Opened:
    """Returns the storage, indexed.

    Raises: Failure(BACKEND_LOST) when it cannot be reached, CONFLICT when another process of this
        machine has the folder, INVALID_REQUEST for a place that is none or a package that is not
        installed.
    """
    lock = WriterLock(config.dir)
    try:
        writer = writer_name(config.dir, config.shared.writer)
        return Opened(await _open(config, writer, clock), lock)
    except StorageAway as error:
        lock.close()
        message = f"the {config.backend} storage cannot be reached: {error}"
        raise Failure(Reason.BACKEND_LOST, message, {"backend": config.backend}) from None
    except ImportError as error:
        lock.close()
        raise Failure(
            Reason.INVALID_REQUEST,
            f"backend {config.backend} needs the package {error.name}: "
            f"install the extra pelagos[{config.backend}]",
        ) from None
    except ValueError as error:
        lock.close()
        raise Failure(Reason.INVALID_REQUEST, str(error)) from None
    except BaseException:
        lock.close()
        raise


async def _open(config: StoreConfig, writer: str, clock: Clock) -> SharedBackend:
    shared = config.shared
    if config.backend == "redis":
        password = _kept(Path(shared.redis_password_file)) if shared.redis_password_file else ""
        return await RedisBackend.open(
            RedisConfig(
                url=config.at,
                writer=writer,
                password=password,
                capacity_bytes=config.capacity_bytes,
                payload_bytes=config.payload_bytes,
                timeout_s=shared.timeout_s,
            ),
            clock,
        )
    medium: Medium
    if config.backend == "posix":
        posix = await PosixMedium.open(Path(config.at), _kept(config.dir / "shared-mark"))
        (config.dir / "shared-mark").write_text(f"{posix.mark}\n", encoding="ascii")
        medium = posix
    else:
        medium = S3Medium(
            S3Config.parse(
                config.at,
                endpoint=shared.s3_endpoint,
                region=shared.s3_region,
                read_timeout_s=shared.timeout_s,
            )
        )
    segmented = SegmentedConfig(
        writer=writer,
        capacity_bytes=config.capacity_bytes,
        segment_bytes=min(config.segment_bytes, max(config.capacity_bytes // 8, 1 << 20)),
        payload_bytes=config.payload_bytes,
        batch_shards=shared.batch_blocks,
        linger_s=shared.linger_ms / 1000,
        timeout_s=shared.timeout_s,
        reap_after_s=shared.reap_after_days * 86_400,
    )
    try:
        return await SegmentedBackend.open(medium, segmented, clock)
    except BaseException:
        await medium.close()
        raise
