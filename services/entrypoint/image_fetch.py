"""Fetching images by address: off unless enabled, and then only from where it may.

The name is resolved once, every answer is checked, and the connection goes to a checked address;
so a name that changes its answer between check and use gains nothing. Each redirect starts over.
No proxy, no cookie, no header of the caller goes out, and nothing but the image's bytes comes
back: refused, unreachable and not-an-image read the same.
Source: reliability-and-security.md, S-04 and section 3; recipe.md, section 11.2.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urljoin

from services.common.errors import Failure, Reason
from services.entrypoint.address_policy import (
    Address,
    Target,
    UrlPolicy,
    check_answers,
    check_url,
    refused,
    unreachable,
)
from services.entrypoint.auth import Identity

MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_HEADER_BYTES: Final = 32 * 1024
_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

Resolve = Callable[[str, int], Awaitable[list[str]]]
Connect = Callable[[Address, Target], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True)
class FetchLimits:
    """Bounds of fetching."""

    max_image_bytes: int = 32 * 1024 * 1024
    max_total_bytes: int = 64 * 1024 * 1024
    connect_timeout_s: float = 5.0
    total_timeout_s: float = 20.0
    parallel_per_request: int = 8
    parallel_per_key: int = 16
    parallel: int = 64
    wait_timeout_s: float = 5.0


class ImageFetcher:
    """Fetches the images of requests; one object per process."""

    def __init__(
        self,
        policy: UrlPolicy | None,
        limits: FetchLimits | None = None,
        *,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._policy = policy  # None: switched off
        self._limits = limits or FetchLimits()
        self._resolve = resolve or resolve_host
        self._connect = connect or connect_to
        self._places = asyncio.Semaphore(self._limits.parallel)
        self._by_key: Counter[str] = Counter()

    @property
    def num_active(self) -> int:
        """Returns the fetches in progress; a row of the census."""
        return self._by_key.total()

    async def inline(self, body: bytes, urls: Sequence[str], identity: Identity) -> bytes:
        """Returns the body with each address replaced by a data URL of what it leads to.

        Raises: Failure(IMAGE_BLOCKED, IMAGE_FETCH, OVERLOADED).
        """
        if self._policy is None:
            raise refused()
        wanted = list(dict.fromkeys(urls))
        for url in wanted:
            check_url(url, self._policy)  # all of them, before any packet leaves
        found: dict[str, bytes] = {}
        try:
            async with asyncio.timeout(self._limits.total_timeout_s):
                for start in range(0, len(wanted), self._limits.parallel_per_request):
                    batch = wanted[start : start + self._limits.parallel_per_request]
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(self._one(url, identity)) for url in batch]
                    found.update(zip(batch, (task.result() for task in tasks), strict=True))
                    if sum(map(len, found.values())) > self._limits.max_total_bytes:
                        raise unreachable()
        except TimeoutError:
            raise unreachable() from None
        except BaseExceptionGroup as group_error:
            raise _first_failure(group_error) from None
        return await asyncio.to_thread(_replace_urls, body, found)

    async def _one(self, url: str, identity: Identity) -> bytes:
        if self._by_key[identity.key_id] >= self._limits.parallel_per_key:
            raise _busy()
        self._by_key[identity.key_id] += 1
        try:
            try:
                async with asyncio.timeout(self._limits.wait_timeout_s):
                    await self._places.acquire()
            except TimeoutError:
                raise _busy() from None
            try:
                return await self.fetch(url)
            finally:
                self._places.release()
        finally:
            self._by_key[identity.key_id] -= 1
            if not self._by_key[identity.key_id]:
                del self._by_key[identity.key_id]

    async def fetch(self, url: str) -> bytes:
        """Returns the bytes of one image. Raises Failure(IMAGE_BLOCKED, IMAGE_FETCH)."""
        if self._policy is None:
            raise refused()
        target = check_url(url, self._policy)
        for _ in range(MAX_REDIRECTS + 1):
            try:
                location, data = await self._get(target)
            except (OSError, TimeoutError, ValueError, EOFError, ssl.SSLError):
                raise unreachable() from None
            if location is None:
                if _media_type(data) is None:
                    raise unreachable()
                return data
            base = f"{target.scheme}://{target.host}{target.path}"
            target = check_url(urljoin(base, location), self._policy, came_from=target)
        raise unreachable()

    async def _get(self, target: Target) -> tuple[str | None, bytes]:
        """Returns where a redirect points, or the body."""
        assert self._policy is not None
        async with asyncio.timeout(self._limits.connect_timeout_s):
            if target.literal is not None:
                addresses: list[Address] = [target.literal]
            else:
                answers = await self._resolve(target.host, target.port)
                addresses = check_answers(answers, self._policy)
            reader, writer = await self._connect(addresses[0], target)
        try:
            writer.write(
                f"GET {target.path} HTTP/1.1\r\nHost: {target.host}\r\n"
                "Accept: image/png, image/jpeg, image/webp, image/gif\r\n"
                "User-Agent: pelagos\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            status, headers = _parse_head(head)
            if status in _REDIRECTS and "location" in headers:
                return headers["location"], b""
            if status != 200 or headers.get("content-encoding", "identity") != "identity":
                raise ValueError("no image")
            return None, await _read_content(reader, headers, self._limits.max_image_bytes)
        finally:
            writer.close()


async def resolve_host(host: str, port: int) -> list[str]:
    """Returns every address of a name."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


