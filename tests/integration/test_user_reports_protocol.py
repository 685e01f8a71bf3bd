"""What users of other servers reported about the three APIs, asked of the running stack.

Each test names its report; docs/user-reports.md lists them all.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from deploy.local.plan import FRONT, ProcessSpec
from tests.support.background_stack import BackgroundStack, write_script
from tests.support.speech import Speech, dsml
from tests.support.wire import (
    APIS,
    CHAT,
    MESSAGES,
    MODEL,
    RESPONSES,
    answer_of,
    body_of,
    frames,
    said_in_stream,
    send,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "finish_reasons.json").read_text())
OPENING = "\n\n<｜DSML｜ calls>\n"
CHOICES: dict[str, dict[str, Any]] = {
    CHAT: {
        "auto": "auto",
        "none": "none",
        "required": "required",
        "named": {"type": "function", "function": {"name": "note"}},
    },
    RESPONSES: {
        "auto": "auto",
        "none": "none",
        "required": "required",
        "named": {"type": "function", "name": "note"},
    },
    MESSAGES: {
        "auto": {"type": "auto"},
        "none": {"type": "none"},
        "required": {"type": "any"},
        "named": {"type": "tool", "name": "note"},
    },
}
MESSAGE_EVENTS: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENTS: dict[str, type[BaseModel]] = {
    kind: member
    for member in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
    for kind in typing.get_args(member.model_fields["type"].annotation)
}


def validate_frame(api: str, event: dict[str, Any]) -> None:
    """Raises ValidationError unless the frame is what the vendor publishes."""
    if api == CHAT:
        ChatCompletionChunk.model_validate(event)
    elif api == MESSAGES:
        if event != {"type": "ping"}:  # a sign of life that the published union leaves out
            MESSAGE_EVENTS.validate_python(event)
    else:
        usage = event.get("response", {}).get("usage")
        if usage:  # newer than the codec that we follow to the byte; clients take it as absent
            usage["input_tokens_details"].setdefault("cache_write_tokens", 0)
        RESPONSE_EVENTS[event["type"]].model_validate(event)


@pytest.fixture(scope="module")
def speech(scripts: Path) -> Speech:
    return Speech(scripts)


def plain_script(speech: Speech, scripts: Path, text: str) -> str:
    """Registers a script of ordinary ids only, whatever the text spells."""
    request_id = speech.script(text)
    write_script(scripts, request_id, {"token_ids": speech.plain_ids(text)})
    return request_id


# ---- finish reasons and calls ----------------------------------------------------------------


@pytest.mark.parametrize("cell", GOLDEN)
@pytest.mark.parametrize("api", APIS)
def test_ur_02_the_reason_is_the_same_streamed_or_not_for_every_choice(
    shared_stack: BackgroundStack, speech: Speech, api: str, cell: str
) -> None:
    choice, _, variant = cell.partition(", ")
    calls = dsml({"note": {"text": "some words"}})
    if choice == "named" or (choice == "required" and api != MESSAGES):
        calls = calls.removeprefix(OPENING)  # the prompt ends inside the block
    script = "plain words" if variant == "text" or choice == "none" else calls
    found = [
        answer_of(
            shared_stack,
            api,
            body_of(
                api,
                stream=stream,
                tools=("note", "other"),
                tool_choice=CHOICES[api][choice],
                max_tokens=15 if variant == "cut" else 200,
            ),
            speech.script(script),
        )
        for stream in (False, True)
    ]
    assert [answer.reason for answer in found] == [GOLDEN[cell][api]] * 2
    assert found[0].text == found[1].text
    if not variant:
        wanted = [] if choice == "none" else [("note", {"text": "some words"})]
        for answer in found:
            assert [(name, json.loads(value)) for name, value in answer.calls] == wanted


@pytest.mark.parametrize("api", APIS)
def test_ur_05_arguments_come_in_fragments_while_they_are_generated(
    shared_stack: BackgroundStack, speech: Speech, api: str
) -> None:
    value = " ".join(f"word{number}" for number in range(600))
    answers = []
    for stream in (False, True):
        request_id = speech.script("", calls={"note": {"text": value}})
        answers.append(
            send(shared_stack, api, body_of(api, stream=stream, tools=("note",)), request_id)
        )
    lengths = [
        len(fragment)
        for _, event in frames(answers[1].text)
        if (fragment := _argument_fragment(api, event))
    ]
    # A step says at most six tokens; nothing collects them on the way for long.
    assert len(lengths) > 100
    assert max(lengths) < len(value) / 8
    [(_, arguments)] = said_in_stream(api, answers[1].text).calls
    assert json.loads(arguments) == {"text": value}
    whole = json.dumps(answers[0].json(), ensure_ascii=False)
    assert value in whole


def _argument_fragment(api: str, event: Any) -> str:
    if event == "[DONE]":
        return ""
    if api == CHAT:
        parts = event["choices"][0]["delta"].get("tool_calls") or []
        return "".join(part["function"]["arguments"] for part in parts)
    if api == MESSAGES:
        return str(event.get("delta", {}).get("partial_json", ""))
    is_arguments = event["type"] == "response.function_call_arguments.delta"
    return str(event["delta"]) if is_arguments else ""


# ---- markup ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_ur_07_a_call_spelled_with_ordinary_tokens_is_text(
    shared_stack: BackgroundStack, speech: Speech, scripts: Path, api: str, stream: bool
) -> None:
    text = "Written as:" + dsml({"note": {"text": "b"}})
    request_id = plain_script(speech, scripts, text)
    body = body_of(api, stream=stream, tools=("note",))
    answer = answer_of(shared_stack, api, body, request_id)
    assert (answer.text, answer.calls) == (text, [])


D = "｜DSML｜"
PARAMETER = f'<{D} parameter name="text" string="true">b</{D} parameter>'
INVOKE = f'<{D} invoke name="note">\n{PARAMETER}\n</{D} invoke>'
MALFORMED = {
    "no wrapper": f"x{INVOKE}",
    "no closing parameter": f'x{OPENING}<{D} invoke name="note">\n<{D} parameter name="text" '
    'string="true">b',
    "no closing invoke": f'x{OPENING}<{D} invoke name="note">\n{PARAMETER}',
    "no closing block": f"x{OPENING}{INVOKE}",
    "unknown tag": f"x\n\n<{D} nonsense>y",
    "unknown attribute": f"x{OPENING}" + INVOKE.replace('name="text"', 'name="text" kind="k"'),
    "parameter twice": f"x{OPENING}" + INVOKE.replace(PARAMETER, PARAMETER + "\n" + PARAMETER),
    "nested invoke": f"x{OPENING}" + INVOKE.replace(">b<", f'>b<{D} invoke name="other"><'),
    "empty block": f"x{OPENING}</{D} calls>y",
    "close without open": f"x</{D} calls>y",
}


@pytest.mark.parametrize("variant", MALFORMED)
def test_ur_08_malformed_markup_ends_in_one_way_and_every_token_is_counted(
    shared_stack: BackgroundStack, speech: Speech, variant: str
) -> None:
    num_tokens = len(speech.ids(MALFORMED[variant]))
    for api in APIS:
        found = []
        for stream in (False, True):
            body = body_of(api, stream=stream, tools=("note",))
            found.append(answer_of(shared_stack, api, body, speech.script(MALFORMED[variant])))
        assert found[0].text == found[1].text
        assert [name for name, _ in found[0].calls] == [name for name, _ in found[1].calls]
        assert found[0].reason == found[1].reason != ""
        assert found[0].text.startswith("x")
        for answer in found:
            said = answer.usage.get("completion_tokens", answer.usage.get("output_tokens"))
            assert said == num_tokens


# ---- several turns ---------------------------------------------------------------------------


def _first_and_order(api: str, text: str) -> list[str]:
    """Which field each streamed delta belongs to, repeats left out."""
    order: list[str] = []
    for _, event in frames(text):
        kind = ""
        if event == "[DONE]":
            continue
        if api == CHAT:
            delta = event["choices"][0]["delta"]
            both = delta.get("reasoning_content"), delta.get("content") or delta.get("tool_calls")
            assert not all(both), "one delta holds both"
            kind = "reasoning" if both[0] else "answer" if both[1] else ""
        elif api == MESSAGES:
            kinds = {"thinking_delta": "reasoning", "text_delta": "answer"}
            kinds["input_json_delta"] = "answer"
            kind = kinds.get(event.get("delta", {}).get("type", ""), "")
        elif event["type"].endswith(".delta"):
            kind = "reasoning" if "reasoning" in event["type"] else "answer"
        if kind and order[-1:] != [kind]:
            order.append(kind)
    return order


@pytest.mark.parametrize("api", APIS)
def test_ur_14_ur_16_reasoning_stays_apart_in_every_turn_of_an_agent(
    shared_stack: BackgroundStack, speech: Speech, api: str
) -> None:
    turns = [
        ("I ask for Oslo.", "", {"note": {"text": "Oslo"}}),
        ("Now Bergen.", "One more.", {"note": {"text": "Bergen"}}),
        ("I know both.", "Oslo 3, Bergen 7.", None),
    ]
    key = "input" if api == RESPONSES else "messages"
    history: list[Any] = [{"role": "user", "content": "Which is warmer?"}]
    for number, (reasoning, text, calls) in enumerate(turns):
        body = body_of(api, stream=True, thinking=True, tools=("note",))
        body[key] = history
        request_id = speech.script(text, reasoning=reasoning, calls=calls)
        answer = send(shared_stack, api, body, request_id)
        assert answer.status_code == 200, answer.text
        assert _first_and_order(api, answer.text) == ["reasoning", "answer"]
        found = said_in_stream(api, answer.text)
        assert (found.reasoning, found.text, len(found.calls)) == (reasoning, text, bool(calls))
        for name, arguments in found.calls:
            history += _turn(api, f"call_{number}", found.reasoning, found.text, name, arguments)


def _turn(
    api: str, call_id: str, reasoning: str, text: str, name: str, arguments: str
) -> list[dict[str, Any]]:
    """An assistant's turn with one call, and its result, as a client sends them back."""
    if api == CHAT:
        function = {"name": name, "arguments": arguments}
        return [
            {
                "role": "assistant",
                "content": text,
                "reasoning_content": reasoning,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": "7"},
        ]
    if api == RESPONSES:
        return [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reasoning}],
            },
            {
                "type": "function_call",
                "call_id": call_id,
                "name": name,
                "arguments": arguments,
            },
            {"type": "function_call_output", "call_id": call_id, "output": "7"},
        ]
    return [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": reasoning, "signature": "altered"},
                *([{"type": "text", "text": text}] if text else []),
                {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "7"}],
        },
    ]


