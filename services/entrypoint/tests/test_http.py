"""The public HTTP surface: limits of the protocol, keys on every route, what is not there."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common import tracing
from services.common.errors import Failure, Reason
from services.common.log import JsonFormatter
from services.common.store_memory import MemoryStore
from services.entrypoint.auth import Identity, KeyLimits, StoredKey, digest_key, format_keys
from services.entrypoint.limits import Limits
from services.entrypoint.tests.stack import (
    Stack,
    content_of,
    running_stack,
    text_of,
    until,
)

GENERATE_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


async def raw(stack: Stack, data: bytes, *, eof: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Sends bytes as they are; returns status, headers and body of the answer."""
    host, port = stack.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        if eof:
            writer.write_eof()
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:] if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        return int(lines[0].split()[1]), headers, body
    finally:
        writer.close()


async def test_s_01_every_route_but_health_needs_a_key(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        for path in (*GENERATE_PATHS, "/v1/messages/count_tokens"):
            for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
                response = await stack.client.post(path, json={}, headers=headers)
                assert (path, response.status_code) == (path, 401)
                assert response.headers["x-should-retry"] == "false"
                assert response.headers["x-error-reason"] == "UNAUTHENTICATED"
        for path in ("/v1/models", "/v1/models/tiny", "/v1/requests/r"):
            response = await stack.client.get(path, headers={"authorization": "Bearer wrong"})
            assert (path, response.status_code) == (path, 401)
        for path in ("/healthz", "/readyz", "/"):
            response = await stack.client.get(path, headers={"authorization": ""})
            assert (path, response.status_code) == (path, 200)
        both = {"authorization": "", "x-api-key": stack.key}
        response = await stack.client.get("/v1/models", headers=both)
        assert response.status_code == 200


async def test_s_10_nothing_of_the_admin_plane_is_public(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        for path in ("/metrics", "/census", "/config", "/docs", "/openapi.json", "/debug"):
            response = await stack.client.get(path)
            assert (path, response.status_code) == (path, 404)
            assert response.json()["error"]["type"] == "invalid_request_error"
        wrong = await stack.client.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert "POST" in wrong.headers["allow"]


async def test_models_are_listed_in_each_dialect(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        listed = (await stack.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny"]
        one = await stack.client.get("/v1/models/tiny")
        assert one.json()["object"] == "model"
        missing = await stack.client.get("/v1/models/none")
        assert missing.status_code == 404
        version = {"anthropic-version": "2023-06-01"}
        theirs = (await stack.client.get("/v1/models", headers=version)).json()
        assert theirs["first_id"] == "tiny"
        assert theirs["data"][0]["type"] == "model"


async def test_errors_have_the_shape_of_their_api(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.lb.failures = [Failure(Reason.OVERLOADED, "full") for _ in range(3)]
        chat, responses, messages = [
            await stack.post({**stack.chat(), "input": "x"}, path) for path in GENERATE_PATHS
        ]
        assert chat.status_code == responses.status_code == 503
        assert messages.status_code == 529
        assert messages.json()["error"]["type"] == "overloaded_error"
        assert messages.json()["request_id"] == messages.headers["request-id"]
        assert 1 <= int(chat.headers["retry-after"]) <= 30


LONG = b"x" * 9000


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + LONG + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: " + LONG * 4 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n"
        + b"".join(b"h%d: v\r\n" % i for i in range(101))
        + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: " + LONG * 8,  # a header that never ends
    ],
)
async def test_headers_over_their_limits_are_431(tmp_path: Path, head: bytes) -> None:
    async with running_stack(tmp_path) as stack:
        status, headers, body = await raw(stack, head)
        assert status == 431
        assert headers["connection"] == "close"
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert (await stack.client.get("/healthz")).status_code == 200


async def test_headers_that_come_too_slowly_are_408(tmp_path: Path) -> None:
    async with running_stack(tmp_path, limits=Limits(header_timeout_s=0.2)) as stack:
        status, _, _ = await raw(stack, b"GET / HTTP/1.1\r\nhos")
        assert status == 408


async def test_a_body_that_comes_too_slowly_is_408(tmp_path: Path) -> None:
    limits = Limits(body_grace_s=0.2, min_body_bytes_per_s=160 * 1024)
    async with running_stack(tmp_path, limits=limits) as stack:
        status, headers, _ = await raw(
            stack,
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
            b"authorization: Bearer " + stack.key.encode() + b'\r\n\r\n{"a": ',
        )
        assert status == 408
        assert headers["connection"] == "close"
        await stack.idle()


async def test_bodies_over_their_limits_are_413(tmp_path: Path) -> None:
    limits = Limits(max_body_bytes=10_000, max_body_with_images_bytes=30_000)
    async with running_stack(tmp_path, limits=limits) as stack:
        text = stack.chat("x" * 12_000)
        image = {"type": "image_url", "image_url": {"url": "data:" + "y" * 12_000}}
        with_image = {"model": "tiny", "messages": [{"role": "user", "content": [image]}]}
        assert (await stack.post(text)).status_code == 413
        assert (await stack.post(with_image)).status_code != 413
        huge = await stack.post(stack.chat("x" * 40_000))
        assert huge.status_code == 413
        assert huge.json()["error"]["type"] == "invalid_request_error"
        theirs = await stack.post(text, "/v1/messages")
        assert theirs.status_code == 413
        assert theirs.json()["error"]["type"] == "request_too_large"
        # Also without a declared length.
        status, _, _ = await raw(
            stack,
            b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            b"x-api-key: " + stack.key.encode() + b"\r\n\r\n2ee0\r\n" + b"1" * 12_000 + b"\r\n",
        )
        assert status in (400, 413)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-encoding": "gzip"}, b"{}", 415),
        ({}, b'{"a": NaN}', 400),
        ({}, b'"\xff"', 400),
        ({}, b"[" * 100, 400),
        ({"x-request-timeout-ms": "soon"}, b"{}", 400),
        ({"x-pelagos-cache-salt": "s" * 300}, b"{}", 400),
    ],
)
async def test_odd_bodies_and_headers_are_refused(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int
) -> None:
    async with running_stack(tmp_path) as stack:
        for path in GENERATE_PATHS:
            response = await stack.client.post(path, content=body, headers=headers)
            assert (path, response.status_code) == (path, status)
        assert stack.codec.num_encoded == 0
        await stack.idle()


async def test_connections_are_limited_per_address_and_in_all(tmp_path: Path) -> None:
    for limits, status in (
        (Limits(max_connections_per_address=3), 429),
        (Limits(max_connections=3), 503),
    ):
        async with running_stack(tmp_path, limits=limits) as stack:
            host, port = stack.base_url.removeprefix("http://").split(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            refused, headers, _ = await raw(stack, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert refused == status
            assert headers["retry-after"] == "1"
            held.pop()[1].close()
            await until(lambda s=stack: s.http.connections.num_open == 2)
            again, _, _ = await raw(stack, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert again == 200
            for _, writer in held:
                writer.close()


async def test_ur_50_a_large_prompt_does_not_stop_the_loop(tmp_path: Path) -> None:
    """Counts loop turns instead of milliseconds: the scan yields at every piece of the body."""
    async with running_stack(tmp_path) as stack:
        turns = 0
        done = asyncio.Event()

        async def count() -> None:
            nonlocal turns
            while not done.is_set():
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.ensure_future(count())
        body = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"w " * 1_500_000
        response = await stack.client.post("/v1/messages", content=body + b'"}]}')
        done.set()
        await counter
        assert response.status_code == 400  # far over the pool; refused after it was read
        assert turns > 20  # at least one turn per 128 KiB


async def test_ur_49_ready_means_that_an_engine_is_known(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        assert (await stack.client.get("/readyz")).json() == {"ok": True}
        stack.parts.catalog._profiles.clear()
        assert (await stack.client.get("/readyz")).status_code == 503
        assert (await stack.client.get("/healthz")).status_code == 200


async def test_a_request_id_that_is_in_flight_is_a_conflict(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.lb.gate.clear()
        headers = {"x-request-id": "same"}
        first = asyncio.create_task(stack.post(stack.chat(max_tokens=3), headers=headers))
        await until(stack.lb.waiting.is_set)
        second = await stack.post(stack.chat(), headers=headers)
        assert second.status_code == 409
        assert second.headers["x-should-retry"] == "true"
        stack.lb.gate.set()
        assert (await first).json()["content"] == text_of(3)


async def test_explain_is_for_the_owner(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.check.hit_tokens = 256
        await stack.post(stack.chat(max_tokens=3), headers={"x-request-id": "why"})
        await stack.idle()
        explained = (await stack.client.get("/v1/requests/why")).json()
        assert explained["hit_tokens"] == 256
        assert explained["ended_by"] == "absent"
        assert explained["outcome"] == "ok"
        assert [s["stage"] for s in explained["stages"]][:3] == ["encoded", "matched", "queued"]
        assert (await stack.client.get("/v1/requests/other")).status_code == 404


def _write_keys(folder: Path, limits: KeyLimits) -> str:
    pepper = (folder / "pepper").read_bytes()
    key = "pk-limited"
    entry = StoredKey(Identity("limited", "t", limits=limits), digest_key(pepper, key))
    (folder / "keys.json").write_text(format_keys([entry]))
    return key


async def test_ur_62_ur_63_two_entrypoints_keep_one_limit(tmp_path: Path) -> None:
    store = MemoryStore()
    shared = tmp_path / "keys"
    async with (
        running_stack(tmp_path / "a", store=store, key_folder=shared) as one,
        running_stack(tmp_path / "b", store=store, key_folder=shared) as two,
    ):
        stacks = (one, two)
        key = _write_keys(shared, KeyLimits(tokens_per_minute=10_000))
        for stack in stacks:
            stack.parts.keys.reload()
            await until(lambda s=stack: len(s.runtime.view.members("entrypoint")) == 2)
        body = one.chat("x" * 900, max_tokens=100)
        headers = {"authorization": f"Bearer {key}"}
        responses = await asyncio.gather(
            *(stacks[i % 2].post(body, headers=headers) for i in range(60))
        )
        statuses = [response.status_code for response in responses]
        assert set(statuses) <= {200, 429}
        # Used tokens are given back at the end, so a few more than ten may pass; never 5 % over
        # what was really used.
        used = statuses.count(200) * (900 + 100)
        assert used <= 10_000 * 1.05
        refused = next(r for r in responses if r.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for stack in stacks:
            await stack.idle()


async def test_ur_80_s_09_neither_key_nor_prompt_is_in_logs_traces_or_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "canary-prompt-5f1d"
    with tracing.in_memory() as exporter:
        async with running_stack(tmp_path) as stack:
            bad_key = "pk-canary-key-77aa"
            for path in GENERATE_PATHS:
                body = {**stack.chat(canary, max_tokens=2), "input": canary}
                await stack.post(body, path)
                await stack.client.post(path, content=canary.encode())
                await stack.post(body, path, headers={"authorization": f"Bearer {bad_key}"})
            stack.prefill[0].fail = Failure(Reason.INTERNAL, canary)
            await stack.post(stack.chat(canary))
            stack.codec.constraint = ("odd", canary)
            await stack.post(stack.chat(canary))
            await stack.idle()
            metrics = stack.runtime.metrics.render().decode()
            key = stack.key
        formatter = JsonFormatter("entrypoint", "i")
        lines = [formatter.format(record) for record in caplog.records if _is_ours(record)]
        spans = _dump(exporter)
    for needle in (canary, key, bad_key):
        for name, text in (("logs", "\n".join(lines)), ("spans", spans), ("metrics", metrics)):
            assert needle not in text, name
    assert "entrypoint chat" in spans


def _is_ours(record: logging.LogRecord) -> bool:
    # The test's own HTTP client logs what it sends.
    return not record.name.startswith(("httpx", "httpcore", "asyncio"))


def _dump(exporter: InMemorySpanExporter) -> str:
    documents: list[Any] = [tracing.span_to_document(s) for s in exporter.get_finished_spans()]
    return json.dumps(documents)


async def test_p_41_one_trace_spans_the_stages(tmp_path: Path) -> None:
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    with tracing.in_memory() as exporter:
        async with running_stack(tmp_path) as stack:
            await stack.post(stack.chat(max_tokens=2), headers={"traceparent": parent})
            await stack.idle()
            spec = stack.lb.specs[0]
    spans = [tracing.span_to_document(s) for s in exporter.get_finished_spans()]
    mine = [s for s in spans if s["trace_id"] == "ab" * 16]
    names = {s["name"] for s in mine}
    assert {"entrypoint chat", "entrypoint.encode", "entrypoint.check", "entrypoint.queue"} <= names
    root = next(s for s in mine if s["name"] == "entrypoint chat")
    assert root["parent_id"] == "cd" * 8
    assert root["attributes"]["pelagos.outcome"] == "ok"
    assert root["attributes"]["gen_ai.usage.output_tokens"] == 2
    assert spec.traceparent.split("-")[1] == "ab" * 16


async def test_a_pipelined_second_request_is_answered_after_the_first(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        host, port = stack.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(stack.chat(max_tokens=3)).encode()
        one = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            f"authorization: Bearer {stack.key}\r\n\r\n"
        ).encode() + body
        writer.write(one * 3)
        received = b""
        async with asyncio.timeout(20):
            while received.count(b"HTTP/1.1 200") < 3 or not received.endswith(b"}"):
                received += await reader.read(65_536)
        # The whole field: three letters alone are also found in the odd hexadecimal id.
        assert received.count(f'"content": "{text_of(3)}"'.encode()) == 3
        writer.close()


async def test_a_stream_is_joined_when_events_are_ready_together(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.decode[0].step_tokens = 50
        response = await stack.post(stack.chat(max_tokens=200, stream=True))
        assert content_of(response.text) == text_of(200)
