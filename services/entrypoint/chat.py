"""`pelagos chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TextIO

from services.entrypoint.command_line import (
    Target,
    UsageError,
    error_text,
    find_target,
    parse_flags,
)

USAGE: Final = """usage: pelagos chat [--url URL] [--key-file FILE] [--model NAME] [--max-tokens N]
       [--thinking on|off] [MESSAGE]

With a MESSAGE one answer is printed; without, lines are read until the end of input."""
_FLAGS: Final = ("url", "key-file", "model", "max-tokens", "thinking")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the conversation; returns the exit status."""
    args = list(sys.argv[2:] if argv is None else argv)
    if "-h" in args or "--help" in args:
        print(USAGE)
        return 0
    try:
        flags, words = parse_flags(args, _FLAGS)
        target = find_target(flags)
        model = flags.get("model") or _first_model(target)
        talk = Conversation(target, model, _options(flags), sys.stdout)
        if words:
            talk.say(" ".join(words))
        else:
            _converse(talk)
    except UsageError as error:
        print(f"pelagos chat: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
    return 0


class Conversation:
    """What was said so far, and how to go on."""

    def __init__(self, target: Target, model: str, options: dict[str, Any], out: TextIO) -> None:
        self._target = target
        self._model = model
        self._options = options
        self._out = out
        self._messages: list[dict[str, str]] = []

    def say(self, text: str) -> str:
        """Sends a message and prints the answer as it comes; returns it."""
        self._messages.append({"role": "user", "content": text})
        body = {"model": self._model, "messages": self._messages, "stream": True, **self._options}
        response = self._target.request("POST", "/v1/chat/completions", body)
        if response.status != 200:
            self._messages.pop()
            raise UsageError(error_text(response))
        answer = self._print(deltas(response))
        self._messages.append({"role": "assistant", "content": answer})
        return answer

    def _print(self, parts: Iterable[tuple[str, str]]) -> str:
        is_terminal = self._out.isatty()
        answer: list[str] = []
        thinking = False
        for kind, text in parts:
            if (kind == "reasoning") != thinking:
                thinking = not thinking
                if is_terminal:
                    self._out.write(_DIM if thinking else f"{_PLAIN}\n")
            if kind == "content":
                answer.append(text)
            elif not is_terminal:
                continue  # a pipe gets the answer alone
            self._out.write(text)
            self._out.flush()
        self._out.write(f"{_PLAIN}\n" if is_terminal else "\n")
        return "".join(answer)


def deltas(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yields ("reasoning" | "content", text) of a Chat stream. Raises UsageError on an error."""
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise UsageError(event["error"].get("message", "the stream failed"))
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            if delta.get("reasoning_content"):
                yield "reasoning", delta["reasoning_content"]
            if delta.get("content"):
                yield "content", delta["content"]


def _converse(talk: Conversation) -> None:
    interactive = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            return
        if line.strip():
            talk.say(line)


def _options(flags: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "max-tokens" in flags:
        if not flags["max-tokens"].isdigit():
            raise UsageError("--max-tokens must be a number")
        options["max_tokens"] = int(flags["max-tokens"])
    if "thinking" in flags:
        if flags["thinking"] not in ("on", "off"):
            raise UsageError("--thinking is on or off")
        options["thinking"] = {"type": "enabled" if flags["thinking"] == "on" else "disabled"}
    return options


def _first_model(target: Target) -> str:
    response = target.request("GET", "/v1/models")
    if response.status != 200:
        raise UsageError(error_text(response))
    names: list[str] = [model["id"] for model in json.loads(response.read())["data"]]
    if not names:
        raise UsageError("no model is served; is an engine running?")
    # The newest name sorts last in the codec's table.
    return names[-1]


if __name__ == "__main__":
    sys.exit(main())