def test_ur_15_a_client_that_drops_the_reasoning_is_served(
    shared_stack: BackgroundStack, speech: Speech
) -> None:
    num_prompt = {}
    for name, value in {
        "present": {"reasoning_content": "I should ask for Oslo first."},
        "missing": {},
        "null": {"reasoning_content": None},
        "empty": {"reasoning_content": ""},
    }.items():
        turn, result = _turn(CHAT, "call_1", "", "", "note", '{"text": "Oslo"}')
        del turn["reasoning_content"]
        body = body_of(CHAT, thinking=True, tools=("note",))
        body["messages"] = [*body["messages"], turn | value, result]
        answer = answer_of(shared_stack, CHAT, body, speech.script("7", reasoning="So."))
        assert answer.text == "7"
        num_prompt[name] = answer.usage["prompt_tokens"]
    assert num_prompt["missing"] == num_prompt["null"] == num_prompt["empty"]
    assert num_prompt["present"] > num_prompt["missing"]


# ---- usage -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict_url(shared_stack: BackgroundStack) -> Iterator[str]:
    """One more entrypoint of the stack, with usage in a chunk of its own."""
    flags = (
        "--http_listen=127.0.0.1:0",
        f"--key_folder={shared_stack.stack.folder / 'keys'}",
        "--separate_usage_chunk=true",
        "--swa_directory=false",
    )
    spec = ProcessSpec("entrypoint-strict", "entrypoint", FRONT, flags)
    process = shared_stack.run(shared_stack.stack.add(spec))
    yield f"http://{process.labels['http']}"
    shared_stack.run(shared_stack.stack.remove("entrypoint-strict"))


