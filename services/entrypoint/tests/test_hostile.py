"""Bytes that mean harm: on the public ports, and in what this code would ever do with them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest

import services.entrypoint
import services.so_compiler
from services.common.errors import Failure, Reason
from services.entrypoint.http_server import HttpServer
from services.entrypoint.limits import Limits
from services.entrypoint.tests.stack import content_of, running_stack, text_of, until

# What would run or trust data from outside (S-07, UR-79).
_FORBIDDEN = re.compile(
    r"\bpickle\b|\bmarshal\b|\bshelve\b|\bdill\b|\beval\(|\bexec\(|yaml\.load\b|__import__|"
    r"\bos\.system\b|shell=True"
)


def test_ur_79_no_code_here_runs_or_unpickles_data() -> None:
    num_files = 0
    for package in (services.entrypoint, services.so_compiler):
        folder = Path(str(package.__file__)).parent
        for file in folder.rglob("*.py"):
            if "tests" in file.parts:
                continue
            num_files += 1
            assert not _FORBIDDEN.search(file.read_text()), file.name
    assert num_files > 40


class _Gadget:
    fired = False

    def __reduce__(self) -> tuple[object, ...]:
        return (setattr, (_Gadget, "fired", True))


async def test_ur_79_garbage_on_both_ports_has_no_effect(tmp_path: Path) -> None:
    rng = random.Random(3)
    buffer = io.BytesIO()
    pickle.dump(_Gadget(), buffer)
    garbage = [
        buffer.getvalue(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(500),
        b"\x16\x03\x01" + rng.randbytes(300),
        b"\0" * 5000,
        *(rng.randbytes(rng.randint(1, 3000)) for _ in range(30)),
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://evil/ HTTP/1.1\r\nhost: x\r\n\r\n",
    ]
    async with running_stack(tmp_path) as stack:
        ports = [
            int(stack.base_url.rpartition(":")[2]),
            int(stack.runtime.address.rpartition(":")[2]),
        ]
        for port in ports:
            for data in garbage:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(data)
                    writer.write_eof()
                    async with asyncio.timeout(20):
                        await reader.read()
                except (ConnectionError, OSError):
                    pass  # refused in its own way
                finally:
                    writer.close()
        assert not _Gadget.fired
        answer = await stack.post(stack.chat(max_tokens=3))
        assert answer.json()["content"] == text_of(3)
        await stack.idle()
        assert stack.http.connections.num_open <= 1  # our own client's


async def test_ur_58_a_resumed_request_keeps_its_constraint_and_says_where_it_is(
    tmp_path: Path,
) -> None:
    async with running_stack(tmp_path, num_decode=2) as stack:
        stack.codec.constraint = ("json", '{"type":"object"}')
        stack.decode[0].die_at = 4
        stack.decode[1].die_at = None
        responses = await asyncio.gather(
            *(stack.post(stack.chat(max_tokens=12, stream=True)) for _ in range(4))
        )
        assert [content_of(r.text) for r in responses] == [text_of(12)] * 4
        resumed = [spec for spec in stack.lb.specs if spec.key.attempt > 1]
        assert resumed
        for spec in resumed:
            assert spec.grammar.artifact_key == "artifact-1"
            assert spec.num_resumed_tokens >= 1
        assert len(stack.compiler.requests) == 4  # once per request, not per attempt


async def test_ur_58_a_grammar_that_dies_is_a_clear_error(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.codec.constraint = ("json", '{"type":"object"}')
        stack.prefill[0].fail = Failure(Reason.UNSUPPORTED_FEATURE, "the matcher died")
        response = await stack.post(stack.chat(stream=True))
        assert response.status_code == 400
        assert response.headers["x-error-reason"] == "UNSUPPORTED_FEATURE"
        assert len(stack.lb.specs) == 1


async def test_p_07_one_bad_request_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        neighbours = [
            asyncio.create_task(stack.post(stack.chat(max_tokens=200, stream=True)))
            for _ in range(5)
        ]
        bad_bodies = [b"", b"[]", b'"x"', b"null", b"{}", b'{"model": 3}', b"{" * 70, b"\xff\xfe"]
        for body in bad_bodies:
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                answer = await stack.client.post(path, content=body)
                assert answer.status_code == 400
        for response in await asyncio.gather(*neighbours):
            assert content_of(response.text) == text_of(200)


async def test_p_16_ur_59_what_can_never_fit_is_refused_at_the_door(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        response = await stack.post(stack.chat("x" * 130_000, stream=True))
        assert response.status_code == 400
        assert response.headers["x-error-reason"] == "NOT_FITTING"
        assert not stack.lb.specs
        await stack.idle()


async def test_a_peer_that_says_cancelled_is_lost_not_our_client_gone(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.lb.failures = [Failure(Reason.CLIENT_CANCELLED, "odd")]
        response = await stack.post(stack.chat(max_tokens=3))
        assert response.json()["content"] == text_of(3)  # asked again
        stack.prefill[0].fail = Failure(Reason.CLIENT_CANCELLED, "odd")
        response = await stack.post(stack.chat(max_tokens=3))
        assert response.status_code == 503
        assert response.headers["x-error-reason"] == "BACKEND_LOST"


async def test_a_request_id_may_be_used_again(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        for _ in range(2):
            response = await stack.post(stack.chat(max_tokens=3), headers={"x-request-id": "again"})
            assert response.json()["content"] == text_of(3)
        first, second = stack.lb.specs
        assert first.key.request_id == second.key.request_id == "again"
        assert second.key.epoch >= first.key.epoch


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request was complete")


class RecordingTransport(asyncio.Transport):
    """Keeps what is written."""

    written = b""

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


async def test_s_07_the_parser_stops_at_the_header_that_is_one_too_many() -> None:
    server = HttpServer(_no_app, "127.0.0.1:0", Limits())
    protocol = server._protocol()
    transport = RecordingTransport()
    protocol.connection_made(transport)  # type: ignore[attr-defined]
    protocol.data_received(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 50_000)  # type: ignore[attr-defined]
    assert transport.written.startswith(b"HTTP/1.1 431 ")
    assert transport.written.count(b"HTTP/1.1 ") == 1
    assert len(protocol.headers) == Limits().max_headers + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "data", [b"\0" * 50, b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 200, b"GET /" + b"x" * 9000]
)
async def test_refusals_of_the_protocol_carry_a_request_id_and_a_reason(
    tmp_path: Path, data: bytes
) -> None:
    async with running_stack(tmp_path) as stack:
        reader, writer = await _connect(stack.base_url.removeprefix("http://"))
        writer.write(data)
        async with asyncio.timeout(20):
            answer = (await reader.read()).decode()
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    assert "\r\nx-request-id: req-" in head
    assert "\r\nx-error-reason: INVALID_REQUEST" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_stream_to_http_1_0_has_no_chunks(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        body = json.dumps(stack.chat(max_tokens=5, stream=True)).encode()
        reader, writer = await _connect(stack.base_url.removeprefix("http://"))
        writer.write(
            f"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n"
            f"authorization: Bearer {stack.key}\r\n\r\n".encode()
            + body
        )
        async with asyncio.timeout(20):
            answer = (await reader.read()).decode()
        writer.close()
    head, _, text = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert "transfer-encoding" not in head
    assert text.startswith("data: ")
    assert text.endswith("data: [DONE]\n\n")
    assert content_of(text) == text_of(5)


async def test_p_06_a_client_that_leaves_with_a_request_behind_its_first_is_noticed(
    tmp_path: Path,
) -> None:
    async with running_stack(tmp_path) as stack:
        stack.decode[0].gate.clear()
        body = json.dumps(stack.chat(max_tokens=50)).encode()
        one = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            f"authorization: Bearer {stack.key}\r\n\r\n"
        ).encode() + body
        _, writer = await _connect(stack.base_url.removeprefix("http://"))
        writer.write(one * 2)
        await until(lambda: bool(stack.lb.specs))
        writer.close()
        await stack.idle()
        assert len(stack.lb.specs) == 1  # the second never ran


async def test_requests_ahead_of_their_answers_are_bounded(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.decode[0].gate.clear()
        body = json.dumps(stack.chat(max_tokens=50)).encode()
        first = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            f"authorization: Bearer {stack.key}\r\n\r\n"
        ).encode() + body
        reader, writer = await _connect(stack.base_url.removeprefix("http://"))
        writer.write(first + b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 17)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""  # closed with nothing out of its turn
        writer.close()
        await stack.idle()
