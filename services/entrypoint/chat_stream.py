"""A streamed Chat answer, put together for the one who reads it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from services.entrypoint.command_line import UsageError

_BROKEN_OFF: Final = "the connection broke off within the answer"


@dataclass
class ToolCall:
    """A call as far as it has come."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Reply:
    """An answer as far as it has come; the counts are there once the stream has ended."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def message(self) -> dict[str, Any]:
        """Returns the answer as a message of the conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            # A later turn renders the reasoning that led to calls, and no other.
            message["reasoning_content"] = self.reasoning
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


def events_of(lines: Iterable[bytes], reply: Reply) -> Iterator[tuple[str, str]]:
    """Yields ("reasoning" | "content", text) of a stream and fills the reply on the way.

    Raises: UsageError with the words of an error inside the stream, or when it is not whole.
    """
    for line in _unbroken(lines):
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise UsageError(event["error"].get("message", "the stream failed"))
        _take_usage(event.get("usage"), reply)
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            if text := delta.get("reasoning_content"):
                reply.reasoning += text
                yield "reasoning", text
            if text := delta.get("content"):
                reply.content += text
                yield "content", text
            for part in delta.get("tool_calls") or ():
                _take_call(part, reply)
    # An entrypoint that is lost may end the connection as if all had been said.
    raise UsageError(_BROKEN_OFF)


def _unbroken(lines: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from lines
    except (OSError, http.client.HTTPException):
        raise UsageError(_BROKEN_OFF) from None


def _take_usage(usage: dict[str, Any] | None, reply: Reply) -> None:
    if usage:
        reply.prompt_tokens = usage.get("prompt_tokens", 0)
        reply.output_tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = details.get("cached_tokens", 0)


def _take_call(part: dict[str, Any], reply: Reply) -> None:
    while len(reply.calls) <= part.get("index", 0):
        reply.calls.append(ToolCall())
    call = reply.calls[part.get("index", 0)]
    call.call_id = part.get("id") or call.call_id
    function = part.get("function") or {}
    call.name = function.get("name") or call.name
    call.arguments += function.get("arguments") or ""
