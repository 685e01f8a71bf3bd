"""Many clients of the running stack at once, each checking its own answer to the letter."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import httpx

from tests.support.background_stack import BackgroundStack

CHAT = "/v1/chat/completions"


@dataclass
class Streamed:
    """What one client of a stream saw."""

    text: str = ""
    finish: str = ""
    error: str = ""
    num_done: int = 0
    stop_after: int = field(default=1_000_000)  # events after which the client goes away


def body_for(model: str, text: str, **more: object) -> dict[str, object]:
    """Returns a streaming Chat body without thinking."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "thinking": {"type": "disabled"},
        "stream": True,
        **more,
    }


async def stream_chat(
    client: httpx.AsyncClient, stack: BackgroundStack, request_id: str, body: dict[str, object]
) -> Streamed:
    """Returns what the client saw; an HTTP error or a broken stream is in `error`."""
    seen = Streamed()
    headers = {"authorization": f"Bearer {stack.key}", "x-request-id": request_id}
    try:
        async with client.stream(
            "POST", f"{stack.url}{CHAT}", headers=headers, json=body
        ) as answer:
            if answer.status_code != 200:
                seen.error = f"{answer.status_code} {(await answer.aread())[:300]!r}"
                return seen
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    seen.num_done += 1
                elif line.startswith("data: "):
                    document = json.loads(line[6:])
                    if "error" in document:
                        seen.error = json.dumps(document["error"])
                        continue
                    for choice in document["choices"]:
                        seen.text += choice["delta"].get("content") or ""
                        seen.finish = choice["finish_reason"] or seen.finish
    except httpx.HTTPError as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen


def new_client(num: int) -> httpx.AsyncClient:
    """Returns a client that opens as many connections as it has streams."""
    limits = httpx.Limits(max_connections=num, max_keepalive_connections=num)
    return httpx.AsyncClient(timeout=httpx.Timeout(100, pool=100), limits=limits)


async def vanish(stack: BackgroundStack, body: bytes, after_s: float) -> None:
    """Sends a request and closes the connection after a while, whatever has come by then."""
    host, _, port = stack.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {stack.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        )
        writer.write(body)
        try:
            async with asyncio.timeout(after_s):
                await writer.drain()
                while await reader.read(65536):
                    pass
        except (TimeoutError, ConnectionError):
            pass
    finally:
        writer.transport.abort()
