"""`pelagos chat`: a conversation in the terminal, streamed.

A terminal shows the reasoning dimmed, the calls of tools, and after each answer how much of the
prompt came from the cache and how fast it went. A pipe gets the answers alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TextIO

from services.entrypoint.chat_stream import Reply, events_of
from services.entrypoint.command_line import (
    Target,
    UsageError,
    error_text,
    find_target,
    parse_flags,
)

USAGE: Final = """usage: pelagos chat [--folder DIR] [--url URL] [--key-file FILE] [--model NAME]
       [--max-tokens N] [--thinking on|off] [--temperature T] [--system TEXT] [--tools FILE]
       [MESSAGE]

--folder: of the stack to talk to, .local/stack unless given; --url and --key-file: of any other.
With a MESSAGE one answer is printed; without, lines are read until the end of input.
--tools: a JSON list of tools as the Chat API takes them, or "demo" for one that tells the weather;
when one is called, the next line is its result. Greedy unless a temperature is given.
While it reads lines: /new starts over, /thinking on|off, /quit ends; Ctrl-C stops an answer."""
_FLAGS: Final = (
    *("folder", "url", "key-file", "model", "max-tokens", "thinking", "temperature"),
    *("system", "tools"),
)
_DIM, _CYAN, _PLAIN = "\x1b[2m", "\x1b[36m", "\x1b[0m"
DEMO_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
_MAX_CALLS: Final = 8  # of one question, so that no model calls for ever


def main(argv: list[str] | None = None) -> int:
    """Runs the conversation; returns the exit status."""
    args = list(sys.argv[2:] if argv is None else argv)
    if "-h" in args or "--help" in args:
        print(USAGE)
        return 0
    try:
        flags, words = parse_flags(args, _FLAGS)
        target = find_target(flags)
        model = flags.get("model") or _first_model(target)
        talk = Conversation(target, model, _options(flags), sys.stdout, _next_line)
        if "system" in flags:
            talk.instruct(flags["system"])
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
    """What was said so far, and how to go on.

    Args:
        result_of: asked for a tool's result by its name; None when there is none to be had.
    """

    def __init__(
        self,
        target: Target,
        model: str,
        options: dict[str, Any],
        out: TextIO,
        result_of: Callable[[str], str | None] = lambda prompt: None,
    ) -> None:
        self._target = target
        self._model = model
        self._options = options
        self._printer = Printer(out)
        self._result_of = result_of
        self._system: list[dict[str, Any]] = []
        self._messages: list[dict[str, Any]] = []

    def instruct(self, text: str) -> None:
        """Sets what stands before every conversation."""
        self._system = [{"role": "system", "content": text}]

    def start_over(self) -> None:
        """Forgets everything said."""
        self._messages = []

    def think(self, is_on: bool) -> None:
        """Turns reasoning on or off from the next question on."""
        self._options["thinking"] = {"type": "enabled" if is_on else "disabled"}

    def say(self, text: str) -> str:
        """Sends a message and prints the answer as it comes; returns it.

        Tools that are called get their results, until an answer needs none any more.
        """
        known = len(self._messages)
        self._messages.append({"role": "user", "content": text})
        try:
            for _ in range(_MAX_CALLS):
                reply = self._ask()
                self._messages.append(reply.message())
                if not reply.calls or not self._answer_calls(reply):
                    break
        except BaseException:
            del self._messages[known:]  # a question without an answer is not part of it
            raise
        return reply.content

    def _ask(self) -> Reply:
        body = {
            "model": self._model,
            "messages": [*self._system, *self._messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        asked_s = time.monotonic()
        response = self._target.request("POST", "/v1/chat/completions", body)
        if response.status != 200:
            raise UsageError(error_text(response))
        return self._printer.show(response, asked_s)

    def _answer_calls(self, reply: Reply) -> bool:
        """Adds the results of a reply's calls; False when there are none to be had."""
        for call in reply.calls:
            result = self._result_of(f"result of {call.name}> ")
            if result is None:
                return False
            message = {"role": "tool", "tool_call_id": call.call_id, "content": result}
            self._messages.append(message)
        return True


