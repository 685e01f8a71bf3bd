"""The key files: created once, read again within 5 s of a change, last good view kept.

    <folder>/pepper        32 random bytes, 0600
    <folder>/keys.json     ids, tenants, digests, scopes, limits, expiry; edited by the operator
    <folder>/api-key       the key made on first start, 0600: its only copy

Several entrypoints of one machine share a folder; whoever comes first creates, under a file lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.config import ConfigError
from services.entrypoint.auth import (
    ANONYMOUS_ID,
    Identity,
    StoredKey,
    authenticate,
    digest_key,
    format_keys,
    parse_keys,
)

log = logging.getLogger(__name__)

RELOAD_EVERY_S: Final = 2.0  # well inside the 5 s in which a revocation must work
_PEPPER_BYTES: Final = 32


class KeyStore:
    """Keys as they are in the files; `identify` is what request handlers call."""

    def __init__(
        self, folder: Path, *, anonymous_tenant: str = "", clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._anonymous = Identity(ANONYMOUS_ID, anonymous_tenant) if anonymous_tenant else None
        self._pepper = b""
        self._stored: tuple[StoredKey, ...] = ()
        self._stamp: tuple[int, int] | None = None

    @property
    def key_path(self) -> Path:
        """Returns where the key of the first start lies."""
        return self._folder / "api-key"

    def open(self) -> bool:
        """Reads the files, makes them if they are not there; returns whether a key was made.

        Raises: ConfigError when they cannot be read or written, or are open to others.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._folder / ".lock"):
                self._pepper = self._read_pepper()
                made = not self._keys_path.exists()
                if made:
                    self._make_first_key()
            self._read_keys()
        except (OSError, ValueError) as error:
            raise ConfigError(f"keys: {error}") from None
        return made

    def identify(self, key: str | None) -> Identity:
        """Returns who sent this key. Raises Failure(UNAUTHENTICATED)."""
        if not key and self._anonymous is not None:
            return self._anonymous
        return authenticate(key, self._stored, self._pepper, self._clock.wall_s())

    def reload(self) -> bool:
        """Reads the key file if it changed; a bad file leaves the last good view in force."""
        try:
            if self._stamp == self._stamp_now():
                return False
            self._read_keys()
        except (OSError, ValueError) as error:
            log.error("key file not taken over", extra={"cause": type(error).__name__})
            return False
        log.info("key file taken over", extra={"num_keys": len(self._stored)})
        return True

    async def run(self) -> None:
        """Looks for changes until cancelled."""
        while True:
            await self._clock.sleep(RELOAD_EVERY_S)
            self.reload()

    @property
    def _keys_path(self) -> Path:
        return self._folder / "keys.json"

    def _stamp_now(self) -> tuple[int, int]:
        stat = self._keys_path.stat()
        return stat.st_mtime_ns, stat.st_ino

    def _read_keys(self) -> None:
        stamp = self._stamp_now()
        stored = parse_keys(self._keys_path.read_text(encoding="utf-8"))
        self._stored, self._stamp = stored, stamp

    def _read_pepper(self) -> bytes:
        path = self._folder / "pepper"
        if not path.exists():
            _write_private(path, secrets.token_bytes(_PEPPER_BYTES))
        if path.stat().st_mode & 0o077:
            raise ValueError("pepper is readable by others; its mode must be 0600")
        pepper = path.read_bytes()
        if len(pepper) < _PEPPER_BYTES:
            raise ValueError(f"pepper must hold at least {_PEPPER_BYTES} bytes")
        return pepper

    def _make_first_key(self) -> None:
        key = f"pk-{secrets.token_urlsafe(32)}"
        entry = StoredKey(Identity("first", "default"), digest_key(self._pepper, key))
        _write_private(self.key_path, (key + "\n").encode())
        _write_private(self._keys_path, format_keys([entry]).encode())


def _write_private(path: Path, data: bytes) -> None:
    """Writes a file that nobody else can read, all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
