"""From a constraint to the grammar text that engines load. Runs in a child process.

The artifact of this backend is text: llguidance builds its automata in the engine, lazily and
within its own limits. What is decided here is that the text is right, complete and bounded.
Source: engine.md, section 5.1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

import llguidance
from pelagos.so_compiler.v1 import so_compiler_pb2 as pb

from services.common.errors import Failure, Reason
from services.so_compiler.automaton import Budget
from services.so_compiler.config import GrammarLimits
from services.so_compiler.dsml import literal, tool_grammar
from services.so_compiler.schema_check import check_pattern, check_schema, parse_json

BACKEND: Final = "llguidance"
BACKEND_VERSION: Final = str(llguidance.get_version().split()[0].partition("@")[2])
# Blanks between elements are bounded: a grammar that allows endless blanks lets a model loop.
WHITESPACE_PATTERN: Final = r"[\x20\x0A\x0D\x09]{0,20}"
_JSON_OPTIONS: Final = {
    "whitespace_pattern": WHITESPACE_PATTERN,
    "coerce_one_of": True,  # only branches that exclude each other get here
    "lenient": False,
}


@dataclass(frozen=True)
class Compiled:
    """A grammar, and what was changed on the way."""

    data: bytes
    warnings: list[str] = field(default_factory=list)


def build_grammar(
    grammar_type: int, source: str, special_ids: dict[str, int], limits: GrammarLimits
) -> Compiled:
    """Returns the artifact of a constraint, or raises Failure naming what is wrong where."""
    budget = Budget(limits.max_states, limits.max_work)
    if grammar_type == pb.GRAMMAR_TYPE_JSON_SCHEMA:
        checked = check_schema(source, limits, budget)
        grammar = _json_grammar(checked.document)
    elif grammar_type == pb.GRAMMAR_TYPE_JSON_OBJECT:
        grammar = _json_grammar({"type": "object"})
    elif grammar_type == pb.GRAMMAR_TYPE_REGEX:
        check_pattern("$", source, limits, budget, is_search=False)
        grammar = llguidance.LLMatcher.grammar_from_regex(source)
    elif grammar_type == pb.GRAMMAR_TYPE_EBNF:
        if len(source.encode()) > limits.max_ebnf_bytes:
            raise _over(f"the grammar is longer than {limits.max_ebnf_bytes} bytes")
        grammar = llguidance.LLMatcher.grammar_from_lark(source)
    elif grammar_type == pb.GRAMMAR_TYPE_CHOICE:
        grammar = llguidance.LLMatcher.grammar_from_lark(_choice_lark(source, limits))
    elif grammar_type in (pb.GRAMMAR_TYPE_TOOL_CALL, pb.GRAMMAR_TYPE_TOOL_CALL_REQUIRED):
        required = grammar_type == pb.GRAMMAR_TYPE_TOOL_CALL_REQUIRED
        dsml_id = next((i for name, i in special_ids.items() if name.lower() == "dsml"), 0)
        lark = tool_grammar(source, dsml_id, limits, required=required, budget=budget)
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    else:
        raise Failure(Reason.INVALID_REQUEST, "the grammar type is not known")
    return Compiled(grammar.encode(), _validate(grammar, limits))


def _json_grammar(document: Any) -> str:
    # Our options last, so that a schema cannot loosen them through "x-guidance".
    return str(
        llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(document, ensure_ascii=False), overrides=_JSON_OPTIONS
        )
    )


def _choice_lark(source: str, limits: GrammarLimits) -> str:
    try:
        choices = parse_json(source)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise Failure(
            Reason.SCHEMA_UNSUPPORTED, "a choice must be a list of strings that are not empty"
        )
    if not choices or len(choices) > limits.max_choices:
        raise _over(f"a choice must have 1 to {limits.max_choices} strings")
    return "start: " + " | ".join(literal(c) for c in choices) + "\n"


def _validate(grammar: str, limits: GrammarLimits) -> list[str]:
    """Returns the backend's warnings. Raises Failure when it cannot do the grammar."""
    if len(grammar.encode()) > limits.max_artifact_bytes:
        raise _over("the grammar is too large")
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        grammar, limits=llguidance.LLParserLimits(max_lexer_states=limits.max_states)
    )
    if not is_error:
        return [message[:500] for message in messages]
    text = messages[0].splitlines()[0][:300] if messages else "the grammar is not valid"
    lowered = text.lower()
    if any(word in lowered for word in ("too big", "too large", "too many", "fuel", "limit")):
        raise _over(text)
    raise Failure(Reason.SCHEMA_UNSUPPORTED, text, {"path": "$"})


def _over(text: str) -> Failure:
    return Failure(Reason.GRAMMAR_BUDGET, text, {"path": "$"})
