"""From the codec's output constraint to what the SO compiler and the engines are told. Pure.

Source: recipe.md, section 6.8; engine.md, section 5.2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pelagos.engine.v1 import records_pb2 as records
from pelagos.recipe.v1 import recipe_pb2 as recipe
from pelagos.so_compiler.v1 import so_compiler_pb2 as so

from services.common.errors import Failure, Reason

_TYPE_NAMES = {
    "json_schema": so.GRAMMAR_TYPE_JSON_SCHEMA,
    "json_object": so.GRAMMAR_TYPE_JSON_OBJECT,
    "regex": so.GRAMMAR_TYPE_REGEX,
    "ebnf": so.GRAMMAR_TYPE_EBNF,
    "choice": so.GRAMMAR_TYPE_CHOICE,
}


@dataclass(frozen=True)
class Constraint:
    """What to compile, and when the engine starts to obey it."""

    type: so.GrammarType.ValueType
    source: str
    trigger_token_ids: bytes = b""

    @property
    def needs_special_ids(self) -> bool:
        """Returns whether the grammar names special tokens: those inside the tags of calls."""
        return self.type in (so.GRAMMAR_TYPE_TOOL_CALL, so.GRAMMAR_TYPE_TOOL_CALL_REQUIRED)

    def grammar_ref(self, artifact_key: str, address: str) -> records.GrammarRef:
        """Returns what travels with the request."""
        return records.GrammarRef(
            artifact_key=artifact_key,
            address=address,
            trigger_token_ids=self.trigger_token_ids,
        )


def constraint_of(encoded: recipe.EncodeResponse) -> Constraint | None:
    """Returns the constraint of an encoded request, None for free text.

    With thinking the constraint waits for the end of the reasoning. Tools that are not strict and
    need not be called leave the model free: there is nothing to hold it to.
    """
    kind, schema = encoded.constraint_kind, encoded.constraint_schema
    if not kind:
        return None
    trigger = b""
    if encoded.starts_in_reasoning and encoded.end_of_thinking_id:
        trigger = encoded.end_of_thinking_id.to_bytes(4, "little")
    if kind == "json":
        json_type = so.GRAMMAR_TYPE_JSON_SCHEMA if schema else so.GRAMMAR_TYPE_JSON_OBJECT
        return Constraint(json_type, schema, trigger)
    if kind == "regex":
        return Constraint(so.GRAMMAR_TYPE_REGEX, schema, trigger)
    if kind == "tool_call":
        if not _any_strict(schema):
            return None
        return Constraint(so.GRAMMAR_TYPE_TOOL_CALL, schema, trigger)
    if kind == "tool_call_required":
        return Constraint(so.GRAMMAR_TYPE_TOOL_CALL_REQUIRED, schema, trigger)
    raise Failure(
        Reason.UNSUPPORTED_FEATURE, f"output constraint {kind} is not known", {"kind": kind}
    )


def constraint_named(name: str, source: str) -> Constraint | None:
    """Returns the constraint of a token-level request."""
    if not name:
        return None
    grammar_type = _TYPE_NAMES.get(name)
    if grammar_type is None:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"constraint_type {name[:64]} is not one of {', '.join(sorted(_TYPE_NAMES))}",
        )
    return Constraint(grammar_type, source)


def _any_strict(tools: str) -> bool:
    return any(tool["function"].get("strict") for tool in json.loads(tools))
