"""Conversations as values: what was asked, and what the one right answer is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

Message = dict[str, Any]
MODEL: Final = "pelagos-mini"


@dataclass(frozen=True)
class Call:
    """A tool call: arguments as JSON values, in the order they are written."""

    name: str
    arguments: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    kind: str
    question: str
    answer: str
    thought: str = ""  # what is reasoned first, where thinking is on
    call: Call | None = None  # then there is no answer text
    recalled: str = ""  # the value that the answer takes from earlier text
    values: tuple[str, ...] = ()  # of those, and of others, what the split is decided by
    role: str = "user"  # `tool` for the result of the turn before


@dataclass(frozen=True)
class Question:
    """What is asked of a running stack: a request's parts and the answer that is right."""

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    response_format: Message | None
    thinking: bool
    expected: str | Call
    recalled: str = ""
    effort: str | None = None

    def body(self) -> Message:
        """Returns the request's body for Chat Completions, without sampling options."""
        return _body(self.messages, self.tools, self.response_format, self.thinking, self.effort)


@dataclass(frozen=True)
class Dialogue:
    """One conversation of many turns under one header."""

    turns: tuple[Turn, ...]
    thinking: bool = False
    system: str = ""
    tools: tuple[Message, ...] = ()
    response_format: Message | None = None
    effort: str | None = None  # reasoning effort; None: the request names none
    silent: frozenset[int] = field(default_factory=frozenset)  # turns whose reasoning got lost

    def messages(self, num_turns: int) -> list[Message]:
        """Returns the messages of the first turns, answers included."""
        listed: list[Message] = []
        if self.system:
            listed.append({"role": "system", "content": self.system})
        for index in range(num_turns):
            listed.append(self._asked(index))
            listed.append(self._answered(index))
        return listed

    def body(self, num_turns: int, with_answer: bool) -> Message:
        """Returns the body that holds so many turns, the last one answered or only asked."""
        messages = self.messages(num_turns)
        if not with_answer:
            del messages[-1]
        return _body(tuple(messages), self.tools, self.response_format, self.thinking, self.effort)

    def question(self, index: int) -> Question:
        """Returns the turn as a question to a running stack."""
        turn = self.turns[index]
        return Question(
            turn.kind,
            tuple(self.messages(index + 1)[:-1]),
            self.tools,
            self.response_format,
            self.thinking,
            turn.call or turn.answer,
            turn.recalled,
            self.effort,
        )

    def _asked(self, index: int) -> Message:
        turn = self.turns[index]
        message: Message = {"role": turn.role, "content": turn.question}
        if turn.role == "tool":
            message["tool_call_id"] = f"call_{index - 1}"
        return message

    def _answered(self, index: int) -> Message:
        turn = self.turns[index]
        message: Message = {"role": "assistant", "content": turn.answer}
        if self.thinking:
            message["reasoning_content"] = "" if index in self.silent else turn.thought
        if turn.call:
            function = {"name": turn.call.name, "arguments": _json(dict(turn.call.arguments))}
            message["tool_calls"] = [
                {"id": f"call_{index}", "type": "function", "function": function}
            ]
        return message


def _body(
    messages: tuple[Message, ...],
    tools: tuple[Message, ...],
    response_format: Message | None,
    thinking: bool,
    effort: str | None,
) -> Message:
    body: Message = {"model": MODEL, "messages": list(messages)}
    body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if effort:
        body["reasoning_effort"] = effort
    if tools:
        body["tools"] = list(tools)
    if response_format:
        body["response_format"] = response_format
    return body


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
