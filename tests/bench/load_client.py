"""The client side of the benchmark: streams over raw HTTP, in a process of its own.

    python -m tests.bench.load_client '{"address": "127.0.0.1:8000", "concurrency": 8, ...}'

A closed loop of `concurrency` connections, each sending its next request when the last has ended.
The parser is httptools and nothing is decoded but what is counted, so that the client takes as
little as possible of a machine that it shares with what it measures. Prints one JSON document.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import httptools
import uvloop

CHAT = "/v1/chat/completions"
CONTENT = re.compile(rb'"content":\s?"(?!")')  # a delta that says something
COMPLETION = re.compile(rb'"completion_tokens":\s?(\d+)')
CACHED = re.compile(rb'"cached_tokens":\s?(\d+)')
# Plain words of one token each in the vocabularies that matter here.
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "world", "school", "state")
REQUEST_TIMEOUT_S = 60.0
_QUICKACK = getattr(socket, "TCP_QUICKACK", None)


@dataclass(frozen=True)
class LoadConfig:
    """What to send, how often. Either `num_requests` or `seconds` ends the sending.

    Args:
        seconds: no request begins later than this; those that run are followed to their end.
    """

    address: str
    key: str = ""
    model: str = ""
    concurrency: int = 1
    num_requests: int = 0
    seconds: float = 0.0
    prompt_words: int = 256
    max_tokens: int = 64
    seed: int = 1
    id_prefix: str = "bench"

    def __post_init__(self) -> None:
        if bool(self.num_requests) == bool(self.seconds):
            raise ValueError("either num_requests or seconds")


@dataclass
class Seen:
    """One request as its client saw it; times of the monotonic clock, s."""

    request_id: str
    sent_unix_ns: int = 0
    sent_s: float = 0.0
    first_s: float = 0.0  # first byte of text
    last_s: float = 0.0  # newest text
    end_s: float = 0.0
    status: int = 0
    num_events: int = 0  # that carry text
    output_tokens: int = 0
    cached_tokens: int = 0
    server_timing: str = ""
    error: str = ""


@dataclass
class Load:
    """What the process found out. `cpu_s` is without the start of the interpreter."""

    cpu_s: float
    start_s: float
    startup_cpu_s: float = 0.0
    requests: list[Seen] = field(default_factory=list)

    def to_json(self) -> str:
        """Returns the document that the benchmark reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Load:
        """Returns what `to_json` wrote."""
        document: dict[str, Any] = json.loads(text)
        document["requests"] = [Seen(**item) for item in document["requests"]]
        return cls(**document)


def prompts(config: LoadConfig) -> Iterator[str]:
    """Yields texts without end; each begins differently, so that none is a prefix of another."""
    rng = random.Random(config.seed)
    while True:
        words = [f"{rng.getrandbits(40):x}", *rng.choices(WORDS, k=config.prompt_words)]
        yield " ".join(words)


class Connection(asyncio.Protocol):
    """One keep-alive connection that runs one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._seen: Seen | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")

    def _acknowledge(self) -> None:
        """Acknowledges what came at once, where the system can.

        The peer router leaves Nagle's algorithm on: its second write waits for the client's
        acknowledgement, which Linux delays by 40 ms. That would be measured instead of its work.
        """
        if self._socket is not None and _QUICKACK is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}")

    def data_received(self, data: bytes) -> None:
        self._acknowledge()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"{type(error).__name__}: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._seen is not None and name.lower() == b"server-timing":
            self._seen.server_timing = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._seen is not None:
            self._seen.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        seen = self._seen
        if seen is None:
            return
        num_events = len(CONTENT.findall(body))
        if num_events:
            now_s = time.monotonic()
            seen.first_s = seen.first_s or now_s
            seen.last_s = now_s
            seen.num_events += num_events
        if found := COMPLETION.search(body):
            seen.output_tokens = int(found[1])
            if cached := CACHED.search(body):
                seen.cached_tokens = int(cached[1])

    def on_message_complete(self) -> None:
        self._end("" if self._seen and self._seen.status == 200 else "not 200")

    def _end(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            assert self._seen is not None
            self._seen.error = error
            self._done.set_result(None)

    async def request(self, head: bytes, body: bytes, seen: Seen) -> None:
        """Sends one request and follows its answer to the end."""
        assert self._transport is not None
        self._acknowledge()
        self._seen, self._done = seen, asyncio.get_running_loop().create_future()
        seen.sent_unix_ns, seen.sent_s = time.time_ns(), time.monotonic()
        self._transport.write(head + body)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._done
        except TimeoutError:
            seen.error = "timeout"
        seen.end_s = time.monotonic()
        if seen.error:
            self.close()

    def close(self) -> None:
        """Closes it; a request that fails does not get its connection back."""
        if self._transport is not None:
            self._transport.abort()


async def run(config: LoadConfig) -> Load:
    """Runs the load."""
    texts = prompts(config)
    load = Load(0.0, time.monotonic(), time.process_time())
    deadline_s = load.start_s + (config.seconds or float("inf"))
    host, _, port = config.address.rpartition(":")
    loop = asyncio.get_running_loop()

    def may_begin() -> bool:
        if config.num_requests:
            return len(load.requests) < config.num_requests
        return time.monotonic() < deadline_s

    async def client() -> None:
        connection: Connection | None = None
        try:
            while may_begin():
                seen = Seen(f"{config.id_prefix}-{len(load.requests)}")
                load.requests.append(seen)
                body = body_of(config, next(texts))
                head = head_of(config, seen.request_id, len(body))
                if connection is None:
                    _, connection = await loop.create_connection(Connection, host, int(port))
                await connection.request(head, body, seen)
                if seen.error:
                    connection = None
        finally:
            if connection is not None:
                connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(config.concurrency):
            group.create_task(client())
    load.cpu_s = time.process_time() - load.startup_cpu_s
    return load


def body_of(config: LoadConfig, text: str) -> bytes:
    """Returns the body of a streaming Chat request."""
    document = {
        "model": config.model,
        "messages": [{"role": "user", "content": text}],
        "thinking": {"type": "disabled"},
        "max_tokens": config.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(document).encode()


def head_of(config: LoadConfig, request_id: str, num_bytes: int) -> bytes:
    """Returns the request's head."""
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: {config.address}\r\n"
        f"authorization: Bearer {config.key}\r\nx-request-id: {request_id}\r\n"
        f"content-type: application/json\r\ncontent-length: {num_bytes}\r\n\r\n"
    ).encode()


def main(argv: list[str] | None = None) -> int:
    """Runs the load that the one argument describes."""
    [text] = sys.argv[1:] if argv is None else argv
    print(uvloop.run(run(LoadConfig(**json.loads(text)))).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
