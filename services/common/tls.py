"""Mutual TLS between services: three PEM files, reloaded when they change (S-03)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.config import ConfigError, require


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of this workload; all three or none."""

    certificate: str = ""  # chain of this instance
    private_key: str = ""
    authority: str = ""  # the CA that signs every workload of this trust domain

    def __post_init__(self) -> None:
        given = [bool(self.certificate), bool(self.private_key), bool(self.authority)]
        require(all(given) or not any(given), "tls needs certificate, private_key and authority")

    @property
    def enabled(self) -> bool:
        """Returns whether TLS is on."""
        return bool(self.certificate)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Returns credentials that demand a client certificate and follow renewed files."""
    first = _certificates(files)
    last = stamp(files)

    def fetch() -> object:
        # Called by gRPC on each handshake: new connections use renewed files, streams stay.
        nonlocal last
        try:
            now = stamp(files)
            if now == last:
                return None
            loaded = _certificates(files)
        except (OSError, ConfigError):
            return None  # half-written: keep what works
        last = now
        return loaded

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Returns credentials for a channel: our certificate, and trust in the authority alone."""
    key, chain, roots = _read(files)
    return grpc.ssl_channel_credentials(roots, key, chain)


def _certificates(files: TlsFiles) -> object:
    key, chain, roots = _read(files)
    return grpc.ssl_server_certificate_configuration([(key, chain)], roots)


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    """Returns key, chain and roots. Raises ConfigError for what is missing or half-written."""
    found = []
    for path in (files.private_key, files.certificate, files.authority):
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"tls: cannot read {path}: {error.strerror}") from None
        if b"-----END" not in text:
            raise ConfigError(f"tls: {path} is not a whole PEM file")
        found.append(text)
    return found[0], found[1], found[2]


def stamp(files: TlsFiles) -> tuple[int, ...]:
    """Returns what changes when any of the files is written. Raises OSError."""
    paths = (files.private_key, files.certificate, files.authority)
    return tuple(Path(path).stat().st_mtime_ns for path in paths)
