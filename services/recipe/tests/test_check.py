"""The conformance tool: it passes what is right and says where it is not."""

import json

import pytest

from services.common import cli as pelagos
from services.recipe import check, cli

CASES = {
    "encode.jsonl": {"id": "e", "text": "Hi", "ids": [23166]},
    "image_tokens.jsonl": {"width": 42, "height": 42, "tokens": 184},
    "max_tokens.jsonl": {
        "thinking": False,
        "effort": None,
        "requested": None,
        "prompt_tokens": 10,
        "context_limit": 100,
        "expect": {"max_tokens": 90},
    },
    "errors.jsonl": {
        "id": "x",
        "protocol": "chat",
        "options": {},
        "request": "{",
        "expect": {
            "ok": False,
            "stage": "deserialize",
            "status": 400,
            "message": "invalid JSON request: eof",
        },
    },
    "stream_parser.jsonl": {
        "id": "p",
        "parsing": {},
        "kind": "text",
        "finish": "stop",
        "runs": [
            {
                "chunks": ["a", "b"],
                "out": [[["start"], ["content", "a"]], [["content", "b"]], [["finish", "stop", 2]]],
            }
        ],
    },
}


def write(folder, name, case):
    (folder / name).write_text(json.dumps(case) + "\n", "utf-8")


@pytest.mark.parametrize("name", CASES)
def test_a_right_line_passes(tmp_path, capsys, name):
    case = CASES[name]
    write(tmp_path, name, case)
    assert pelagos.main(["recipe", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{name}: 1 passed, 0 failed\n"


@pytest.mark.parametrize(
    ("name", "broken", "said"),
    [
        ("encode.jsonl", {"ids": [1]}, "ids[0]"),
        ("image_tokens.jsonl", {"tokens": 1}, "expected 1"),
        ("max_tokens.jsonl", {"expect": {"status": 400, "body": {}}}, ".status: missing"),
        ("errors.jsonl", {"request": "[]"}, "invalid request body"),
        ("stream_parser.jsonl", {"finish": "length"}, "runs[0][2][0][1]"),
        ("encode.jsonl", {"text": 3}, "TypeError"),
    ],
)
def test_a_wrong_line_fails_and_shows_where(tmp_path, capsys, name, broken, said):
    write(tmp_path, name, {**CASES[name], **broken})
    assert cli.main(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: 0 passed, 1 failed\n")
    assert said in out


def test_a_folder_without_vectors_fails(tmp_path, capsys):
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "no vector file" in capsys.readouterr().err


def test_the_order_of_keys_counts_in_events_and_not_in_conversations():
    assert check.differences_of({"a": 1, "b": 2}, {"b": 2, "a": 1}) == []
    assert check._differences_in_order({"a": 1, "b": 2}, {"b": 2, "a": 1}, "x")
    assert check.differences_of({"a": True}, {"a": 1}) != []
    assert check.differences_of([1], [1, 2]) != []
