r"""Grammar of tool calls as this model family writes them: tags around one special token.

    \n\n<D calls>\n
    <D invoke name="NAME">\n
    <D parameter name="KEY" string="true">TEXT</D parameter>\n
    <D parameter name="KEY" string="false">JSON</D parameter>
    \n</D invoke>\n
    </D calls>

D stands for the special token, matched by id: the same characters written with ordinary tokens are
text (S-08, UR-07). Strict tools get exactly their parameters in declared order, values held to
their schemas; other tools any parameters with any values. The parser copies a name to the JSON
of the arguments as it stands up to the next blank, so a name is written as JSON, blanks escaped.
Source: recipe.md, section 3.5 and 6.8; engine.md, section 5.
"""

from __future__ import annotations

import json
from typing import Any, Final

from services.common.errors import Failure, Reason
from services.so_compiler.automaton import Budget
from services.so_compiler.config import GrammarLimits
from services.so_compiler.schema_check import ENFORCED, check_document, parse_json, resolve

# Any text up to the closing tag: the special token right behind "</" decides where it ends.
_ANY_TEXT_CLOSE: Final = r"/(?s:.*)<\//"
# What can hold a string to something, and what _text_value makes a rule of at a time.
_STRING_KEYWORDS: Final = (
    *("enum", "const", "anyOf", "allOf", "oneOf"),
    *("pattern", "format", "minLength", "maxLength"),
)
_REF_KEYWORDS: Final = frozenset({"$ref", "$defs", "definitions"})
_FORMAT_PATTERNS: Final = {
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}"
    r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
}


def tool_grammar(
    source: str, dsml_id: int, limits: GrammarLimits, *, required: bool, budget: Budget
) -> str:
    """Returns the Lark grammar of optional or required calls of these tools.

    Args:
        source: JSON array of `{"type": "function", "function": {...}}`.
        dsml_id: id of the special token inside every tag.
        required: the prompt ends inside the block, so output starts with an invoke tag.
    Raises: Failure naming tool and path.
    """
    if not dsml_id:
        raise Failure(
            Reason.UNSUPPORTED_FEATURE,
            "the tokenizer has no token for tool calls",
            {"token": "Dsml"},
        )
    tools = _parse_tools(source, limits)
    builder = _Builder(f"<[{dsml_id}]>", limits, budget)
    invokes = [builder.add_tool(i, tool) for i, tool in enumerate(tools)]
    return builder.finish(invokes, required=required)


class _Builder:
    def __init__(self, token: str, limits: GrammarLimits, budget: Budget) -> None:
        self._d = token
        self._limits = limits
        self._budget = budget
        self._rules: list[str] = []
        self._free_used = False

    def add_tool(self, index: int, function: dict[str, Any]) -> str:
        """Adds the rules of one tool; returns its rule's name."""
        name = f"invoke_{index}"
        opening = literal(f' invoke name="{function["name"]}">\n')
        schema = function.get("parameters") or {}
        if function.get("strict"):
            body = self._strict_parameters(index, function["name"], schema)
        else:
            body = self._free_parameters()
        closing = f'"\\n</" {self._d} {literal(" invoke>")}'
        self._rules.append(f"{name}: {self._d} {opening} {body} {closing}")
        return name

    def finish(self, invokes: list[str], *, required: bool) -> str:
        """Returns the grammar.

        Rules begin behind the "<" of their tag: lexing is greedy, so a lone line break would
        compete with the one that opens a closing tag.
        """
        if self._free_used:
            head = r'/ parameter name="[^"\n]+" string="/'
            self._rules += [
                'free: "<" parameter ("\\n<" parameter)*',
                f'parameter: {self._d} {head} value {self._d} " parameter>"',
                'value: "true\\">" ANY_TEXT | "false\\">" any_json "</"',
                "any_json: %json {}",
            ]
        self._rules.append(f"invoke: {' | '.join(invokes)}")
        calls = f'"<" invoke ("\\n<" invoke)* "\\n</" {self._d} " calls>"'
        if required:
            start = f"start: {calls}"
        else:
            # Free text, or free text that ends where the block begins.
            start = f'start: TEXT | OPENING {self._d} " calls>\\n" {calls}'
        terminals = [
            "TEXT: /(?s:.*)/",
            r"OPENING: /(?s:.*)\n\n</",
            f"ANY_TEXT: {_ANY_TEXT_CLOSE}",
            "",
        ]
        return "\n".join([start, *self._rules, *terminals])

    def _free_parameters(self) -> str:
        self._free_used = True
        return "free?"

    def _strict_parameters(self, index: int, name: str, schema: dict[str, Any]) -> str:
        path = f"tools.{name}.parameters"
        check_document(schema, self._limits, self._budget, path)
        properties = schema.get("properties") or {}
        rules = [
            self._strict_parameter(index, i, key, value, schema, f"{path}.properties.{key}")
            for i, (key, value) in enumerate(properties.items())
        ]
        return '"<" ' + ' "\\n<" '.join(rules) if rules else '""'

    def _strict_parameter(
        self, tool: int, index: int, key: str, value: Any, root: dict[str, Any], path: str
    ) -> str:
        rule = f"p_{tool}_{index}"
        start = f"{self._d} " + literal(f' parameter name={_written_name(key)} string="')
        choices = []
        text = self._text_value(value, root, path)
        if text is not None:
            choices.append(f'"true\\">" {text}')
        other = _without_strings(value, root)
        if other is not None:
            embedded = dict(other)
            for defs in ("$defs", "definitions"):
                if defs in root:
                    embedded[defs] = root[defs]
            self._rules.append(f"{rule}_json: %json {json.dumps(embedded, ensure_ascii=False)}")
            choices.append(f'"false\\">" {rule}_json "</"')
        self._rules.append(
            f"{rule}: {start} ({' | '.join(choices)}) {self._d} {literal(' parameter>')}"
        )
        return rule

    def _text_value(self, value: Any, root: dict[str, Any], path: str) -> str | None:
        """Returns the rule of a raw string value with its closing "</", None if no string fits."""
        node = _resolved(value, root, path)
        if node is True:
            return "ANY_TEXT"
        if not isinstance(node, dict):
            return None
        types = node.get("type")
        if types is not None and "string" not in (types if isinstance(types, list) else [types]):
            return None
        _check_text_keywords(node, path)
        constants = node.get("enum", [node["const"]] if "const" in node else None)
        if constants is not None:
            texts = [text for text in constants if isinstance(text, str)]
            if not texts:
                return None
            return "(" + " | ".join(literal(text + "</") for text in texts) + ")"
        if "anyOf" in node:
            found = [self._text_value(branch, root, path) for branch in node["anyOf"]]
            texts = [text for text in found if text is not None]
            return "(" + " | ".join(texts) + ")" if texts else None
        pattern = node.get("pattern")
        if "format" in node and pattern is None:
            pattern = _FORMAT_PATTERNS.get(node["format"])
            if pattern is None:
                raise Failure(
                    Reason.SCHEMA_UNSUPPORTED,
                    f"{path}.format: format {node['format']} is not supported for tool parameters",
                    {"path": f"{path}.format"},
                )
            pattern = f"^{pattern}$"
        if "minLength" in node or "maxLength" in node:
            high = node.get("maxLength", "")
            return f"/(?s:.{{{node.get('minLength', 0)},{high}}})<\\//"
        if pattern is None:
            return "ANY_TEXT"
        return f"/{_as_whole_match(pattern)}<\\//"


