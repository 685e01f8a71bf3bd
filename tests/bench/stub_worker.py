"""A worker that answers at once: what stands behind the peer router in the benchmark.

    python -m tests.bench.stub_worker --port 0 --tokens-per-event 4

It reads the request, computes nothing, and streams `max_tokens` words as Chat events, so what is
measured is the router in front of it. Prints its port when it serves.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MODEL = "stub"
_STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class StubWorker:
    """The ASGI application."""

    def __init__(self, tokens_per_event: int) -> None:
        self._tokens_per_event = tokens_per_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/chat/completions":
            await self._chat(json.loads(await _read(receive)), send)
        elif scope["path"] == "/v1/models":
            await _json(send, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif scope["path"] in ("/get_server_info", "/server_info", "/get_model_info"):
            await _json(send, {"model_path": MODEL, "served_model_name": MODEL})
        else:
            await _json(send, {"status": "ok"})

    async def _chat(self, request: dict[str, Any], send: Send) -> None:
        num_tokens = _max_tokens(request)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        num_said = 0
        while num_said < num_tokens:
            num = min(self._tokens_per_event, num_tokens - num_said)
            num_said += num
            await _event(send, {"content": " word" * num})
        usage = {"prompt_tokens": 0, "completion_tokens": num_said, "total_tokens": num_said}
        await _event(send, {"content": ""}, finish="length", usage=usage)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _max_tokens(request: dict[str, Any]) -> int:
    """Returns the limit; the router renames it to the API's newer word."""
    return int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)


async def _event(
    send: Send,
    delta: dict[str, str],
    *,
    finish: str | None = None,
    usage: dict[str, int] | None = None,
) -> None:
    document = {
        "id": "chatcmpl-stub",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        "usage": usage,
    }
    data = b"data: " + json.dumps(document).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _json(send: Send, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def main() -> int:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(prog="stub_worker", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens-per-event", type=int, default=1)
    args = parser.parse_args()
    listening = socket.create_server(("127.0.0.1", args.port))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(
        StubWorker(args.tokens_per_event), log_level="error", access_log=False, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
