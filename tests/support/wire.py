"""The three APIs at the level of bytes: bodies, frames, and what an answer says, in one form.

The official clients are used elsewhere; here every frame counts, also what a client would skip.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import httpx

from tests.support.background_stack import BackgroundStack

MODEL: Final = "DeepSeek-V4.1-Flash"
CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
APIS: Final = (CHAT, RESPONSES, MESSAGES)
PATHS: Final = {
    CHAT: "/v1/chat/completions",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
}
LIMIT_FIELDS: Final = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
Document = dict[str, Any]


@dataclass
class Said:
    """What an answer says, whichever API it is in."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments as text
    reason: str = ""
    usage: Document = field(default_factory=dict)


def body_of(
    api: str,
    text: str = "hi",
    *,
    stream: bool = False,
    thinking: bool = False,
    max_tokens: int = 0,
    tools: tuple[str, ...] = (),
    **more: object,
) -> Document:
    """Returns a request body; each tool takes one string, `text`."""
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    body: Document = {"model": MODEL, "stream": stream}
    if api == RESPONSES:
        body |= {"input": text, "reasoning": {"effort": "high" if thinking else "none"}}
        declared = [{"type": "function", "name": name, "parameters": schema} for name in tools]
    else:
        body |= {
            "messages": [{"role": "user", "content": text}],
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if api == CHAT:
            declared = [
                {"type": "function", "function": {"name": name, "parameters": schema}}
                for name in tools
            ]
        else:
            declared = [{"name": name, "input_schema": schema} for name in tools]
            max_tokens = max_tokens or 2048
    if tools:
        body["tools"] = declared
    if max_tokens:
        body[LIMIT_FIELDS[api]] = max_tokens
    return body | more


def send(
    stack: BackgroundStack, api: str, body: Document, request_id: str = "", url: str = ""
) -> httpx.Response:
    """Returns the whole answer, with an entrypoint's address other than the first's in `url`."""
    headers = {"authorization": f"Bearer {stack.key}"}
    if request_id:
        headers["x-request-id"] = request_id
    return _client().post(f"{url or stack.url}{PATHS[api]}", json=body, headers=headers)


@cache
def _client() -> httpx.Client:
    # One for all: making one reads every certificate authority of the machine.
    return httpx.Client(timeout=100, verify=False)  # plain HTTP


def frames(text: str) -> list[tuple[str, Any]]:
    """Returns (event name, document) of each frame, "[DONE]" as text; comments are left out."""
    found = []
    for frame in text.split("\n\n"):
        lines = [line for line in frame.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        names = [line[7:] for line in lines if line.startswith("event: ")]
        data = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        found.append((names[0] if names else "", data if data == "[DONE]" else json.loads(data)))
    return found


def said(api: str, document: Document) -> Said:
    """Returns what a whole response says."""
    if api == CHAT:
        [choice] = document["choices"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or []]
        return Said(
            message["content"] or "",
            message.get("reasoning_content") or "",
            [(call["name"], call["arguments"]) for call in functions],
            choice["finish_reason"],
            document["usage"],
        )
    if api == MESSAGES:
        blocks = document["content"]
        return Said(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            [
                (block["name"], json.dumps(block["input"]))
                for block in blocks
                if block["type"] == "tool_use"
            ],
            document["stop_reason"],
            document["usage"],
        )
    items = document["output"]
    parts = [part for item in items for part in item.get("content") or []]
    details = document["incomplete_details"]
    return Said(
        "".join(part["text"] for part in parts if part["type"] == "output_text"),
        "".join(part["text"] for part in parts if part["type"] == "reasoning_text"),
        [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"],
        details["reason"] if details else document["status"],
        document["usage"],
    )


def said_in_stream(api: str, text: str) -> Said:
    """Returns what a stream says, joined by us from its deltas."""
    found = frames(text)
    result = Said()
    calls: dict[int, list[str]] = {}
    for _, event in found:
        if event == "[DONE]":
            continue
        if api == CHAT:
            result.usage = event.get("usage") or result.usage
            for choice in event["choices"]:
                delta = choice["delta"]
                result.text += delta.get("content") or ""
                result.reasoning += delta.get("reasoning_content") or ""
                result.reason = choice["finish_reason"] or result.reason
                for part in delta.get("tool_calls") or []:
                    call = calls.setdefault(part["index"], ["", ""])
                    call[0] += part["function"].get("name") or ""
                    call[1] += part["function"].get("arguments") or ""
        elif api == MESSAGES:
            kind, delta = event["type"], event.get("delta", {})
            if kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
                calls[event["index"]] = [event["content_block"]["name"], ""]
            elif kind == "content_block_delta":
                result.text += delta.get("text", "")
                result.reasoning += delta.get("thinking", "")
                if "partial_json" in delta:
                    calls[event["index"]][1] += delta["partial_json"]
            elif kind == "message_delta":
                result.reason, result.usage = delta["stop_reason"], event["usage"]
        elif event["type"] in ("response.completed", "response.incomplete"):
            last = said(api, event["response"])
            result.reason, result.usage = last.reason, last.usage
        elif event["type"] == "response.output_text.delta":
            result.text += event["delta"]
        elif event["type"] == "response.reasoning_text.delta":
            result.reasoning += event["delta"]
        elif event["type"] == "response.function_call_arguments.delta":
            calls[event["output_index"]][1] += event["delta"]
        elif event["type"] == "response.output_item.added" and "name" in event["item"]:
            calls[event["output_index"]] = [event["item"]["name"], ""]
    result.calls = [(name, arguments) for _, (name, arguments) in sorted(calls.items())]
    return result


def answer_of(
    stack: BackgroundStack, api: str, body: Document, request_id: str = "", url: str = ""
) -> Said:
    """Returns what the answer to a request says; it must be a 200."""
    answer = send(stack, api, body, request_id, url)
    assert answer.status_code == 200, answer.text
    return said_in_stream(api, answer.text) if body.get("stream") else said(api, answer.json())
