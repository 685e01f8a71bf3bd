"""The body scanner: every split gives the same verdict, and its cost grows with the body only."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import Failure, Reason
from services.entrypoint.json_scan import LONG_STRING_MARK, JsonScanner
from services.entrypoint.limits import Limits


def scan(body: bytes, size: int | None = None, limits: Limits | None = None) -> bytes:
    scanner = JsonScanner(limits or Limits())
    for start in range(0, len(body), size or max(1, len(body))):
        scanner.feed(body[start : start + (size or len(body))])
    return scanner.finish()


documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@given(documents, st.booleans(), st.integers(1, 40))
def test_a_good_document_comes_out_as_it_went_in(document, ascii_only, size) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only).encode()
    assert json.loads(scan(body, size)) == document


@given(st.binary(max_size=60), st.integers(1, 20))
def test_any_split_of_any_bytes_gives_the_same_verdict(body, size) -> None:
    def verdict(step: int | None) -> object:
        try:
            return scan(body, step)
        except Failure as failure:
            return failure.message

    assert verdict(size) == verdict(None)


BAD = [
    (b'{"a":NaN}', "NaN"),
    (b'{"a":-Infinity}', "NaN"),
    (b'["\\ud800"]', "surrogate"),
    (b'["\\ud800 "]', "surrogate"),
    (b'["\\ude00"]', "surrogate"),
    (b'["\\ud83d\\ud83d\\ude00"]', "surrogate"),
    (b'["\\ud83d\\n\\ude00"]', "surrogate"),
    (b'"\xff"', "UTF-8"),
    (b'"\xc3"', "UTF-8"),
    (b'"\xed\xa0\x80"', "UTF-8"),
    (b"[" * 65, "deeper"),
    (b'{"a":' * 70, "deeper"),
    (b"1" * 65, "number"),
    (b"[1." + b"0" * 70 + b"]", "number"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, None])
@pytest.mark.parametrize(("body", "word"), BAD)
def test_a_body_over_a_limit_is_refused_at_every_split(body, word, size) -> None:
    with pytest.raises(Failure, match=word) as caught:
        scan(body, size)
    assert caught.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 64 + b"]" * 64,
        b"9" * 64,
        b'["\\\\ud800"]',
        b'["\\ud83d\\ude00"]',
        b'["NaN and Infinity", "' + b"1" * 100 + b'"]',
        b'{"a":1,"a":2}',
        b"not json at all {",
        b"",
        b'"open',
    ],
)
def test_what_breaks_no_limit_passes_whatever_the_codec_says_later(body) -> None:
    for size in (1, 3, None):
        scan(body, size)


def test_numbers_of_keys_and_values_are_bounded() -> None:
    limits = Limits(max_json_keys=10, max_json_values=50)
    wide = json.dumps({f"k{i}": 1 for i in range(11)}).encode()
    with pytest.raises(Failure, match="10 keys"):
        scan(wide, 4, limits)
    scan(json.dumps([{f"k{i}": 1 for i in range(10)}, {"k": 1}]).encode(), 4, limits)
    with pytest.raises(Failure, match="50 values"):
        scan(json.dumps(list(range(51))).encode(), 4, limits)


def test_long_strings_leave_their_length_in_the_skeleton() -> None:
    document = {"a": "é\\\n" * 20_000, "b": ["x" * 8000, "y" * 9000]}
    body = json.dumps(document, ensure_ascii=False).encode()
    for size in (1000, 65_536, None):
        skeleton = json.loads(scan(body, size))
        assert skeleton["b"][0] == document["b"][0]
        assert skeleton["b"][1] == LONG_STRING_MARK + "9002"
        assert skeleton["a"].startswith(LONG_STRING_MARK)
        assert int(skeleton["a"].removeprefix(LONG_STRING_MARK)) == len(
            json.dumps(document["a"], ensure_ascii=False).encode()
        )


def test_ur_50_the_skeleton_of_a_large_body_is_small() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 1_000_000}]}).encode()
    assert len(scan(body, 65_536)) < 10_000
