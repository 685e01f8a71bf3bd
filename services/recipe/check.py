"""Conformance: runs every vector file of a folder against the codec.

The schema of the files is that of the golden vectors: JSON Lines, one case a line, the kind of a
file told by its name. Each line gives a list of differences, none for a pass.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.recipe import codec
from services.recipe._codec import Parser
from services.recipe.codec import CodecError, Options, Streams, StreamSpec, Tokenizer

Case = Mapping[str, Any]
Differences = list[str]

# Error texts behind these words are a validator's or a serializer's own, not contractual.
_FOREIGN_TEXTS: Final = ("Invalid json schema: ", "Invalid tool parameters schema : ")
_OWN_SCHEMA_SENTENCE: Final = "schema must be a JSON Schema of 'type: \"object\"'"
_TIMES: Final = frozenset({"created", "created_at", "completed_at"})
_NOW_S: Final = 1_700_000_000


@dataclass(frozen=True)
class FileResult:
    """What one file gave; `failures` are (case id, differences)."""

    name: str
    num_passed: int
    failures: list[tuple[str, Differences]]

    @property
    def line(self) -> str:
        """Returns the line that is printed for the file."""
        return f"{self.name}: {self.num_passed} passed, {len(self.failures)} failed"


def check_folder(folder: Path, tokenizer: Tokenizer) -> Iterator[FileResult]:
    """Checks each known file of a folder, in the order of `CHECKS`."""
    for name, check in CHECKS.items():
        path = folder / name
        if path.is_file():
            yield check_file(path, check, tokenizer)


def check_file(path: Path, check: Check, tokenizer: Tokenizer) -> FileResult:
    """Checks one file, line by line; a line that breaks the check is a failure, not the end."""
    num_passed = 0
    failures = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            label = f"line {number}"
            try:
                case = json.loads(line)
                label = str(case.get("id", label))
                differences = check(case, tokenizer)
            except Exception as error:
                differences = [f"{type(error).__name__}: {error}"]
            if differences:
                failures.append((label, differences))
            else:
                num_passed += 1
    return FileResult(path.name, num_passed, failures)


def differences_of(got: Any, expected: Any, path: str = "") -> Differences:
    """Returns where two JSON values differ; the order of keys does not count, kinds do."""
    if isinstance(got, dict) and isinstance(expected, dict):
        found = []
        for key in expected.keys() | got.keys():
            if key not in got:
                found.append(f"{path}.{key}: missing")
            elif key not in expected:
                found.append(f"{path}.{key}: not expected")
            else:
                found += differences_of(got[key], expected[key], f"{path}.{key}")
        return sorted(found)
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        pairs = enumerate(zip(got, expected, strict=True))
        return [d for i, (a, b) in pairs for d in differences_of(a, b, f"{path}[{i}]")]
    if got == expected and isinstance(got, bool) == isinstance(expected, bool):
        return []
    return [f"{path or 'value'}: {_excerpts(got, expected)}"]


def _excerpts(got: Any, expected: Any) -> str:
    """Shows two values from shortly before the first character in which they differ."""
    texts = [json.dumps(value, ensure_ascii=False) for value in (got, expected)]
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = max(0, same - 40)
    got_text, expected_text = (text[start : start + 160] for text in texts)
    return f"got {got_text}, expected {expected_text}"


def _differences_in_order(got: Any, expected: Any, path: str) -> Differences:
    """As `differences_of`, but the order of keys counts too."""
    if json.dumps(got) == json.dumps(expected):
        return []
    return differences_of(got, expected, path) or [f"{path}: {_excerpts(got, expected)}"]


def _body(request: Any) -> bytes:
    text = request if isinstance(request, str) else json.dumps(request, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _ids(token_ids: bytes) -> list[int]:
    return list(memoryview(token_ids).cast("I"))


def _id_bytes(token_ids: list[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _check_ids(token_ids: bytes, expected: Case) -> Differences:
    got = {
        "n_tokens": len(token_ids) // 4,
        "ids_sha256": hashlib.sha256(token_ids).hexdigest(),
    }
    return differences_of(got, {key: expected[key] for key in got})


# -- conversion, rendering, encoding


def _check_render(protocol: codec.Protocol) -> Check:
    def check(case: Case, tokenizer: Tokenizer) -> Differences:
        options = Options.native_from_vector(case.get("options"))
        try:
            converted = codec.convert(protocol, _body(case["request"]), options)
        except CodecError as error:
            return [f"refused with {error.status}: {error.message}"]
        expected = dict(case["expect"])
        got = json.loads(converted.view())
        ids = {key: expected.pop(key) for key in ("n_tokens", "ids_sha256")}
        found = differences_of(got, expected)
        return found or _check_ids(codec.token_ids_of(converted, tokenizer), ids)

    return check


def _check_error(case: Case, _tokenizer: Tokenizer) -> Differences:
    options = Options.native_from_vector(case.get("options"))
    expected = case["expect"]
    try:
        codec.convert(case["protocol"], _body(case["request"]), options)
    except CodecError as error:
        got = {"stage": error.stage, "status": error.status}
        found = differences_of(got, {key: expected[key] for key in got})
        if expected["stage"] == "deserialize":
            prefix = expected["message"].split(":")[0]
            return found + differences_of(error.message.split(":")[0], prefix, ".message")
        contractual = _contractual(expected["message"])
        if contractual != expected["message"]:
            return found + differences_of(_contractual(error.message), contractual, ".message")
        return found + _differences_in_order(json.loads(error.body), expected["body"], ".body")
    return [f"accepted, expected {expected['message']!r}"]


def _contractual(message: str) -> str:
    """Returns the part of an error text that has to be equal."""
    if message.startswith("Invalid schema for function '") and _OWN_SCHEMA_SENTENCE not in message:
        return message.split("': ")[0]
    for prefix in _FOREIGN_TEXTS:
        if message.startswith(prefix) and _is_foreign(message[len(prefix) :]):
            return prefix
    if "cannot be serialized" in message or "cannot be reported" in message:
        return message.split(": ")[0]
    return message


def _is_foreign(detail: str) -> bool:
    """Whether a schema error's detail is a parser's wording and not one of the codec's rules."""
    return not detail.startswith(
        (
            "An object with no properties",
            "Required propert",
            "Duplicate required property",
            "additionalProperties should not",
            "The top level of",
        )
    )


