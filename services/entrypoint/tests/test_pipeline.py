"""Requests through a whole entrypoint: real HTTP in front, real gRPC behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from services.common.drain import DrainTimes
from services.common.errors import Failure, Reason
from services.common.service import RuntimeConfig
from services.entrypoint.ledger import Outcome
from services.entrypoint.limits import Limits
from services.entrypoint.tests.stack import (
    Stack,
    content_of,
    running_stack,
    sse_events,
    text_of,
    until,
)


def outcomes(stack: Stack) -> dict[str, int]:
    return {o.value: n for o, n in stack.parts.ledger.num_outcomes.items() if n}


async def test_a_request_is_answered_whole_and_as_a_stream(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        whole = await stack.post(stack.chat(max_tokens=5))
        assert whole.status_code == 200
        assert whole.json()["content"] == text_of(5)
        assert whole.json()["finish_reason"] == "length"
        assert whole.json()["usage"] == {"prompt": 5, "cached": 0, "completion": 5}
        streamed = await stack.post(stack.chat(max_tokens=5, stream=True))
        assert streamed.status_code == 200
        assert content_of(streamed.text) == text_of(5)
        assert sse_events(streamed.text)[-1] == "[DONE]"
        await stack.idle()
        assert outcomes(stack) == {"ok": 2}


async def test_ur_22_a_stream_has_the_headers_that_proxies_need(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.check.hit_tokens = 128
        response = await stack.post(stack.chat(stream=True), headers={"x-request-id": "mine-1"})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"] == "mine-1"
        assert response.headers["x-pelagos-cache"] == "hit=128; replayed=0; ended-by=absent"
        assert "encoded;dur=" in response.headers["server-timing"]


async def test_all_paths_of_the_three_apis_reach_the_pipeline(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        for path in (
            *("/v1/chat/completions", "/chat/completions", "/beta/chat/completions"),
            *("/v1/messages", "/messages", "/anthropic/v1/messages"),
        ):
            response = await stack.post(stack.chat(max_tokens=2), path)
            assert (path, response.status_code) == (path, 200)
        for path in ("/v1/responses", "/responses"):
            response = await stack.post({"model": "tiny", "input": "hi", "max_tokens": 2}, path)
            assert (path, response.status_code) == (path, 200)
        counted = await stack.post(stack.chat("four"), "/v1/messages/count_tokens")
        assert counted.json() == {"input_tokens": 4}


async def test_steps_of_many_requests_share_messages_and_batches(tmp_path: Path) -> None:
    """The cost per token is a share of a message: messages grow with steps, not with requests."""
    async with running_stack(tmp_path) as stack:
        engine = stack.decode[0]
        engine.gate.clear()
        tasks = [
            asyncio.create_task(stack.post(stack.chat(max_tokens=40, stream=True)))
            for _ in range(40)
        ]
        await until(lambda: len(engine.active) >= 40)
        before, items_before = stack.codec.num_batches, stack.codec.num_items
        engine.gate.set()
        for response in await asyncio.gather(*tasks):
            assert content_of(response.text) == text_of(40)
        num_tokens = 40 * 39
        assert engine.num_emitted >= num_tokens
        assert engine.num_messages < num_tokens / 8
        assert stack.codec.num_items - items_before >= num_tokens
        assert stack.codec.num_batches - before < num_tokens / 8
        assert stack.parts.engines.hub.num_channels <= 2


@pytest.mark.parametrize("die_at", [1, 2, 7, 19])
async def test_p_03_a_lost_decode_engine_leaves_no_gap_and_no_repeat(
    tmp_path: Path, die_at: int
) -> None:
    async with running_stack(tmp_path, num_decode=2) as stack:
        for engine in stack.decode:
            engine.die_at = None
        first = stack.decode[0]
        first.die_at = die_at
        responses = await asyncio.gather(
            *(stack.post(stack.chat(max_tokens=20, stream=True)) for _ in range(10))
        )
        for response in responses:
            assert response.status_code == 200
            assert content_of(response.text) == text_of(20)
            last = [e for e in sse_events(response.text) if isinstance(e, dict)][-1]
            assert last["usage"] == {"prompt": 5, "cached": 0, "completion": 20}
        assert first.dead
        resumed = [spec for spec in stack.lb.specs if spec.key.attempt > 1]
        assert resumed
        for spec in resumed:
            num_prompt = len(spec.prompt_tokens) // 4 - spec.num_resumed_tokens
            assert num_prompt == 5
            assert spec.sampling.max_tokens == 20
        seeds: dict[str, set[int]] = {}
        for spec in stack.lb.specs:
            seeds.setdefault(spec.key.request_id, set()).add(spec.sampling.seed)
        assert all(len(found) == 1 for found in seeds.values())
        await stack.idle()
        assert outcomes(stack) == {"ok": 10}


async def test_p_02_a_lost_prefill_engine_is_not_noticed(tmp_path: Path) -> None:
    async with running_stack(tmp_path, num_prefill=2) as stack:
        stack.prefill[0].die_at = 0
        responses = await asyncio.gather(*(stack.post(stack.chat(max_tokens=6)) for _ in range(6)))
        assert [r.json()["content"] for r in responses] == [text_of(6)] * 6
        assert stack.prefill[0].dead


async def test_an_engine_lost_after_its_last_token_is_a_finished_request(tmp_path: Path) -> None:
    async with running_stack(tmp_path, num_decode=1) as stack:
        engine = stack.decode[0]
        engine.step_tokens = 9
        engine.skip_index = None
        body = stack.chat(max_tokens=10, stream=True)
        task = asyncio.create_task(stack.post(body))
        # The whole output comes in one step; the engine dies instead of saying "finished".
        engine.fail = None
        await until(lambda: engine.num_emitted >= 9)
        await engine.kill()
        response = await task
        assert content_of(response.text) == text_of(10)
        await stack.idle()
        assert outcomes(stack) == {"ok": 1}


async def test_ur_20_no_engine_left_ends_a_stream_in_the_failure_form(tmp_path: Path) -> None:
    async with running_stack(tmp_path, num_decode=1) as stack:
        stack.decode[0].die_at = 5
        stack.lb.engines = stack.prefill
        stack.prefill[0].next_engine = lambda: stack.decode[0]
        response = await stack.post(stack.chat(max_tokens=20, stream=True))
        assert response.status_code == 200
        events = sse_events(response.text)
        # Each of the three attempts adds the token that its prefill made; then nobody is left.
        content = content_of(response.text)
        assert content == text_of(len(content))
        assert 5 <= len(content) < 20
        assert events[-1] == "[DONE]"
        assert "error" in events[-2]
        assert "length" not in response.text
        await stack.idle()
        assert outcomes(stack) == {"backend_lost": 1}


async def test_an_engine_that_leaves_out_a_token_is_not_believed(tmp_path: Path) -> None:
    async with running_stack(tmp_path, num_decode=2) as stack:
        stack.decode[0].skip_index = 4
        stack.decode[1].skip_index = None
        response = await stack.post(stack.chat(max_tokens=9, stream=True))
        assert content_of(response.text) == text_of(9)


async def test_p_11_a_backend_that_always_fails_is_not_stormed(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.prefill[0].fail = Failure(Reason.BACKEND_LOST, "always")
        num = 150
        for start in range(0, num, 50):
            responses = await asyncio.gather(
                *(stack.post(stack.chat()) for _ in range(start, start + 50))
            )
            assert {r.status_code for r in responses} == {503}
        assert len(stack.lb.specs) <= 1.1 * num + 10
        await stack.idle()
        assert outcomes(stack) == {"backend_lost": num}


async def test_a_refusal_of_the_engine_is_not_tried_again(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.prefill[0].fail = Failure(Reason.NOT_FITTING, "too long for the pool")
        response = await stack.post(stack.chat(stream=True))
        assert response.status_code == 400
        assert response.headers["x-error-reason"] == "NOT_FITTING"
        assert response.headers["x-should-retry"] == "false"
        assert len(stack.lb.specs) == 1


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_p_06_ur_28_a_client_that_leaves_is_noticed_everywhere(
    tmp_path: Path, where: str
) -> None:
    async with running_stack(tmp_path) as stack:
        gates = {
            "queue": stack.lb.gate,
            "prefill": stack.prefill[0].gate,
            "decode": stack.decode[0].gate,
        }
        gates[where].clear()
        before = stack.census()
        task = asyncio.create_task(stack.post(stack.chat(stream=True)))
        await until(stack.lb.waiting.is_set)
        if where != "queue":
            await until(lambda: bool(getattr(stack, where)[0].active))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await stack.idle() == before
        if where == "queue":
            assert stack.lb.num_cancelled == 1
        else:
            await until(lambda: bool(getattr(stack, where)[0].aborted))
        assert outcomes(stack) == {"client_cancel": 1}
        gates[where].set()
        again = await stack.post(stack.chat(max_tokens=3))
        assert again.json()["content"] == text_of(3)


async def test_p_06_census_returns_after_many_random_cancels(tmp_path: Path) -> None:
    import random

    rng = random.Random(7)
    async with running_stack(tmp_path, num_decode=2) as stack:
        before = stack.census()

        async def one() -> None:
            with_timeout = rng.choice([0.0, 0.005, 0.02, 0.05])
            try:
                async with asyncio.timeout(with_timeout):
                    await stack.post(stack.chat(max_tokens=500, stream=rng.random() < 0.5))
            except (TimeoutError, httpx.HTTPError):
                pass

        for _ in range(5):
            await asyncio.gather(*(one() for _ in range(20)))
        assert await stack.idle() == before
        # The others are told, and may hear of it a little later.
        await until(lambda: stack.codec.num_open == 0)
        await until(lambda: not (any(engine.active for engine in (*stack.prefill, *stack.decode))))


async def test_ur_61_a_deadline_in_the_queue_is_a_504_and_computes_nothing(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.lb.gate.clear()
        response = await stack.post(
            stack.chat(stream=True), headers={"x-request-timeout-ms": "150"}
        )
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "server_error"
        assert stack.prefill[0].num_emitted == 0
        assert stack.lb.specs[0].deadline_unix_ms > 0
        await stack.idle()
        assert outcomes(stack) == {"deadline": 1}


async def test_ur_23_keep_alive_comments_come_while_nothing_else_does(tmp_path: Path) -> None:
    limits = Limits(keep_alive_comment_s=0.2)
    async with running_stack(tmp_path, limits=limits) as stack:
        stack.prefill[0].gate.clear()
        async with stack.client.stream(
            "POST", "/v1/chat/completions", json=stack.chat(max_tokens=4, stream=True)
        ) as response:
            assert response.status_code == 200
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if text.count(": keep-alive") == 2:
                    stack.prefill[0].gate.set()
        assert text.startswith(": keep-alive\n\n")
        assert content_of(text) == text_of(4)


async def test_ur_24_validation_comes_before_any_status_line(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        response = await stack.client.post(
            "/v1/chat/completions", content=b'{"model": "tiny", "stream": true, "messages": 7}'
        )
        assert response.status_code == 400
        # The codec's own body, byte for byte in its fields.
        assert response.json() == {
            "error": {
                "message": "invalid JSON request",
                "type": "invalid_request_error",
                "param": None,
                "code": "invalid_request_error",
            }
        }
        assert response.headers["x-should-retry"] == "false"
        await stack.idle()
        assert outcomes(stack) == {"invalid": 1}


async def test_a_stop_sequence_ends_the_engine_too(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.codec.stop_text = "def"
        response = await stack.post(stack.chat(max_tokens=50_000))
        assert response.json()["content"] == "abc"
        assert response.json()["finish_reason"] == "stop"
        await until(lambda: bool(stack.decode[0].aborted))
        await stack.idle()


async def test_a_stop_token_is_not_delivered(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.decode[0].end_at = 3
        response = await stack.post(stack.chat(max_tokens=50))
        assert response.json()["content"] == text_of(3)
        assert response.json()["finish_reason"] == "stop"


async def test_p_37_a_cache_that_is_away_is_a_miss(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.check.failure = Failure(Reason.BACKEND_LOST, "away")
        response = await stack.post(stack.chat(max_tokens=3))
        assert response.json()["content"] == text_of(3)
        assert not stack.lb.specs[0].HasField("hit")


async def test_a_lost_codec_goes_on_elsewhere_without_a_seam(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        engine = stack.decode[0]
        engine.gate.clear()
        tasks = [
            asyncio.create_task(stack.post(stack.chat(max_tokens=12, stream=True)))
            for _ in range(3)
        ]
        await until(lambda: len(engine.active) >= 3)
        stack.codec.break_parse.set()
        engine.gate.set()
        for response in await asyncio.gather(*tasks):
            assert content_of(response.text) == text_of(12)
            events = sse_events(response.text)
            assert events[-1] == "[DONE]"
            assert sum("role" in json.dumps(event) for event in events) == 1
        await stack.idle()


async def test_a_constraint_is_compiled_and_travels_with_the_request(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.codec.constraint = ("json", '{"type":"object"}')
        assert (await stack.post(stack.chat())).status_code == 200
        assert stack.lb.specs[0].grammar.artifact_key == "artifact-1"
        assert stack.compiler.requests[0].source == '{"type":"object"}'
        stack.compiler.failure = Failure(
            Reason.SCHEMA_UNSUPPORTED, "$.not is not supported", {"path": "$.not"}
        )
        refused = await stack.post(stack.chat(stream=True))
        assert refused.status_code == 400
        assert refused.headers["x-error-reason"] == "SCHEMA_UNSUPPORTED"
        assert len(stack.lb.specs) == 1


async def test_p_12_a_slow_reader_stops_its_engine_and_nobody_else(tmp_path: Path) -> None:
    limits = Limits(stream_buffer_bytes=16 * 1024)
    async with running_stack(tmp_path, limits=limits) as stack:
        engine = stack.decode[0]
        engine.window_tokens = 128
        stack.codec.padding = "p" * 16_384  # more than the kernel buffers of a connection take
        host, port = stack.base_url.removeprefix("http://").split(":")
        body = json.dumps(stack.chat(max_tokens=800, stream=True)).encode()
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            + f"authorization: Bearer {stack.key}\r\n".encode()
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        async with asyncio.timeout(30):
            quiet = 0
            while quiet < 20:  # nothing is emitted any more: the engine waits for credit
                before = engine.num_emitted
                await asyncio.sleep(0.02)
                quiet = quiet + 1 if engine.num_emitted == before and before > 0 else 0
        assert engine.num_emitted < 800
        output = next(iter(stack.parts.outputs))
        # What was on its way to the codec and back when the bound was reached comes on top.
        assert output.num_waiting_bytes <= limits.stream_buffer_bytes + 16 * 17_000
        others = await stack.post(stack.chat(max_tokens=5))
        assert others.json()["content"] == text_of(5)
        received = bytearray()
        async with asyncio.timeout(60):
            while b"[DONE]" not in received[-200:]:
                received += await reader.read(1 << 16)
        text = "".join(_unchunk(bytes(received)))
        assert content_of(text) == text_of(800)
        writer.close()
        await stack.idle()


def _unchunk(raw: bytes) -> list[str]:
    _, _, body = raw.partition(b"\r\n\r\n")
    pieces = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        pieces.append(rest[:length].decode())
        body = rest[length + 2 :]
    return pieces


async def test_p_12_a_reader_without_progress_is_closed(tmp_path: Path) -> None:
    limits = Limits(stream_buffer_bytes=16 * 1024, stream_progress_timeout_s=0.3)
    async with running_stack(tmp_path, limits=limits) as stack:
        stack.decode[0].window_tokens = 4096
        stack.codec.padding = "p" * 16_384
        host, port = stack.base_url.removeprefix("http://").split(":")
        body = json.dumps(stack.chat(max_tokens=100_000, stream=True)).encode()
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            + f"authorization: Bearer {stack.key}\r\n".encode()
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await until(lambda: bool(stack.decode[0].aborted))
        await stack.idle()
        assert outcomes(stack) == {"client_cancel": 1}
        writer.close()
        del reader


async def test_ur_19_outcomes_add_up_to_accepted_requests(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        await stack.post(stack.chat(max_tokens=2))
        await stack.client.post("/v1/chat/completions", content=b"{}")
        await stack.client.post("/v1/chat/completions", content=b"nonsense")
        stack.prefill[0].fail = Failure(Reason.INTERNAL)
        await stack.post(stack.chat())
        await stack.client.post("/v1/chat/completions", headers={"authorization": "Bearer no"})
        await stack.idle()
        ledger = stack.parts.ledger
        assert sum(ledger.num_outcomes.values()) == ledger.num_accepted == 4
        text = stack.runtime.metrics.render().decode()
        assert 'pelagos_entrypoint_first_tokens_total{api="chat"} 1.0' in text
        assert 'requests_refused_total{reason="UNAUTHENTICATED"} 1.0' in text
        assert ledger.num_outcomes[Outcome.OK] == 1


async def test_p_01_what_outlives_the_grace_ends_with_a_failure_not_a_cut(tmp_path: Path) -> None:
    runtime = RuntimeConfig(drain=DrainTimes(notice_s=0.0, grace_s=0.0, handover_s=10.0))
    async with running_stack(tmp_path, runtime=runtime) as stack:
        engine = stack.decode[0]
        engine.window_tokens = 3  # stands still after a few tokens
        streamed = asyncio.create_task(stack.post(stack.chat(max_tokens=90_000, stream=True)))
        whole = asyncio.create_task(stack.post(stack.chat(max_tokens=90_000)))
        await until(lambda: len(engine.active) == 2)
        await until(lambda: engine.num_emitted >= 4)
        engine.gate.clear()
        await stack.runtime.stop()
        response = await streamed
        assert sse_events(response.text)[-1] == "[DONE]"
        assert "error" in sse_events(response.text)[-2]
        assert (await whole).status_code == 503
        assert outcomes(stack) == {"shed": 2}


async def test_p_04_a_planned_stop_finishes_what_is_in_flight(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stack.decode[0].gate.clear()
        task = asyncio.create_task(stack.post(stack.chat(max_tokens=9, stream=True)))
        await until(lambda: bool(stack.decode[0].active))
        stopping = asyncio.create_task(stack.runtime.stop())
        await until(lambda: bool(stack.runtime.drain.is_requested))
        stack.decode[0].gate.set()
        response = await task
        assert content_of(response.text) == text_of(9)
        await stopping
        with pytest.raises(httpx.ConnectError):
            await stack.client.get("/healthz")
