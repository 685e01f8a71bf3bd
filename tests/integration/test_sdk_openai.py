"""The official `openai` client against the running stack: Chat Completions and Responses."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator

import openai
import pytest
from PIL import Image

from tests.integration.conftest import MODEL
from tests.support.background_stack import BackgroundStack
from tests.support.speech import Speech

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
PLAIN = {"thinking": {"type": "disabled"}}
THINKING = {"thinking": {"type": "enabled"}}


@pytest.fixture(scope="module")
def speech(scripts) -> Speech:
    return Speech(scripts)


@pytest.fixture
def client(shared_stack: BackgroundStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared_stack.url}/v1", api_key=shared_stack.key, max_retries=0, timeout=60
    ) as client:
        yield client


def as_request(request_id: str) -> dict[str, str]:
    return {"x-request-id": request_id}


def chat(client: openai.OpenAI, request_id: str, *, stream: bool, body: dict, **arguments):
    """Returns (reasoning, content, calls by index, finish_reason, usage), streamed or not."""
    arguments.setdefault("messages", [{"role": "user", "content": "Weather in Oslo?"}])
    answer = client.chat.completions.create(
        model=MODEL,
        stream=stream,
        extra_body=body,
        extra_headers=as_request(request_id),
        **arguments,
    )
    if not stream:
        message = answer.choices[0].message
        calls = [
            (call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or []
        ]
        reasoning = getattr(message, "reasoning_content", None) or ""
        return (
            reasoning,
            message.content or "",
            calls,
            answer.choices[0].finish_reason,
            answer.usage,
        )
    reasoning, content, calls, finish, usage = "", "", {}, None, None
    for chunk in answer:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
            for part in delta.tool_calls or []:
                call = calls.setdefault(part.index, [None, "", ""])
                call[0] = part.id or call[0]
                call[1] += part.function.name or ""
                call[2] += part.function.arguments or ""
            finish = choice.finish_reason or finish
    ordered = [tuple(calls[index]) for index in sorted(calls)]
    return reasoning, content, ordered, finish, usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_chat_says_what_the_engine_said(client, speech, stream, thinking):
    request_id = speech.script("Mild, 12 °C. 🌤", reasoning="Oslo is in Norway.\n" * thinking)
    reasoning, content, calls, finish, usage = chat(
        client, request_id, stream=stream, body=THINKING if thinking else PLAIN
    )
    assert reasoning.strip() == ("Oslo is in Norway." if thinking else "")
    assert (content, calls, finish) == ("Mild, 12 °C. 🌤", [], "stop")
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    if thinking:
        assert usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_ur_03_ur_04_parallel_calls_keep_their_index_id_and_arguments(client, speech, stream):
    wanted = {
        "weather": {"city": "Oslo", "days": 3},
        "weather#2": {"city": 'Ber"gen\n'},
        "weather#3": {"city": "東京"},
    }
    request_id = speech.script("Looking.", calls=wanted)
    _, content, calls, finish, _ = chat(
        client, request_id, stream=stream, body=PLAIN, tools=[WEATHER]
    )
    assert (content, finish) == ("Looking.", "tool_calls")
    assert [json.loads(arguments) for _, _, arguments in calls] == list(wanted.values())
    assert [name for _, name, _ in calls] == ["weather"] * 3
    assert len({call_id for call_id, _, _ in calls}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_ur_14_a_call_its_result_and_the_answer_to_it(client, speech, stream):
    messages = [{"role": "user", "content": "Weather in Oslo?"}]
    first = speech.script("", reasoning="I should ask.", calls={"weather": {"city": "Oslo"}})
    reasoning, content, calls, finish, _ = chat(
        client, first, stream=stream, body=THINKING, tools=[WEATHER], messages=messages
    )
    assert (reasoning, content, finish) == ("I should ask.", "", "tool_calls")
    [(call_id, name, arguments)] = calls
    messages += [
        {
            "role": "assistant",
            "content": content,
            "reasoning_content": reasoning,
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "3 °C"},
    ]
    second = speech.script("It is 3 °C.", reasoning="Now I know.")
    reasoning, content, calls, finish, _ = chat(
        client, second, stream=stream, body=THINKING, tools=[WEATHER], messages=messages
    )
    assert (reasoning, content, calls, finish) == ("Now I know.", "It is 3 °C.", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_end_the_answer_before_them(client, speech, stream):
    request_id = speech.script("The quick brown fox jumps")
    _, content, _, finish, _ = chat(
        client, request_id, stream=stream, body=PLAIN, stop=["own fox", "never"]
    )
    assert (content, finish) == ("The quick br", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_ur_01_a_call_cut_by_the_limit_ends_with_length(client, speech, stream):
    request_id = speech.script("", calls={"weather": {"city": "O" + "slo" * 40}})
    _, _, _, finish, usage = chat(
        client, request_id, stream=stream, body=PLAIN, tools=[WEATHER], max_tokens=30
    )
    assert finish == "length"
    assert usage.completion_tokens == 30


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_their_alternatives(client, speech, stream):
    request_id = speech.script("Yes indeed", logprobs=True)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Sure?"}],
        logprobs=True,
        top_logprobs=2,
        stream=stream,
        extra_body=PLAIN,
        extra_headers=as_request(request_id),
    )
    chunks = list(answer) if stream else [answer]
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for entry in choice.logprobs.content
    ]
    assert "".join(entry.token for entry in entries) == "Yes indeed"
    assert [entry.logprob for entry in entries] == [-0.25 * (at + 1) for at in range(len(entries))]
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_structured_request_reaches_the_engine_with_its_schema(client, speech):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    request_id = speech.script('{"city": "Oslo"}')
    _, content, _, finish, _ = chat(
        client,
        request_id,
        stream=False,
        body=PLAIN,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": schema, "strict": True},
        },
    )
    assert (json.loads(content), finish) == ({"city": "Oslo"}, "stop")


def png(width: int, height: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 40)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_an_image_widens_the_prompt_by_its_span(client, speech):
    def ask(*parts):
        request_id = speech.script("Red.")
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "Colour?"}]}]
        return chat(client, request_id, stream=False, body=PLAIN, messages=messages)

    without = ask()[4].prompt_tokens
    _, content, _, finish, usage = ask({"type": "image_url", "image_url": {"url": png(640, 480)}})
    assert (content, finish) == ("Red.", "stop")
    # 640 x 480 fills 206 positions (recipe.md, section 11.3) and a separator joins the blocks.
    assert 206 <= usage.prompt_tokens - without <= 208


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_responses_say_what_the_engine_said(client, speech, stream, thinking):
    request_id = speech.script("Mild.", reasoning="Think." * thinking)
    arguments = {
        "model": MODEL,
        "input": "Weather in Oslo?",
        "instructions": "Be brief.",
        "reasoning": {"effort": "high" if thinking else "none"},
        "extra_headers": as_request(request_id),
    }
    if stream:
        events = list(client.responses.create(stream=True, **arguments))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
        assert kinds.count("response.output_text.done") == 1
        response = events[-1].response
    else:
        response = client.responses.create(**arguments)
    assert response.status == "completed"
    assert response.output_text == "Mild."
    assert [item.type for item in response.output] == ["reasoning"] * thinking + ["message"]
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_responses_call_a_function_and_take_its_result(client, speech):
    tool = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
    first = speech.script("", calls={"weather": {"city": "Oslo"}})
    response = client.responses.create(
        model=MODEL,
        input="Weather?",
        tools=[tool],
        reasoning={"effort": "none"},
        extra_headers=as_request(first),
    )
    [call] = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Oslo"}
    second = speech.script("3 °C.")
    history = [
        {"role": "user", "content": "Weather?"},
        {
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        },
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    response = client.responses.create(
        model=MODEL,
        input=history,
        tools=[tool],
        reasoning={"effort": "none"},
        extra_headers=as_request(second),
    )
    assert response.output_text == "3 °C."


def test_models_are_listed(client):
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_the_client_sees_typed_errors(client, shared_stack):
    with pytest.raises(openai.BadRequestError, match="supported API model names"):
        client.chat.completions.create(model="gpt-0", messages=[{"role": "user", "content": "x"}])
    wrong = openai.OpenAI(base_url=f"{shared_stack.url}/v1", api_key="sk-wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