def _check_encode(case: Case, tokenizer: Tokenizer) -> Differences:
    if "text" in case:
        token_ids = tokenizer.encode_plain(case["text"])
    else:
        text = case["prompt"]
        starts = [0]
        for char in text:
            starts.append(starts[-1] + len(char.encode("utf-8")))
        ranges = [(starts[start], starts[end]) for start, end in case["special_ranges"]]
        token_ids = tokenizer.encode_prompt(text, ranges)
    return differences_of(_ids(token_ids), case["ids"], "ids")


def _check_encode_unicode(case: Case, tokenizer: Tokenizer) -> Differences:
    text: list[str] = []
    code = case["first"]
    while len(text) < case["count"]:
        if not 0xD800 <= code <= 0xDFFF:
            text.append(case["pattern"].replace("{0}", chr(code)))
        code += 1
    return _check_ids(tokenizer.encode_plain("".join(text)), case)


def _check_max_tokens(case: Case, _tokenizer: Tokenizer) -> Differences:
    try:
        got: dict[str, Any] = {
            "max_tokens": codec.resolve_max_tokens(
                case["thinking"],
                case.get("effort"),
                case.get("requested"),
                case["prompt_tokens"],
                case["context_limit"],
            )
        }
    except CodecError as error:
        got = {"status": error.status, "body": json.loads(error.body)}
    return differences_of(got, case["expect"])


def _check_image_tokens(case: Case, _tokenizer: Tokenizer) -> Differences:
    return differences_of(codec.image_num_tokens(case["width"], case["height"]), case["tokens"])


def _check_image_resize(case: Case, _tokenizer: Tokenizer) -> Differences:
    try:
        size = codec.image_target_size(case["width"], case["height"], case["detail"])
    except CodecError as error:
        return [] if "error" in case else [f"refused: {error.message}"]
    if "error" in case:
        return [f"got {size}, expected an error"]
    return differences_of(list(size), [case["out_width"], case["out_height"]])


# -- streams


def _check_stream(protocol: codec.Protocol) -> Check:
    def check(case: Case, tokenizer: Tokenizer) -> Differences:
        options = Options.native_from_vector(case.get("options"))
        converted = codec.convert(protocol, _body(case["request"]), options)
        streams = Streams()
        spec = StreamSpec(
            response_id=case["response_id"],
            created=_NOW_S,
            call_id_seed=1,
            model=case["model"],
            writes_events=True,
            keeps_response=True,
        )
        attached = tokenizer if case.get("tokenizer") else None
        handle = streams.open(converted.parse_state().encode(), attached, spec)
        events: list[list[Any]] = []
        error: str | None = None
        for chunk in case["chunks"]:
            if streams.is_over(handle):
                break
            pushed = _push(streams, handle, chunk)
            if pushed.error is not None:
                error = pushed.error
                break
            events.append(_events(pushed.sse))
        tail = _events(streams.close(handle, _NOW_S))
        final = _normalised(json.loads(streams.folded(handle)))
        expected_events = case["events"]
        found = differences_of(len(events), len(expected_events), "number of pushes")
        for index, (got, expected) in enumerate(zip(events, expected_events, strict=False)):
            found += _differences_in_order(got, expected, f"events[{index}]")
        found += _differences_in_order(tail, case.get("tail", []), "tail")
        found += differences_of(error, case.get("error"), "error")
        return found + _differences_in_order(final, case["final"], "final")

    return check


