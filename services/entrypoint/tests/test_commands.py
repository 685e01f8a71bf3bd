"""`pelagos chat` and `pelagos explain` against a running entrypoint."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.entrypoint import chat, explain
from services.entrypoint.chat_stream import Reply, events_of
from services.entrypoint.command_line import Target, UsageError, find_target, parse_flags
from services.entrypoint.tests.stack import running_stack, text_of


async def test_a_conversation_is_streamed_and_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_stack(tmp_path) as stack:
        out = io.StringIO()
        talk = chat.Conversation(Target(stack.base_url, stack.key), "tiny", {"max_tokens": 4}, out)
        assert await asyncio.to_thread(talk.say, "hello") == text_of(4)
        assert await asyncio.to_thread(talk.say, "again") == text_of(4)
        assert out.getvalue() == f"{text_of(4)}\n" * 2
        key_file = str(tmp_path / "keys" / "api-key")
        flags = ["--url", stack.base_url, "--key-file", key_file]
        status = await asyncio.to_thread(chat.main, [*flags, "--max-tokens=3", "hi", "you"])
        assert status == 0
        assert capsys.readouterr().out == f"{text_of(3)}\n"
        await stack.idle()
        (request_id, *_) = stack.parts.ledger._kept
        assert await asyncio.to_thread(explain.main, [*flags, request_id]) == 0
        text = capsys.readouterr().out
        assert "outcome   ok" in text
        assert "never stored" in text
        assert await asyncio.to_thread(explain.main, [*flags, "unknown"]) == 2
        assert "404" in capsys.readouterr().err


def test_the_target_comes_from_flags_or_from_the_local_stack(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("pk-1\n")
    state = tmp_path / "state.json"
    with pytest.raises(UsageError, match="--url"):
        find_target({}, tmp_path)
    state.write_text(
        json.dumps(
            {
                "api_key_file": str(key_file),
                "processes": {
                    "recipe": {"service": "recipe", "labels": {}},
                    "front": {"service": "entrypoint", "labels": {"http": "127.0.0.1:8000"}},
                },
            }
        )
    )
    assert find_target({}, tmp_path) == Target("http://127.0.0.1:8000", "pk-1")
    assert find_target({"folder": str(tmp_path)}) == Target("http://127.0.0.1:8000", "pk-1")
    assert find_target({"url": "http://h:1"}, tmp_path).url == "http://h:1"


def test_flags_are_checked() -> None:
    assert parse_flags(["--url=u", "a", "--model", "m", "b"], ("url", "model")) == (
        {"url": "u", "model": "m"},
        ["a", "b"],
    )
    for args in (["--nope", "x"], ["--url"]):
        with pytest.raises(UsageError):
            parse_flags(args, ("url",))


def test_an_error_in_the_stream_is_not_an_answer() -> None:
    lines = [
        b'data: {"choices":[{"delta":{"content":"a"}}]}',
        b'data: {"error":{"message":"lost"}}',
    ]
    with pytest.raises(UsageError, match="lost"):
        list(events_of(lines, Reply()))


def test_an_answer_that_broke_off_is_not_a_whole_one() -> None:
    def cut(error: Exception | None) -> Iterator[bytes]:
        yield b'data: {"choices":[{"delta":{"content":"a"}}]}'
        if error is not None:
            raise error

    for error in (http.client.IncompleteRead(b""), ConnectionResetError(), None):
        with pytest.raises(UsageError, match="broke off"):
            list(events_of(cut(error), Reply()))


def test_a_port_that_speaks_no_http_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x00\x00\x12garbage\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match="does not speak HTTP"):
            Target(url, "k").request("GET", "/")
        thread.join()
    with pytest.raises(UsageError, match="port"):
        Target("http://127.0.0.1:abc", "k").request("GET", "/")
