"""What grammars accept and refuse, keyword by keyword, and tool calls tag by tag."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from pelagos.so_compiler.v1 import so_compiler_pb2 as pb

from services.common.errors import Failure, Reason
from services.so_compiler.config import GrammarLimits
from services.so_compiler.grammar import build_grammar
from services.so_compiler.schema_check import ANNOTATIONS, ENFORCED, FORMATS, REFUSED
from services.so_compiler.tests.bytes_tokenizer import DSML_ID, accepts, sample

LIMITS = GrammarLimits()
_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}


def compile_schema(schema: Any) -> bytes:
    return build_grammar(pb.GRAMMAR_TYPE_JSON_SCHEMA, json.dumps(schema), {}, LIMITS).data


# One schema per enforced keyword, where the keyword decides.
CASES: dict[str, Any] = {
    "type": {"type": ["integer", "boolean"]},
    "enum": {"enum": ["a", 1, None, [1, 2]]},
    "const": {"const": {"a": 1}},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "oneOf": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    "$ref": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer", "minimum": 5}}},
    "$defs": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}},
    "definitions": {"$ref": "#/definitions/x", "definitions": {"x": {"type": "boolean"}}},
    "properties": {**_OBJECT, "properties": {"a": {"type": "integer"}}},
    "required": {
        **_OBJECT,
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
        "required": ["b"],
    },
    "additionalProperties": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a[bc]$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "items": {"type": "array", "items": {"type": "integer"}},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "items": False,
    },
    "additionalItems": {"type": "array", "items": {"type": "null"}, "additionalItems": False},
    "minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    "maxItems": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    "minimum": {"type": "integer", "minimum": -3},
    "maximum": {"type": "integer", "maximum": 12},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 0},
    "exclusiveMaximum": {"type": "number", "exclusiveMaximum": 1.5},
    "multipleOf": {"type": "integer", "multipleOf": 3},
    "minLength": {"type": "string", "minLength": 2},
    "maxLength": {"type": "string", "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[ab]{2}c?$"},
    "format": {"type": "string", "format": "date"},
}


def test_every_enforced_keyword_has_a_case() -> None:
    assert set(CASES) == ENFORCED


@pytest.mark.parametrize("keyword", sorted(CASES))
def test_ur_66_an_enforced_keyword_holds_on_every_sample(keyword: str) -> None:
    grammar = compile_schema(CASES[keyword])
    validator = jsonschema.Draft202012Validator(
        CASES[keyword], format_checker=jsonschema.FormatChecker()
    )
    rng = random.Random(keyword)
    num_samples = 0
    for _ in range(400):
        ids = sample(grammar, rng)
        if ids is None:
            continue
        num_samples += 1
        text = bytes(ids).decode()
        validator.validate(json.loads(text))
        if num_samples == 200:
            break
    assert num_samples == 200


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_ur_66_a_refused_keyword_is_named_with_its_path(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {}}
    schema["$defs"] = {"d": {"type": "object", keyword: {}}}
    with pytest.raises(Failure) as caught:
        compile_schema(schema)
    assert caught.value.reason is Reason.SCHEMA_UNSUPPORTED
    assert caught.value.metadata["path"] == f"$.$defs.d.{keyword}"
    assert keyword in caught.value.message


def test_ur_66_an_unknown_keyword_is_refused_not_dropped() -> None:
    with pytest.raises(Failure, match="minimun is not a known keyword"):
        compile_schema({"type": "integer", "minimun": 3})


def test_annotations_change_nothing() -> None:
    schema: dict[str, Any] = {"type": "integer", "maximum": 5}
    for keyword in sorted(ANNOTATIONS - {"$id", "$schema", "$anchor", "$vocabulary"}):
        schema[keyword] = "x" if keyword not in ("examples",) else [1]
    grammar = compile_schema(schema)
    assert accepts(grammar, list(b"5"))
    assert not accepts(grammar, list(b"6"))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_listed_format_is_known_to_the_backend(name: str) -> None:
    grammar = compile_schema({"type": "string", "format": name})
    assert not accepts(grammar, list(b'"!"'))


def test_one_of_with_branches_that_overlap_is_refused() -> None:
    with pytest.raises(Failure, match="oneOf"):
        compile_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]})


def test_json_object_refuses_other_values_at_the_top() -> None:
    grammar = build_grammar(pb.GRAMMAR_TYPE_JSON_OBJECT, "", {}, LIMITS).data
    assert accepts(grammar, list(b'{"a": [1, {"b": null}]}'))
    for text in (b"[1]", b'"a"', b"1", b"{} {}"):
        assert not accepts(grammar, list(text))


def test_blanks_between_elements_are_bounded() -> None:
    grammar = build_grammar(pb.GRAMMAR_TYPE_JSON_OBJECT, "", {}, LIMITS).data
    assert accepts(grammar, list(b"{" + b" " * 10 + b"}"))
    assert not accepts(grammar, list(b"{" + b" " * 200 + b"}"))


def test_a_schema_cannot_loosen_our_options() -> None:
    with pytest.raises(Failure, match="x-guidance"):
        compile_schema({"type": "object", "x-guidance": {"lenient": True}})


def test_a_regex_matches_the_whole_output() -> None:
    grammar = build_grammar(pb.GRAMMAR_TYPE_REGEX, "a[0-9]{2}", {}, LIMITS).data
    assert accepts(grammar, list(b"a12"))
    assert not accepts(grammar, list(b"xa12"))
    assert not accepts(grammar, list(b"a123"))


def test_a_choice_is_one_of_its_strings() -> None:
    grammar = build_grammar(pb.GRAMMAR_TYPE_CHOICE, '["yes", "no \\"x\\""]', {}, LIMITS).data
    assert accepts(grammar, list(b'no "x"'))
    assert not accepts(grammar, list(b"maybe"))
    for bad in ("[]", '{"a":1}', '[""]', "nonsense"):
        with pytest.raises(Failure):
            build_grammar(pb.GRAMMAR_TYPE_CHOICE, bad, {}, LIMITS)


def test_an_ebnf_that_does_not_parse_is_named_unsupported() -> None:
    with pytest.raises(Failure) as caught:
        build_grammar(pb.GRAMMAR_TYPE_EBNF, "start: ((", {}, LIMITS)
    assert caught.value.reason is Reason.SCHEMA_UNSUPPORTED


# ---- tool calls -----------------------------------------------------------------------------


def ids(text: str) -> list[int]:
    """Text with the token inside tags written as a paragraph sign."""
    found: list[int] = []
    for part in text.split("¶"):
        found += [*part.encode(), DSML_ID]
    return found[:-1]


def tool(name: str, parameters: Any, strict: bool | None = True) -> dict[str, Any]:
    function = {"name": name, "description": None, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def compile_tools(tools: list[Any], required: bool = False) -> bytes:
    kind = pb.GRAMMAR_TYPE_TOOL_CALL_REQUIRED if required else pb.GRAMMAR_TYPE_TOOL_CALL
    return build_grammar(kind, json.dumps(tools), {"Dsml": DSML_ID}, LIMITS).data


WEATHER = tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "days", "unit", "at"],
        "additionalProperties": False,
    },
)


def call_of(city: str = "Oslo", days: str = "3", unit: str = "C", at: str | None = None) -> str:
    at_tag = 'string="false">null' if at is None else f'string="true">{at}'
    return (
        '<¶ invoke name="weather">\n'
        f'<¶ parameter name="city" string="true">{city}</¶ parameter>\n'
        f'<¶ parameter name="days" string="false">{days}</¶ parameter>\n'
        f'<¶ parameter name="unit" string="true">{unit}</¶ parameter>\n'
        f'<¶ parameter name="at" {at_tag}</¶ parameter>'
        "\n</¶ invoke>"
    )


def test_a_tool_call_may_follow_text_or_not_come_at_all() -> None:
    grammar = compile_tools([WEATHER])
    assert accepts(grammar, ids("just text, also < and </ and more"))
    assert accepts(grammar, ids("First.\n\n<¶ calls>\n" + call_of() + "\n</¶ calls>"))
    assert accepts(grammar, ids("\n\n<¶ calls>\n" + call_of() + "\n" + call_of() + "\n</¶ calls>"))
    assert not accepts(grammar, ids("First.<¶ calls>\n" + call_of() + "\n</¶ calls>"))
    assert not accepts(grammar, ids("\n\n<¶ calls>\n" + call_of()))
    assert not accepts(grammar, ids("\n\n<¶ calls>\n" + call_of() + "\n</¶ calls> and text"))


def test_a_required_call_starts_inside_the_block() -> None:
    grammar = compile_tools([WEATHER], required=True)
    assert accepts(grammar, ids(call_of() + "\n</¶ calls>"))
    assert not accepts(grammar, ids("no call"))


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({}, True),
        ({"city": 'with < and </ and "quotes"\nand lines'}, True),
        ({"at": "noon"}, True),
        ({"days": "0"}, False),
        ({"days": '"3"'}, False),
        ({"unit": "K"}, False),
    ],
)
def test_strict_parameters_are_held_to_their_schemas(fields: dict[str, str], good: bool) -> None:
    grammar = compile_tools([WEATHER], required=True)
    assert accepts(grammar, ids(call_of(**fields) + "\n</¶ calls>")) is good


def test_strict_parameters_come_all_and_in_order() -> None:
    grammar = compile_tools([WEATHER], required=True)
    lines = call_of().split("\n")
    missing = "\n".join([*lines[:1], *lines[2:]])
    swapped = "\n".join([lines[0], lines[2], lines[1], *lines[3:]])
    for text in (missing, swapped):
        assert not accepts(grammar, ids(text + "\n</¶ calls>"))


def test_tools_that_are_not_strict_take_any_parameters_but_only_known_names() -> None:
    grammar = compile_tools([tool("f", {"type": "object", "not": {}}, strict=False)], required=True)
    body = '<¶ parameter name="x" string="false">{"a": [1]}</¶ parameter>'
    assert accepts(grammar, ids(f'<¶ invoke name="f">\n{body}\n</¶ invoke>\n</¶ calls>'))
    assert accepts(grammar, ids('<¶ invoke name="f">\n\n</¶ invoke>\n</¶ calls>'))
    assert not accepts(grammar, ids('<¶ invoke name="g">\n\n</¶ invoke>\n</¶ calls>'))
    assert not accepts(grammar, ids(f'<¶ invoke name="f">\n{body[:-5]}\n</¶ invoke>\n</¶ calls>'))


def test_a_tool_without_parameters_has_an_empty_body() -> None:
    grammar = compile_tools([tool("f", {"type": "object", "properties": {}})], required=True)
    assert accepts(grammar, ids('<¶ invoke name="f">\n\n</¶ invoke>\n</¶ calls>'))


def test_ur_07_the_tags_are_known_by_token_not_by_characters() -> None:
    grammar = compile_tools([WEATHER], required=True)
    spelled = call_of().replace("¶", "<dsml>") + "\n</<dsml> calls>"
    assert not accepts(grammar, list(spelled.encode()))


def test_tools_without_the_token_are_refused() -> None:
    with pytest.raises(Failure) as caught:
        build_grammar(pb.GRAMMAR_TYPE_TOOL_CALL, json.dumps([WEATHER]), {}, LIMITS)
    assert caught.value.reason is Reason.UNSUPPORTED_FEATURE


def test_a_keyword_that_a_strict_tool_would_lose_is_refused_by_name() -> None:
    bad = tool("f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(Failure) as caught:
        compile_tools([bad])
    assert caught.value.metadata["path"] == "tools.f.parameters.properties.a.uniqueItems"


def parameters_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "$defs": {"d": {"type": "string"}}}


@pytest.mark.parametrize(
    ("value", "lost"),
    [
        ({"type": "string", "allOf": [{"minLength": 3}]}, "allOf"),
        ({"allOf": [{"type": "string"}]}, "allOf"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "oneOf"),
        ({"type": "string", "enum": ["a", "bc"], "minLength": 2}, "minLength"),
        ({"type": "string", "enum": ["a"], "pattern": "b"}, "pattern"),
        ({"type": "string", "const": "a", "format": "uuid"}, "format"),
        ({"type": "string", "pattern": "^a", "format": "uuid"}, "format"),
        ({"type": "string", "pattern": "^a", "maxLength": 3}, "maxLength"),
        ({"type": "string", "anyOf": [{"minLength": 2}, {"const": ""}], "pattern": "a"}, "pattern"),
        ({"$ref": "#/$defs/d", "minLength": 2}, "minLength"),
    ],
)
def test_s_06_a_keyword_that_raw_text_cannot_be_held_to_is_refused_by_name(
    value: dict[str, Any], lost: str
) -> None:
    for wrapped in (value, {"anyOf": [value, {"type": "null"}]}):
        with pytest.raises(Failure) as caught:
            compile_tools([tool("f", parameters_of(a=wrapped))])
        assert caught.value.reason is Reason.SCHEMA_UNSUPPORTED
        assert caught.value.metadata["path"] == f"tools.f.parameters.properties.a.{lost}"
        assert lost in caught.value.message


@pytest.mark.parametrize(
    ("value", "text", "good"),
    [
        ({"type": "integer", "enum": [1, 2, "a"]}, 'true">a', False),
        ({"type": "integer", "enum": [1, 2, "a"]}, 'false">2', True),
        ({"type": "integer", "enum": [1, 2], "minimum": 2}, 'false">1', False),
        ({"type": ["string", "null"], "enum": ["a", None]}, 'true">a', True),
        ({"type": ["string", "null"], "enum": ["a", None]}, 'true">b', False),
        ({"type": ["string", "null"], "enum": ["a", None]}, 'false">null', True),
        ({"type": "string", "minLength": 2, "maxLength": 3}, 'true">abc', True),
        ({"type": "string", "minLength": 2, "maxLength": 3}, 'true">a', False),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 1}, 'false">[null,null]', False),
    ],
)
def test_the_keywords_of_a_strict_parameter_hold_together(
    value: dict[str, Any], text: str, good: bool
) -> None:
    grammar = compile_tools([tool("f", parameters_of(a=value))], required=True)
    call = f'<¶ invoke name="f">\n<¶ parameter name="a" string="{text}</¶ parameter>\n</¶ invoke>'
    assert accepts(grammar, ids(call + "\n</¶ calls>")) is good


@pytest.mark.parametrize(
    "key", ["\0", "a\x01b", "\n", "\x1f", "\x7f", "\x80", '"', "\\", "a b", "", "\u2028", "漢"]
)
def test_a_key_of_any_characters_is_written_so_that_the_arguments_are_json(key: str) -> None:
    schema = {**_OBJECT, "properties": {key: {"type": "string"}}, "required": [key]}
    grammar = compile_tools([tool("f", schema)], required=True)
    # The parser copies the name, with its quotes, up to the next blank.
    name = json.dumps(key, ensure_ascii=False).replace(" ", "\\u0020")
    assert json.loads(name) == key
    call = f'<¶ invoke name="f">\n<¶ parameter name={name} string="true">x</¶ parameter>'
    assert accepts(grammar, ids(call + "\n</¶ invoke>\n</¶ calls>"))
    if name != f'"{key}"':
        raw = call.replace(name, f'"{key}"')
        assert not accepts(grammar, ids(raw + "\n</¶ invoke>\n</¶ calls>"))
    grammar = compile_schema(schema)
    assert accepts(grammar, list(json.dumps({key: "x"}, ensure_ascii=False).encode()))


def test_constants_of_any_characters_are_matched() -> None:
    for text in ("\0", "\x7f", "a\nb", '"', "\\"):
        schema = parameters_of(a={"type": "string", "enum": [text]})
        grammar = compile_tools([tool("f", schema)], required=True)
        call = f'<¶ invoke name="f">\n<¶ parameter name="a" string="true">{text}</¶ parameter>'
        assert accepts(grammar, ids(call + "\n</¶ invoke>\n</¶ calls>"))
        choice = build_grammar(pb.GRAMMAR_TYPE_CHOICE, json.dumps([text]), {}, LIMITS).data
        assert accepts(choice, list(text.encode()))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"enum": ["\\ud800"]}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"type": "object", "properties": {"\\udfff": {}}}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"const": NaN}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"minimum": 1e400}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"type": {"a": 1}}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"type": [["string"]]}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"format": ["uuid"]}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"format": {}}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"oneOf": [{"enum": 1}, {"type": "null"}]}'),
        (pb.GRAMMAR_TYPE_JSON_SCHEMA, '{"oneOf": [{"type": [{}]}, {"type": "null"}]}'),
        (pb.GRAMMAR_TYPE_CHOICE, '["\\ud800"]'),
        (pb.GRAMMAR_TYPE_TOOL_CALL, '[{"type": "function", "function": {"name": "\\ud800"}}]'),
    ],
)
def test_what_no_schema_can_be_is_refused_and_is_no_fault_of_ours(kind: int, source: str) -> None:
    with pytest.raises(Failure) as caught:
        build_grammar(kind, source, {"Dsml": DSML_ID}, LIMITS)
    assert caught.value.reason is Reason.SCHEMA_UNSUPPORTED