class Printer:
    """Shows a streamed answer. A pipe gets nothing but its words."""

    def __init__(self, out: TextIO, now_s: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._now_s = now_s
        self._is_terminal = out.isatty()

    def show(self, lines: Iterable[bytes], asked_s: float) -> Reply:
        """Prints the events of a stream as they come; returns the whole reply."""
        reply = Reply()
        first_s: float | None = None
        thinking = False
        try:
            for kind, text in events_of(lines, reply):
                first_s = self._now_s() if first_s is None else first_s
                if (kind == "reasoning") != thinking:
                    thinking = not thinking
                    self._decorate(_DIM if thinking else f"{_PLAIN}\n")
                if kind == "content" or self._is_terminal:
                    self._out.write(text)
                    self._out.flush()
        finally:
            self._decorate(f"{_PLAIN}\n" if thinking else _PLAIN)
        for call in reply.calls:
            self._decorate(f"{_CYAN}{call.name}({call.arguments}){_PLAIN}")
        if not reply.calls or self._is_terminal:
            self._out.write("\n")
        self._decorate(f"{_DIM}{self._told(reply, asked_s, first_s)}{_PLAIN}\n")
        self._out.flush()
        return reply

    def _decorate(self, text: str) -> None:
        if self._is_terminal:
            self._out.write(text)

    def _told(self, reply: Reply, asked_s: float, first_s: float | None) -> str:
        """Returns one line: tokens, what of the prompt was cached, and how fast it went."""
        now_s = self._now_s()
        parts = [f"{reply.output_tokens} tokens"]
        if reply.prompt_tokens:
            parts.append(f"prompt {reply.prompt_tokens}, {reply.cached_tokens} of it cached")
        if first_s is not None:
            parts.append(f"first after {1000 * (first_s - asked_s):.0f} ms")
            if reply.output_tokens > 1 and now_s > first_s:
                parts.append(f"{(reply.output_tokens - 1) / (now_s - first_s):.0f} tokens/s")
        return f"[{', '.join(parts)}]"


def _converse(talk: Conversation) -> None:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() then has a history and can be edited
    while (line := _next_line("> ")) is not None:
        words = line.split()
        if words[:1] == ["/quit"]:
            return
        if words[:1] == ["/new"]:
            talk.start_over()
        elif words[:1] == ["/thinking"] and words[1:] in (["on"], ["off"]):
            talk.think(words[1] == "on")
        elif words and words[0].startswith("/"):
            print(f"{words[0]} is no command: /new, /thinking on|off, /quit", file=sys.stderr)
        elif words:
            try:
                talk.say(line)
            except KeyboardInterrupt:
                print("\n(stopped)", file=sys.stderr)
            except UsageError as error:
                # Nobody is at a pipe to ask again, and its reader must learn of it.
                if not sys.stdin.isatty():
                    raise
                print(f"pelagos chat: {error}", file=sys.stderr)


def _next_line(prompt: str) -> str | None:
    """Returns the next line of input, None at its end."""
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _options(flags: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": 0}
    if "max-tokens" in flags:
        if not flags["max-tokens"].isdigit():
            raise UsageError("--max-tokens must be a number")
        options["max_tokens"] = int(flags["max-tokens"])
    if "thinking" in flags:
        if flags["thinking"] not in ("on", "off"):
            raise UsageError("--thinking is on or off")
        options["thinking"] = {"type": "enabled" if flags["thinking"] == "on" else "disabled"}
    if "temperature" in flags:
        try:
            options["temperature"] = float(flags["temperature"])
        except ValueError:
            raise UsageError("--temperature must be a number") from None
    if "tools" in flags:
        options["tools"] = _tools(flags["tools"])
    return options


def _tools(name: str) -> Any:
    if name == "demo":
        return DEMO_TOOLS
    try:
        return json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--tools: {name}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--tools: {name} is no JSON: {error}") from None


def _first_model(target: Target) -> str:
    response = target.request("GET", "/v1/models")
    if response.status != 200:
        raise UsageError(error_text(response))
    names: list[str] = [model["id"] for model in json.loads(response.read())["data"]]
    if not names:
        raise UsageError("no model is served; is an engine running?")
    # The model's own name sorts behind the published ones that lead to it too.
    return names[-1]


if __name__ == "__main__":
    sys.exit(main())
