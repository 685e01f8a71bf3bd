"""The official `anthropic` client against the running stack: Messages."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.integration.conftest import MODEL
from tests.support.background_stack import BackgroundStack
from tests.support.speech import Speech

WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
PLAIN = {"type": "disabled"}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def speech(scripts) -> Speech:
    return Speech(scripts)


@pytest.fixture
def client(shared_stack: BackgroundStack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=shared_stack.url, api_key=shared_stack.key, max_retries=0, timeout=60
    ) as client:
        yield client


def ask(client: anthropic.Anthropic, request_id: str, *, stream: bool, **arguments):
    """Returns the whole message, accumulated by the client itself when streamed."""
    arguments.setdefault("messages", [{"role": "user", "content": "Weather in Oslo?"}])
    arguments.setdefault("max_tokens", 2048)
    arguments = {"model": MODEL, "extra_headers": {"x-request-id": request_id}, **arguments}
    if not stream:
        return client.messages.create(**arguments)
    with client.messages.stream(**arguments) as events:
        return events.get_final_message()


def text_of(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_messages_say_what_the_engine_said(client, speech, stream, thinking):
    request_id = speech.script("Mild, 12 °C.", reasoning="Norway." * thinking)
    message = ask(client, request_id, stream=stream, thinking=THINKING if thinking else PLAIN)
    assert text_of(message) == "Mild, 12 °C."
    assert message.stop_reason == "end_turn"
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking"] * thinking + ["text"]
    if thinking:
        assert message.content[0].thinking == "Norway."
        assert message.content[0].signature
    # UR-18: the final usage counts the prompt too.
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0
    assert message.usage.output_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_ur_16_thinking_and_calls_come_back_in_the_next_turn(client, speech, stream):
    messages: list = [{"role": "user", "content": "Weather in Oslo?"}]
    first = speech.script("", reasoning="I ask.", calls={"weather": {"city": "Oslo"}})
    message = ask(
        client, first, stream=stream, thinking=THINKING, tools=[WEATHER], messages=messages
    )
    assert message.stop_reason == "tool_use"
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3 °C"}],
        },
    ]
    second = speech.script("It is 3 °C.", reasoning="I know.")
    message = ask(
        client, second, stream=stream, thinking=THINKING, tools=[WEATHER], messages=messages
    )
    assert (text_of(message), message.stop_reason) == ("It is 3 °C.", "end_turn")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_are_named(client, speech, stream):
    request_id = speech.script("one two three")
    message = ask(client, request_id, stream=stream, thinking=PLAIN, stop_sequences=[" three"])
    assert (text_of(message), message.stop_reason) == ("one two", "stop_sequence")
    assert message.stop_sequence == " three"


@pytest.mark.parametrize("stream", [False, True])
def test_the_limit_is_named(client, speech, stream):
    request_id = speech.script("word " * 50)
    message = ask(client, request_id, stream=stream, thinking=PLAIN, max_tokens=8)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)


def test_tokens_are_counted_without_running(client):
    counted = client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": "Weather in Oslo?"}]
    )
    assert counted.input_tokens > 4


def test_the_client_sees_typed_errors(client, shared_stack):
    with pytest.raises(anthropic.BadRequestError, match="supported API model names"):
        client.messages.create(
            model="claude-0", max_tokens=8, messages=[{"role": "user", "content": "x"}]
        )
    wrong = anthropic.Anthropic(base_url=shared_stack.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError) as caught:
        wrong.messages.create(
            model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "x"}]
        )
    assert caught.value.body["error"]["type"] == "authentication_error"
