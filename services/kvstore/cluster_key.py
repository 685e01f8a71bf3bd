"""The cluster's secret: 32 bytes in a file of their owner; never in etcd, logs or metrics."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from services.common.config import ConfigError
from services.kvstore.hash_chain import CLUSTER_KEY_BYTES


def cluster_key_of(path: str) -> bytes:
    """Returns the cluster's secret from its file, made now if it does not exist.

    Raises: ConfigError for a file of another size, that others may read, or that cannot be used.
    """
    if not path:
        return secrets.token_bytes(CLUSTER_KEY_BYTES)
    try:
        return _of_file(Path(path))
    except OSError as error:
        raise ConfigError(f"cluster_key_file {path}: {error.strerror}") from None


def _of_file(file: Path) -> bytes:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first: two processes that start together agree on one key.
        new = file.with_name(f".{file.name}.{os.getpid()}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(CLUSTER_KEY_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):
            os.link(new, file)
        new.unlink()
    if not file.is_file():
        raise ConfigError("cluster_key_file is no file")
    if file.stat().st_mode & 0o077:
        raise ConfigError("cluster_key_file may be read by others; its mode must be 0600")
    key = file.read_bytes()
    if len(key) != CLUSTER_KEY_BYTES:
        raise ConfigError(f"cluster_key_file must hold {CLUSTER_KEY_BYTES} bytes")
    return key