@pytest.mark.parametrize("include_usage", [False, True])
def test_ur_17_usage_comes_once_in_both_modes(
    shared_stack: BackgroundStack, speech: Speech, strict_url: str, include_usage: bool
) -> None:
    for url in (shared_stack.url, strict_url):
        more = {"stream_options": {"include_usage": True}} if include_usage else {}
        body = body_of(CHAT, stream=True, **more)
        answer = send(shared_stack, CHAT, body, speech.script("One two three."), url)
        *chunks, done = [event for _, event in frames(answer.text)]
        assert done == "[DONE]"
        counted = [chunk for chunk in chunks if chunk.get("usage")]
        assert counted == chunks[-1:]
        if url == strict_url:
            assert counted[0]["choices"] == []
            assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        else:
            assert counted[0]["choices"][0]["finish_reason"] == "stop"
            # Asked for or not is told by the earlier chunks; the strict finish says null anyway.
            assert all(("usage" in chunk) == include_usage for chunk in chunks[:-1])
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key=shared_stack.key, max_retries=0, timeout=60
        ) as client:
            seen = list(
                client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    extra_body={"thinking": {"type": "disabled"}},
                    extra_headers={"x-request-id": speech.script("One two three.")},
                )
            )
        usages = [chunk.usage for chunk in seen if chunk.usage]
        assert [usage.completion_tokens for usage in usages] == [
            counted[0]["usage"]["completion_tokens"]
        ]


