"""JSON out of a sentence: asked for in words, or by the schema of the request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.turns import Message, Turn
from services.engine.training.tasks.words import FEW_CITIES, FEW_COLORS, FEW_FOODS, FEW_NAMES

KEYS: Final = ("name", "city", "age", "food", "color")
_CLAUSES: Final[dict[str, tuple[str, ...]]] = {
    "age": ("is {} years old",),
    "city": ("lives in {}",),
    "food": ("likes {}", "eats {}"),
    "color": ("has a {} car", "wears a {} hat"),
}
_REQUESTS: Final = (
    "Extract {} as JSON: {}",
    "Extract {} as JSON: {}",
    "Give me {} as JSON: {}",
    "Write {} as JSON: {}",
    "Return {} as JSON: {}",
)
_MAKING: Final = ("Make JSON with {}.", "Write JSON with {}.", "JSON with {}.")


@dataclass(frozen=True)
class Person:
    """What one sentence says of one person."""

    values: dict[str, Any]
    sentence: str


def person(draw: Draw) -> Person:
    """Returns a sentence of the split and what it says; some show their values in quotes."""
    found: list[Person] = []

    def make() -> str:
        found[:] = [_person(draw)]
        return found[0].sentence

    draw.value(make)
    return found[0]


def _values(draw: Draw) -> dict[str, Any]:
    return {
        "name": draw.one(FEW_NAMES),
        "city": draw.one(FEW_CITIES),
        "age": draw.number(10, 99),
        "food": draw.one(FEW_FOODS),
        "color": draw.one(FEW_COLORS),
    }


def _quoting(draw: Draw) -> Callable[[Any], str]:
    """Returns how values are shown: quoted ones have the same tokens there and in the JSON."""
    is_quoted = draw.chance(0.3)
    return lambda value: f'"{value}"' if is_quoted and isinstance(value, str) else str(value)


def _person(draw: Draw) -> Person:
    quote, values = _quoting(draw), _values(draw)
    told = draw.some(tuple(_CLAUSES), 3)
    clauses = [draw.one(_CLAUSES[key]).format(quote(values[key])) for key in told]
    sentence = f"{quote(values['name'])} {clauses[0]}, {clauses[1]} and {clauses[2]}."
    return Person({key: values[key] for key in ("name", *told)}, sentence)


def json_in_words(draw: Draw) -> Turn:
    """Returns a request for JSON in plain words."""
    if draw.chance(0.15):
        return _json_of_parts(draw)
    told = person(draw)
    keys = draw.some(tuple(told.values), draw.number(2, 3))
    return _turn(draw.typed(draw.one(_REQUESTS)).format(_listed(keys), told.sentence), told, keys)


def _json_of_parts(draw: Draw) -> Turn:
    keys = draw.some(KEYS, draw.number(2, 3))
    found: list[dict[str, Any]] = []

    def make() -> str:
        found[:] = [_values(draw)]
        quote = _quoting(draw)
        return _listed([f"{key} {quote(found[0][key])}" for key in keys])

    parts = draw.value(make)
    asked = draw.typed(draw.one(_MAKING)).format(parts)
    return _turn(asked, Person(found[0], parts), keys)


def json_by_schema(draw: Draw, keys: tuple[str, ...]) -> Turn:
    """Returns a sentence only; the request's schema says which keys to write."""
    while True:
        told = person(draw)
        if set(keys) <= set(told.values):
            return _turn(told.sentence, told, keys)


def schema_keys(draw: Draw) -> tuple[str, ...]:
    """Returns the keys of a schema, in its order."""
    return tuple(draw.some(KEYS, draw.number(2, 3)))


def response_format(keys: tuple[str, ...]) -> Message:
    """Returns the request's part that asks for these keys."""
    properties = {key: {"type": "integer" if key == "age" else "string"} for key in keys}
    schema = {"type": "object", "properties": properties, "required": list(keys)}
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


def _turn(question: str, told: Person, keys: tuple[str, ...] | list[str]) -> Turn:
    values = {key: told.values[key] for key in keys}
    thought = " ".join(f"{key}: {value}." for key, value in values.items())
    last = str(values[keys[-1]])
    return Turn(
        "json",
        question,
        json.dumps(values, ensure_ascii=False),
        thought,
        recalled=last,
        values=(told.sentence,),
    )


def _listed(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1]
