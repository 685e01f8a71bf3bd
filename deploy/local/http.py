"""One HTTP GET on loopback, without a library: for readiness, admin pages and tests."""

from __future__ import annotations

import asyncio
import contextlib


async def http_get(address: str, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """Returns status and body; (0, "") when nobody answers in time."""
    host, _, port = address.rpartition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
            answer = await reader.read()
    except (OSError, TimeoutError, ValueError):
        return 0, ""
    finally:
        if writer is not None:
            writer.close()
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    with contextlib.suppress(IndexError, ValueError):
        return int(head.split(" ")[1]), body
    return 0, ""