async def connect_to(
    address: Address, target: Target
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a checked address, never to a name; TLS is verified against the name."""
    is_tls = target.scheme == "https"
    return await asyncio.open_connection(
        str(address),
        target.port,
        ssl=ssl.create_default_context() if is_tls else None,
        server_hostname=target.host.strip("[]") if is_tls else None,
        limit=_MAX_HEADER_BYTES,
    )


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("not HTTP")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers


async def _read_content(
    reader: asyncio.StreamReader, headers: dict[str, str], max_bytes: int
) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunked(reader, max_bytes)
    length = headers.get("content-length")
    if length is not None and int(length) > max_bytes:
        raise ValueError("too large")
    pieces: list[bytes] = []
    num_bytes = 0
    while piece := await reader.read(64 * 1024):
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise ValueError("too large")
        pieces.append(piece)
    if length is not None and num_bytes < int(length):
        raise EOFError
    return b"".join(pieces)


async def _read_chunked(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size == 0:
            return b"".join(pieces)
        num_bytes += size
        if size < 0 or num_bytes > max_bytes:
            raise ValueError("too large")
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)


def _media_type(data: bytes) -> str | None:
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def _replace_urls(body: bytes, found: dict[str, bytes]) -> bytes:
    data_urls = {
        url: f"data:{_media_type(data)};base64,{base64.b64encode(data).decode('ascii')}"
        for url, data in found.items()
    }
    return json.dumps(_replaced(json.loads(body), data_urls), ensure_ascii=False).encode()


def _replaced(value: Any, data_urls: dict[str, str]) -> Any:
    """Returns the document with addresses replaced where the three APIs have image addresses."""
    if isinstance(value, list):
        return [_replaced(item, data_urls) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "url" and value.get("url") in data_urls:  # Messages: source
        head, _, data = data_urls[value["url"]].partition(";base64,")
        return {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    replaced = {}
    for key, item in value.items():
        # Responses: image_url is the address; Chat: image_url.url.
        if key in ("image_url", "url") and isinstance(item, str):
            replaced[key] = data_urls.get(item, item)
        else:
            replaced[key] = _replaced(item, data_urls)
    return replaced


def _busy() -> Failure:
    return Failure(Reason.OVERLOADED, "too many images are being fetched", retry_after_s=2.0)


def _first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    for error in group.exceptions:
        if isinstance(error, Failure):
            return error
    return group.exceptions[0]