def _push(streams: Streams, handle: int, chunk: Case) -> codec.Pushed:
    match chunk["kind"]:
        case "ready":
            prompt, hit = chunk.get("prompt_tokens", 0), chunk.get("prompt_cache_hit_tokens", 0)
            fingerprint = chunk.get("system_fingerprint")
            return streams.ready(handle, prompt, hit, fingerprint, _NOW_S)
        case "text":
            return streams.text(handle, chunk["content"], chunk.get("token_count", 0), _NOW_S)
        case "tokens":
            logprobs = chunk.get("logprobs")
            if logprobs is not None:
                logprobs = [(own, [tuple(pair) for pair in top]) for own, top in logprobs]
            return streams.tokens(handle, _id_bytes(chunk["token_ids"]), _NOW_S, logprobs)
        case "finish":
            return streams.finish(handle, chunk["finish_reason"], _NOW_S)
        case kind:
            raise ValueError(f"unknown chunk kind {kind!r}")


def _events(sse: bytes) -> list[Any]:
    """Reads server-sent events back; the SSE name must be the event's type."""
    events = []
    for frame in sse.decode("utf-8").split("\n\n")[:-1]:
        name, _, data = frame.rpartition("data: ")
        if data == "[DONE]":
            continue
        event = json.loads(data)
        if name and name != f"event: {event['type']}\n":
            raise ValueError(f"SSE name {name!r} of a {event['type']} event")
        if json.dumps(event, ensure_ascii=False, separators=(",", ":")) != data:
            _check_spelling(data)
        events.append(_normalised(event))
    return events


def _check_spelling(data: str) -> None:
    """Python spells some floats otherwise; spaces between tokens would be ours to blame."""
    in_string = False
    previous = ""
    for char in data:
        if char == '"' and previous != "\\":
            in_string = not in_string
        if char == " " and not in_string:
            raise ValueError(f"an event is not compact: {data[:80]}")
        previous = "" if previous == "\\" else char


def _normalised(value: Any, key: str = "") -> Any:
    """Sets times to 0 and the random part of call ids to RANDOM, as the vectors have them."""
    if isinstance(value, dict):
        return {name: _normalised(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_normalised(item) for item in value]
    if key in _TIMES and isinstance(value, int):
        return 0
    # call_NN_[ET_] + 20 random characters + 4 digits
    is_id = key in ("id", "call_id") and isinstance(value, str) and value.isascii()
    if is_id and value.startswith("call_") and len(value) >= 8 + 24:
        return value[:-24] + "RANDOM"
    return value


def _check_parser(case: Case, tokenizer: Tokenizer) -> Differences:
    found = []
    for index, run in enumerate(case["runs"]):
        attached = tokenizer.native if case["kind"] == "tokens" else None
        parser = Parser(json.dumps(case["parsing"]), attached)
        out = []
        for chunk in run["chunks"]:
            if parser.is_over:
                break
            if isinstance(chunk, str):
                out.append(json.loads(parser.text(chunk, 1)))
            else:
                out.append(json.loads(parser.tokens(_id_bytes(chunk))))
        if not parser.is_over:
            out.append(json.loads(parser.finish(case["finish"])))
        found += differences_of(out, run["out"], f"runs[{index}]")
    return found


Check = Callable[[Case, Tokenizer], Differences]

CHECKS: Final[Mapping[str, Check]] = {
    "render_chat.jsonl": _check_render("chat"),
    "render_responses.jsonl": _check_render("responses"),
    "render_messages.jsonl": _check_render("messages"),
    "errors.jsonl": _check_error,
    "encode.jsonl": _check_encode,
    "encode_unicode.jsonl": _check_encode_unicode,
    "max_tokens.jsonl": _check_max_tokens,
    "image_tokens.jsonl": _check_image_tokens,
    "image_resize.jsonl": _check_image_resize,
    "stream_chat.jsonl": _check_stream("chat"),
    "stream_responses.jsonl": _check_stream("responses"),
    "stream_messages.jsonl": _check_stream("messages"),
    "stream_parser.jsonl": _check_parser,
}
