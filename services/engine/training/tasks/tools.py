"""Tools: real ones with natural requests and made-up ones named in the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.turns import Call, Message, Turn
from services.engine.training.tasks.words import FEW_CITIES, FEW_COLORS, FEW_FOODS, FEW_NAMES


@dataclass(frozen=True)
class Tool:
    """A tool with the parameters it takes, by their kind."""

    name: str
    description: str
    parameters: tuple[str, ...]
    requests: tuple[str, ...] = ()  # natural ones, a place for each parameter

    def definition(self) -> Message:
        """Returns the tool as a request carries it."""
        properties = {key: {"type": _TYPES[key]} for key in self.parameters}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": schema,
            },
        }


_TYPES: Final = {
    "city": "string",
    "name": "string",
    "color": "string",
    "food": "string",
    "text": "string",
    "minutes": "integer",
    "number": "integer",
}
_REAL: Final = (
    Tool(
        "get_weather",
        "Get the weather of a city",
        ("city",),
        ("What is the weather in {}?", "How is the weather in {}?", "Weather in {}?"),
    ),
    Tool(
        "get_time", "Get the time of a city", ("city",), ("What time is it in {}?", "Time in {}?")
    ),
    Tool(
        "set_timer",
        "Set a timer",
        ("minutes",),
        ("Set a timer for {} minutes.", "Wake me in {} minutes.", "Start a timer of {} minutes."),
    ),
    Tool(
        "send_message",
        "Send a message",
        ("name", "text"),
        ("Send {} the message: {}", "Write to {}: {}", "Tell {} this: {}"),
    ),
    Tool("order_food", "Order food", ("food",), ("Order {} for me.", "I want to order {}.")),
    Tool("call_person", "Call a person", ("name",), ("Call {} please.", "I want to talk to {}.")),
    Tool("set_light", "Set the light", ("color",), ("Make the light {}.", "Set the light to {}.")),
    Tool(
        "book_train",
        "Book a train",
        ("city", "number"),
        ("Book a train to {} for {} people.", "I need a train to {} for {} people."),
    ),
)
_KINDS: Final = ("city", "name", "color", "food", "number")
_USES: Final = ("Use {} with {}.", "Call {} with {}.", "Please use {} with {}.", "Run {} with {}.")
_RESULTS: Final = ("done", "ok", "sunny", "cold", "hot", "dry", "wet", "open", "empty", "full")


def made_up(draw: Draw) -> Tool:
    """Returns a tool that nobody has."""
    name = draw.identifier()
    verb, thing = name.split("_")
    parameters = tuple(draw.some(_KINDS, 1 if draw.chance(0.7) else 2))
    return Tool(name, f"{verb.capitalize()} the {thing}", parameters)


def toolbox(draw: Draw) -> tuple[Tool, ...]:
    """Returns one to three tools, half of them made-up."""
    tools: dict[str, Tool] = {}
    num = draw.weighted(((1, 0.4), (2, 0.35), (3, 0.25)))
    while len(tools) < num:
        tool = made_up(draw) if draw.chance(0.5) else draw.one(_REAL)
        tools[tool.name] = tool
    return tuple(tools.values())


def tool_call(draw: Draw, tools: tuple[Tool, ...]) -> tuple[Turn, Turn]:
    """Returns the request that needs a tool, and the turn that gives the tool's result."""
    tool = draw.one(tools)
    arguments = tuple((key, _argument(key, draw)) for key in tool.parameters)
    # As in JSON: a quoted value has the same tokens in the request and in the call.
    is_quoted = draw.chance(0.3)
    shown = [_shown(value, is_quoted) for _, value in arguments]
    if tool.requests and draw.chance(0.75):
        asked = draw.one(tool.requests).format(*shown)
    else:
        named = [f"{key} {text}" for (key, _), text in zip(arguments, shown, strict=True)]
        asked = draw.one(_USES).format(tool.name, " and ".join(named))
    texts = tuple(value for key, value in arguments if key == "text")
    request = Turn(
        "tool_call",
        draw.typed(asked),
        "",
        f"I call {tool.name} with {' and '.join(str(value) for _, value in arguments)}.",
        call=Call(tool.name, arguments),
        recalled=str(arguments[-1][1]),
        values=texts,
    )
    return request, tool_result(draw)


def tool_result(draw: Draw) -> Turn:
    """Returns a tool's answer, which is to be passed on."""
    result = draw.one(_RESULTS)
    values: tuple[str, ...] = ()
    kind = draw.rng.random()
    if kind < 0.25:
        result = draw.pair()
        values = (result,)
    elif kind < 0.5:
        result = draw.code(2, 4)
        values = (result,)
    return Turn(
        "tool_result",
        result,
        f"The result is {result}.",
        "The tool has answered.",
        recalled=result,
        values=values,
        role="tool",
    )


def _argument(kind: str, draw: Draw) -> Any:
    if kind == "text":
        return draw.pair()
    if kind in ("minutes", "number"):
        return draw.number(2, 60)
    return draw.one(_VALUES[kind])


_VALUES: Final = {
    "city": FEW_CITIES,
    "name": FEW_NAMES,
    "color": FEW_COLORS,
    "food": FEW_FOODS,
}


def _shown(value: Any, is_quoted: bool) -> str:
    return f'"{value}"' if is_quoted and isinstance(value, str) else str(value)