def _parse_tools(source: str, limits: GrammarLimits) -> list[dict[str, Any]]:
    if len(source.encode()) > limits.max_tools_bytes:
        raise Failure(
            Reason.GRAMMAR_BUDGET, f"the tools take more than {limits.max_tools_bytes} bytes"
        )
    try:
        tools = parse_json(source)
        functions = [tool["function"] for tool in tools]
        names = [function["name"] for function in functions]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Failure(Reason.SCHEMA_UNSUPPORTED, "the tools are not a list of functions") from None
    if not functions or len(functions) > limits.max_tools:
        raise Failure(Reason.GRAMMAR_BUDGET, f"the tools must number 1 to {limits.max_tools}")
    if not all(isinstance(name, str) and name and '"' not in name for name in names):
        raise Failure(Reason.SCHEMA_UNSUPPORTED, "a tool's name is empty or has a quote")
    return functions


def _check_text_keywords(node: dict[str, Any], path: str) -> None:
    """Refuses by name what would be lost: a raw text is held to one keyword, or to its lengths."""
    found = [key for key in _STRING_KEYWORDS if key in node]
    for key in ("allOf", "oneOf"):
        if key in found:
            raise _lost(path, key, "is not supported for text in tool parameters")
    for key in found[1:]:
        if found != ["minLength", "maxLength"]:
            raise _lost(path, key, f"and {found[0]} together are not supported in tool parameters")


def _lost(path: str, key: str, why: str) -> Failure:
    at = f"{path}.{key}"
    return Failure(Reason.SCHEMA_UNSUPPORTED, f"{at}: {key} {why}", {"path": at})


def _resolved(value: Any, root: dict[str, Any], path: str = "") -> Any:
    """Follows references. With a path, raises Failure for what stands beside one and is lost."""
    for _ in range(64):
        if not isinstance(value, dict) or "$ref" not in value:
            return value
        beside = [key for key in value if key in ENFORCED and key not in _REF_KEYWORDS]
        if path and beside:
            raise _lost(path, beside[0], "beside $ref is not supported in tool parameters")
        value = resolve(root, value["$ref"])
    return value


def _without_strings(value: Any, root: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the part of a schema that is no string, None if nothing is left."""
    node = _resolved(value, root)
    if node is True:
        return {"type": ["object", "array", "number", "boolean", "null"]}
    if not isinstance(node, dict):
        return None
    for key in ("enum", "const"):
        if key in node:
            values = node["enum"] if key == "enum" else [node["const"]]
            rest = [item for item in values if not isinstance(item, str)]
            others = {name: item for name, item in node.items() if name != "const"}
            return {**others, "enum": rest} if rest else None
    if "anyOf" in node:
        branches = [_without_strings(branch, root) for branch in node["anyOf"]]
        kept = [branch for branch in branches if branch is not None]
        return {**node, "anyOf": kept} if kept else None
    types = node.get("type")
    if types is None:
        return {**node, "type": ["object", "array", "number", "boolean", "null"]}
    names = [name for name in (types if isinstance(types, list) else [types]) if name != "string"]
    if not names:
        return None
    return {**node, "type": names if len(names) > 1 else names[0]}


def _as_whole_match(pattern: str) -> str:
    """Returns a search pattern as one that matches the whole text, for a slash-quoted terminal."""
    start, end = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        pattern, start = pattern[1:], ""
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern, end = pattern[:-1], ""
    return f"{start}({pattern}){end}".replace("\n", "\\n").replace("/", "\\/")


def _written_name(key: str) -> str:
    """Returns a parameter's name as its tag has it, quotes included."""
    return json.dumps(key, ensure_ascii=False).replace(" ", "\\u0020")


def literal(text: str) -> str:
    """Returns a quoted Lark literal; JSON's escapes are Lark's, which takes no raw DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