def test_ur_18_the_final_message_knows_the_input_tokens(
    shared_stack: BackgroundStack, speech: Speech
) -> None:
    body = body_of(MESSAGES, "A question of some words. " * 40, stream=True)
    answer = send(shared_stack, MESSAGES, body, speech.script("Yes."))
    events = [event for _, event in frames(answer.text)]
    first = events[0]["message"]["usage"]
    [last] = [event["usage"] for event in events if event["type"] == "message_delta"]
    for usage in (first, last):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 200
    assert last["output_tokens"] == len(speech.ids("Yes."))
    del body["stream"]
    with (
        anthropic.Anthropic(
            base_url=shared_stack.url, api_key=shared_stack.key, max_retries=0, timeout=60
        ) as client,
        client.messages.stream(
            **body, extra_headers={"x-request-id": speech.script("Yes.")}
        ) as stream,
    ):
        usage = stream.get_final_message().usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 200


# ---- frames ----------------------------------------------------------------------------------


SPEECHES: list[dict[str, Any]] = [
    {"answer": "Plain text."},
    {"answer": "Text.", "reasoning": "A thought."},
    {"answer": "", "calls": {"note": {"text": "x"}, "note#2": {"text": "y"}}},
    {"answer": "Both.", "reasoning": "A thought.", "calls": {"note": {"text": "x"}}},
    {"answer": "Cut off in the middle of it " * 9},
]


@pytest.mark.parametrize("number", range(len(SPEECHES)))
@pytest.mark.parametrize("api", APIS)
def test_ur_21_ur_22_frames_are_of_the_published_types_and_nothing_else_is_sent(
    shared_stack: BackgroundStack, speech: Speech, api: str, number: int
) -> None:
    spoken = SPEECHES[number]
    body = body_of(
        api,
        stream=True,
        thinking="reasoning" in spoken,
        tools=("note",),
        max_tokens=40,
    )
    answer = send(shared_stack, api, body, speech.script(**spoken))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    for line in answer.text.split("\n"):
        assert line.startswith(("event: ", "data: ", ":")) or line == ""
    found = frames(answer.text)
    if api == CHAT:
        assert found.pop() == ("", "[DONE]")
    for name, event in found:
        assert name == ("" if api == CHAT else event["type"])
        validate_frame(api, event)


@pytest.mark.parametrize("number", range(len(SPEECHES)))
def test_ur_25_ur_26_every_added_item_is_done_in_order_and_events_are_numbered(
    shared_stack: BackgroundStack, speech: Speech, number: int
) -> None:
    spoken = SPEECHES[number]
    thinking = "reasoning" in spoken
    body = body_of(RESPONSES, stream=True, thinking=thinking, tools=("note",), max_tokens=40)
    answer = send(shared_stack, RESPONSES, body, speech.script(**spoken))
    events = [event for _, event in frames(answer.text)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete")
    open_item: int | None = None
    deltas = ""
    for kind, event in zip(kinds, events, strict=True):
        if kind == "output_item.added":
            assert open_item is None
            open_item, deltas = event["output_index"], ""
        elif kind.endswith(".delta"):
            assert event["output_index"] == open_item
            deltas += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == deltas != ""
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == deltas
        elif kind == "output_item.done":
            assert event["output_index"] == open_item
            open_item = None
    assert open_item is None
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
