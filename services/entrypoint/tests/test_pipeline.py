"""Requests through a whole entrypoint: real HTTP in front, real gRPC behind."""

from __future__ import annotations

from pathlib import Path

from services.entrypoint.tests.stack import content_of, running_stack, sse_events, text_of


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
