"""Bounds a JSON schema and refuses what would be dropped, before any grammar is made. Pure.

Every keyword is either enforced by the grammar, or says nothing about validity, or is refused by
name with its path; none is dropped silently, also not inside `$defs` (S-06, UR-66). The table below
is the documentation of that; a test generates outputs for each enforced keyword and validates them.
Source: reliability-and-security.md, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.common.errors import Failure, Reason
from services.so_compiler.automaton import (
    Budget,
    BudgetExceeded,
    UnsupportedPattern,
    count_states,
)
from services.so_compiler.config import GrammarLimits

# Enforced by the grammar.
ENFORCED: Final = frozenset(
    {"type", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "$defs", "definitions"}
    | {"properties", "required", "additionalProperties", "patternProperties"}
    | {"items", "prefixItems", "additionalItems", "minItems", "maxItems"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"minLength", "maxLength", "pattern", "format"}
)
# Say nothing about which values are valid.
ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$anchor"}
    | {"readOnly", "writeOnly", "deprecated", "$vocabulary"}
)
# Known, and refused by name: dropping them would let wrong output through.
REFUSED: Final = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"contains", "minContains", "maxContains", "uniqueItems", "propertyNames"}
    | {"unevaluatedProperties", "unevaluatedItems", "minProperties", "maxProperties"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "$dynamicRef", "$dynamicAnchor"}
    | {"$recursiveRef", "$recursiveAnchor"}
)
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})

_SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS: Final = ("additionalProperties", "items", "additionalItems")
_REPEATS: Final = ("minItems", "maxItems", "minLength", "maxLength")


@dataclass(frozen=True)
class CheckedSchema:
    """A schema within its bounds.

    Args:
        text: canonical: compact, keys in the order given (the order is the output's).
    """

    document: Any
    text: str
    num_states: int


def check_schema(
    text: str, limits: GrammarLimits, budget: Budget | None = None, path: str = "$"
) -> CheckedSchema:
    """Returns the schema in canonical form, or raises Failure naming path and keyword."""
    if len(text.encode()) > limits.max_schema_bytes:
        raise _over(path, f"the schema is longer than {limits.max_schema_bytes} bytes")
    try:
        document = parse_json(text)
    except (ValueError, RecursionError):
        raise _refused(path, "the schema is not JSON") from None
    return check_document(document, limits, budget, path)


def parse_json(text: str) -> Any:
    """Parses what can be written again: no half surrogate pairs, no NaN, no infinity.

    Raises: ValueError, RecursionError.
    """
    document = json.loads(text)
    json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    return document


def check_document(
    document: Any, limits: GrammarLimits, budget: Budget | None = None, path: str = "$"
) -> CheckedSchema:
    """As `check_schema`, of a parsed schema."""
    if not isinstance(document, dict):
        raise _refused(path, "the schema must be an object")
    budget = budget or Budget(limits.max_states, limits.max_work)
    for number, (at, node) in enumerate(_walk(document, path, limits.max_depth), 1):
        if number > limits.max_nodes:
            raise _over(at, f"the schema has more than {limits.max_nodes} nodes")
        _check_node(at, node, limits)
        _check_patterns(at, node, limits, budget)
    _check_refs(document, limits, path)
    canonical = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return CheckedSchema(document, canonical, budget.num_states)


def _walk(root: Any, path: str, max_depth: int) -> Iterator[tuple[str, Any]]:
    """Yields every schema node with its path, without recursion."""
    todo: list[tuple[str, Any, int]] = [(path, root, 1)]
    while todo:
        at, node, depth = todo.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise _refused(at, "a schema must be an object or a boolean")
        if depth > max_depth:
            raise _over(at, f"the schema is nested deeper than {max_depth} levels")
        yield at, node
        for key in _SCHEMA_MAPS:
            if key in node:
                if not isinstance(node[key], dict):
                    raise _refused(f"{at}.{key}", "must be an object")
                todo += [(f"{at}.{key}.{k}", v, depth + 1) for k, v in node[key].items()]
        for key in _SCHEMA_LISTS:
            if key in node:
                if not isinstance(node[key], list):
                    raise _refused(f"{at}.{key}", "must be a list")
                todo += [(f"{at}.{key}[{i}]", v, depth + 1) for i, v in enumerate(node[key])]
        for key in _SCHEMAS:
            if key in node:
                todo.append((f"{at}.{key}", node[key], depth + 1))


def _check_node(at: str, node: Mapping[str, Any], limits: GrammarLimits) -> None:
    for key in node:
        if key in ENFORCED or key in ANNOTATIONS:
            continue
        # Unknown words are refused too: a misspelt keyword is a lost constraint.
        known = "is not supported" if key in REFUSED else "is not a known keyword"
        raise Failure(
            Reason.SCHEMA_UNSUPPORTED, f"{at}.{key}: {key} {known}", {"path": f"{at}.{key}"}
        )
    types = node.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in TYPES:
            raise _refused(f"{at}.type", f"{json.dumps(name)[:64]} is not a type")
    if "enum" in node:
        values = node["enum"]
        if not isinstance(values, list) or not values:
            raise _refused(f"{at}.enum", "must be a list that is not empty")
        if len(values) > limits.max_enum_values:
            raise _over(f"{at}.enum", f"has more than {limits.max_enum_values} values")
    for key in _REPEATS:
        bound = node.get(key, 0)
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise _refused(f"{at}.{key}", "must be a whole number from 0 on")
        if bound > limits.max_repeats:
            raise _over(f"{at}.{key}", f"is above {limits.max_repeats}")
    named = node.get("format")
    if "format" in node and not (isinstance(named, str) and named in FORMATS):
        raise Failure(
            Reason.SCHEMA_UNSUPPORTED,
            f"{at}.format: format {json.dumps(node['format'])[:64]} is not supported",
            {"path": f"{at}.format"},
        )
    if "oneOf" in node:
        _check_one_of(at, node["oneOf"])


def _check_one_of(at: str, branches: Any) -> None:
    """Refuses oneOf unless its branches exclude each other by type or by constant.

    The grammar reads it as anyOf, which is the same only then.
    """
    seen: set[str] = set()
    for branch in branches if isinstance(branches, list) else []:
        kinds = _kinds(branch)
        if kinds is None or seen & kinds:
            raise Failure(
                Reason.SCHEMA_UNSUPPORTED,
                f"{at}.oneOf: branches must differ in type or constant; use anyOf",
                {"path": f"{at}.oneOf"},
            )
        seen |= kinds


def _kinds(branch: Any) -> set[str] | None:
    if not isinstance(branch, dict):
        return None
    if "const" in branch:
        return {"const:" + json.dumps(branch["const"], sort_keys=True)}
    if isinstance(branch.get("enum"), list):
        return {"const:" + json.dumps(value, sort_keys=True) for value in branch["enum"]}
    types = branch.get("type")
    listed = types if isinstance(types, list) else [types]
    names = {name for name in listed if isinstance(name, str)}
    if "number" in names:
        names.add("integer")
    return names or None


def _check_patterns(
    at: str, node: Mapping[str, Any], limits: GrammarLimits, budget: Budget
) -> None:
    patterns = [(f"{at}.pattern", node["pattern"])] if "pattern" in node else []
    patterns += [
        (f"{at}.patternProperties.{pattern}", pattern)
        for pattern in node.get("patternProperties", {})
    ]
    for where, pattern in patterns:
        check_pattern(where, pattern, limits, budget, is_search=True)


def check_pattern(
    at: str, pattern: Any, limits: GrammarLimits, budget: Budget, *, is_search: bool
) -> None:
    """Raises Failure for a pattern that is no regular expression or needs too many states."""
    if not isinstance(pattern, str):
        raise _refused(at, "a pattern must be a string")
    if len(pattern.encode()) > limits.max_pattern_bytes:
        raise _over(at, f"the pattern is longer than {limits.max_pattern_bytes} bytes")
    try:
        count_states(pattern, budget, is_search=is_search)
    except BudgetExceeded as error:
        raise _over(at, f"the pattern needs {error}") from None
    except UnsupportedPattern as error:
        raise Failure(
            Reason.SCHEMA_UNSUPPORTED, f"{at}: the pattern: {error}", {"path": at}
        ) from None


def _check_refs(document: Any, limits: GrammarLimits, path: str) -> None:
    """Follows every local reference once per use, cycles cut; counts the expansions."""
    num_expansions = 0
    todo = [(document, frozenset[str]())]
    seen: set[tuple[int, frozenset[str]]] = set()
    while todo:
        node, within = todo.pop()
        if isinstance(node, list):
            todo += [(item, within) for item in node]
            continue
        if not isinstance(node, dict) or (id(node), within) in seen:
            continue
        seen.add((id(node), within))
        ref = node.get("$ref")
        if ref is not None:
            target = resolve(document, ref)
            if target is None:
                raise _refused(f"{path}.$ref", f"{str(ref)[:100]} does not resolve in the schema")
            if _is_ref_loop(document, ref):
                raise _refused(f"{path}.$ref", f"{str(ref)[:100]} refers to itself only")
            num_expansions += 1
            if num_expansions > limits.max_ref_expansions:
                raise _over(path, f"more than {limits.max_ref_expansions} references to expand")
            if ref not in within:
                todo.append((target, within | {ref}))
        todo += [(value, within) for key, value in node.items() if key not in _DATA_KEYS]


_DATA_KEYS: Final = frozenset({"enum", "const", "default", "examples", "required"})


def resolve(document: Any, ref: Any) -> Any:
    """Returns what a local reference points at, None when it does not resolve."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    node = document
    for part in ref.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node if isinstance(node, dict | bool) else None


def _is_ref_loop(document: Any, ref: str) -> bool:
    seen = {ref}
    while True:
        node = resolve(document, ref)
        if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
            return False
        ref = node["$ref"]
        if ref in seen:
            return True
        seen.add(ref)


def _refused(at: str, text: str) -> Failure:
    return Failure(Reason.SCHEMA_UNSUPPORTED, f"{at}: {text}", {"path": at})


def _over(at: str, text: str) -> Failure:
    return Failure(Reason.GRAMMAR_BUDGET, f"{at}: {text}", {"path": at})
