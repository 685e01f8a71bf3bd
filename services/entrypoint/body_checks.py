"""Limits of a request's contents that the codec does not have, and fields that must not be lost.

Works on the skeleton of the body (`json_scan.py`). Unknown fields are ignored, as in the codec;
a field that would have constrained the output is refused, for ignoring it would hand back text
that the caller believes to be constrained (UR-67).
Source: reliability-and-security.md, section 3; S-07.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from services.common.errors import Api, Failure, Reason
from services.entrypoint.json_scan import LONG_STRING_MARK
from services.entrypoint.limits import Limits

# Constraint-like fields of other servers, by API: where they may stand, and what to use instead.
_FOREIGN_CONSTRAINTS: Final = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding",
    "structured_outputs",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)
# Documented ignore list: accepted for compatibility, without effect (the page lists them).
IGNORED_FIELDS: Final = ("logit_bias", "service_tier", "store", "user", "parallel_tool_calls")


def parse_skeleton(skeleton: bytes) -> Any:
    """Returns the parsed skeleton, None for what is no JSON (the codec words that refusal)."""
    try:
        return json.loads(skeleton)
    except (ValueError, RecursionError):
        return None


def check_body(document: Any, api: Api, limits: Limits) -> None:
    """Raises Failure(INVALID_REQUEST) naming the field and its limit."""
    if not isinstance(document, Mapping):
        return
    _check_lists(document, api, limits)
    _check_stop(document, limits)
    _check_tools(document, limits)
    _check_metadata(document.get("metadata"), limits)
    _check_constraints(document, api)


def has_images(document: Any, api: Api) -> bool:
    """Returns whether any message carries an image, which allows a larger body."""
    key = "input" if api is Api.RESPONSES else "messages"
    items = document.get(key) if isinstance(document, Mapping) else None
    if not isinstance(items, list):
        return False
    return any(
        isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES
        for item in items
        if isinstance(item, Mapping)
        for field in ("content", "output")
        for part in _as_list(item.get(field))
    )


_IMAGE_TYPES: Final = frozenset({"image_url", "input_image", "image", "file"})


def _check_lists(document: Mapping[str, Any], api: Api, limits: Limits) -> None:
    key = "input" if api is Api.RESPONSES else "messages"
    items = _as_list(document.get(key))
    if len(items) > limits.max_messages:
        raise _too_many(key, len(items), limits.max_messages)
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            continue
        for field in ("content", "output"):
            parts = _as_list(item.get(field))
            if len(parts) > limits.max_content_parts:
                raise _too_many(f"{key}[{i}].{field}", len(parts), limits.max_content_parts)


def _check_stop(document: Mapping[str, Any], limits: Limits) -> None:
    for key in ("stop", "stop_sequences"):
        value = document.get(key)
        for i, text in enumerate([value] if isinstance(value, str) else _as_list(value)):
            if isinstance(text, str) and len(text) > limits.max_stop_chars:
                raise Failure(
                    Reason.INVALID_REQUEST,
                    f"{key}[{i}] is longer than {limits.max_stop_chars} characters",
                    {"field": f"{key}[{i}]", "max_chars": str(limits.max_stop_chars)},
                )


def _check_tools(document: Mapping[str, Any], limits: Limits) -> None:
    tools = _as_list(document.get("tools"))
    num_tools = sum(
        len(_as_list(tool.get("tools"))) or 1 if isinstance(tool, Mapping) else 1 for tool in tools
    )
    if num_tools > limits.max_tools:
        raise _too_many("tools", num_tools, limits.max_tools)
    if tools and (size := _size_bytes(tools)) > limits.max_tools_bytes:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"tools take {size} bytes, the limit is {limits.max_tools_bytes}",
            {"field": "tools", "num_bytes": str(size), "max_bytes": str(limits.max_tools_bytes)},
        )


def _check_metadata(metadata: Any, limits: Limits) -> None:
    if not isinstance(metadata, Mapping):
        return
    if len(metadata) > limits.max_metadata_pairs:
        raise _too_many("metadata", len(metadata), limits.max_metadata_pairs)
    for key, value in metadata.items():
        if len(key) > limits.max_metadata_key_chars:
            limit = limits.max_metadata_key_chars
            raise Failure(
                Reason.INVALID_REQUEST,
                f"metadata: a key is longer than {limit} characters",
                {"field": "metadata", "max_chars": str(limit)},
            )
        if isinstance(value, str) and len(value) > limits.max_metadata_value_chars:
            limit = limits.max_metadata_value_chars
            raise Failure(
                Reason.INVALID_REQUEST,
                f"metadata.{key}: the value is longer than {limit} characters",
                {"field": f"metadata.{key}", "max_chars": str(limit)},
            )


def _check_constraints(document: Mapping[str, Any], api: Api) -> None:
    for field in _FOREIGN_CONSTRAINTS:
        if document.get(field) is not None:
            raise _lost_constraint(field, _INSTEAD[api])
    if api is not Api.CHAT and document.get("response_format") is not None:
        raise _lost_constraint("response_format", _INSTEAD[api])
    if api is not Api.RESPONSES and _mapping(document.get("text")).get("format") is not None:
        raise _lost_constraint("text.format", _INSTEAD[api])
    if api is Api.MESSAGES:
        if _mapping(document.get("output_config")).get("format") is not None:
            raise _lost_constraint("output_config.format", _INSTEAD[api])
        if document.get("output_format") is not None:
            raise _lost_constraint("output_format", _INSTEAD[api])
    response_format = _mapping(document.get("response_format"))
    if response_format.get("schema") is not None:
        raise _lost_constraint("response_format.schema", "response_format.json_schema.schema")


_INSTEAD: Final = {
    Api.CHAT: "response_format",
    Api.RESPONSES: "text.format",
    Api.MESSAGES: "a tool with a strict input_schema",
}


def _lost_constraint(field: str, instead: str) -> Failure:
    return Failure(
        Reason.INVALID_REQUEST,
        f"{field} is not supported here and would be ignored; use {instead}",
        {"field": field},
    )


def _too_many(field: str, num: int, limit: int) -> Failure:
    return Failure(
        Reason.INVALID_REQUEST,
        f"{field} has {num} entries, the limit is {limit}",
        {"field": field, "num_entries": str(num), "max_entries": str(limit)},
    )


def _size_bytes(value: Any) -> int:
    """Returns the size of a value as compact JSON, long strings with their true length."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode()) + _hidden_bytes(value)


def _hidden_bytes(value: Any) -> int:
    if isinstance(value, str):
        if not value.startswith(LONG_STRING_MARK):
            return 0
        length = value[len(LONG_STRING_MARK) :]
        return int(length) if length.isdigit() and len(length) < 12 else 0
    if isinstance(value, Mapping):
        return sum(_hidden_bytes(key) + _hidden_bytes(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(_hidden_bytes(item) for item in value)
    return 0


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
