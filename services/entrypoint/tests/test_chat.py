"""`pelagos chat`: what a terminal shows, what a pipe gets, and how tools are answered."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest

from services.entrypoint import chat
from services.entrypoint.chat_stream import Reply, events_of
from services.entrypoint.command_line import UsageError

CALL = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": ""}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stream(*deltas: dict[str, Any], usage: dict[str, Any] | None = None) -> list[bytes]:
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    events.append({"choices": [], "usage": usage or {}})
    return [
        line for event in events for line in (b"data: " + json.dumps(event).encode() + b"\n", b"\n")
    ] + [b"data: [DONE]\n"]


ANSWER = stream(
    {"reasoning_content": "They greet"},
    {"reasoning_content": " me."},
    {"content": "Hel"},
    {"content": "lo."},
    usage={
        "prompt_tokens": 40,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 32},
    },
)


def shown(lines: list[bytes], out: io.StringIO) -> tuple[Reply, str]:
    clock = itertools.count(10)  # a second later at each look
    reply = chat.Printer(out, now_s=lambda: float(next(clock))).show(lines, 9.5)
    return reply, out.getvalue()


def test_a_pipe_gets_the_answer_and_nothing_else() -> None:
    reply, text = shown(ANSWER, io.StringIO())
    assert text == "Hello.\n"
    assert reply.reasoning == "They greet me."


def test_a_terminal_shows_reasoning_dimmed_then_what_was_cached_and_how_fast() -> None:
    _, text = shown(ANSWER, Terminal())
    assert text.startswith("\x1b[2mThey greet me.\x1b[0m\nHello.")
    assert "[9 tokens, prompt 40, 32 of it cached, first after 500 ms, 8 tokens/s]" in text


def test_calls_come_in_pieces_and_are_shown_whole() -> None:
    pieces = stream(
        {"tool_calls": [CALL]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
    )
    reply, text = shown(pieces, Terminal())
    assert 'get_weather({"city": "Oslo"})' in text
    assert reply.message()["tool_calls"][0]["id"] == "c1"
    assert shown(pieces, io.StringIO())[1] == ""


def test_an_error_inside_a_stream_is_told_and_the_colour_is_given_back() -> None:
    lines = [*stream({"reasoning_content": "So"})[:2], b'data: {"error": {"message": "lost"}}\n']
    out = Terminal()
    with pytest.raises(UsageError, match="lost"):
        chat.Printer(out).show(lines, 0.0)
    assert out.getvalue() == "\x1b[2mSo\x1b[0m\n"
    with pytest.raises(UsageError, match="lost"):
        list(events_of(lines, Reply()))


class Answers:
    """A target that answers one stream after the other and keeps what it was asked."""

    status = 200

    def __init__(self, *streams: list[bytes]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._streams = iter(streams)

    def request(self, method: str, path: str, document: Any = None) -> Any:
        self.bodies.append(json.loads(json.dumps(document)))
        self._lines = next(self._streams)
        return self

    def __iter__(self) -> Any:
        return iter(self._lines)


def test_a_called_tool_gets_its_result_and_the_answer_goes_on() -> None:
    called = stream(
        {"reasoning_content": "I need a tool."},
        {"tool_calls": [{**CALL, "function": {"name": "get_weather", "arguments": "{}"}}]},
    )
    target = Answers(called, stream({"content": "The result is sunny."}), stream({"content": "!"}))
    asked: list[str] = []

    def result_of(prompt: str) -> str | None:
        asked.append(prompt)
        return "sunny"

    talk = chat.Conversation(target, "m", {}, io.StringIO(), result_of)  # type: ignore[arg-type]
    talk.instruct("Be brief.")
    assert talk.say("weather?") == "The result is sunny."
    assert asked == ["result of get_weather> "]
    roles = [message["role"] for message in target.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert target.bodies[1]["messages"][2]["reasoning_content"] == "I need a tool."
    assert target.bodies[1]["messages"][3] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "sunny",
    }
    talk.start_over()
    talk.think(False)
    talk.say("hi")
    assert [message["role"] for message in target.bodies[2]["messages"]] == ["system", "user"]
    assert target.bodies[2]["thinking"] == {"type": "disabled"}


def test_a_question_that_failed_is_not_part_of_the_conversation() -> None:
    target = Answers([b'data: {"error": {"message": "lost"}}\n'], stream({"content": "Hi."}))
    talk = chat.Conversation(target, "m", {}, io.StringIO())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="lost"):
        talk.say("one")
    talk.say("two")
    assert [m["content"] for m in target.bodies[1]["messages"]] == ["two"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"temperature": "hot"}, "--temperature must be a number"),
        ({"thinking": "maybe"}, "--thinking is on or off"),
        ({"tools": "/nowhere.json"}, "No such file"),
    ],
)
def test_bad_options_are_told(flags: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        chat._options(flags)
    assert chat._options({"tools": "demo"})["tools"] == chat.DEMO_TOOLS


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_question_that_failed_ends_a_pipe_and_not_a_conversation(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "two", None])
    monkeypatch.setattr(chat, "_next_line", lambda prompt: next(lines))
    monkeypatch.setattr("sys.stdin", Terminal() if is_terminal else io.StringIO())
    target = Answers([b'data: {"error": {"message": "lost"}}\n'], stream({"content": "Hi."}))
    talk = chat.Conversation(target, "m", {}, io.StringIO())  # type: ignore[arg-type]
    if is_terminal:
        chat._converse(talk)
        assert "lost" in capsys.readouterr().err
        assert len(target.bodies) == 2
    else:
        with pytest.raises(UsageError, match="lost"):
            chat._converse(talk)
