"""Images as cache keys see them, and constraints as the compiler sees them."""

from __future__ import annotations

import json

import pytest
from pelagos.recipe.v1 import recipe_pb2 as recipe
from pelagos.so_compiler.v1 import so_compiler_pb2 as so

from services.common.errors import Failure, Reason
from services.entrypoint.constraint import constraint_named, constraint_of
from services.entrypoint.media import media_spans


def image(data: bytes = b"img", **fields: int | str) -> recipe.Image:
    defaults: dict[str, int | str] = {"start": 3, "num_tokens": 16, "width": 20, "height": 30}
    return recipe.Image(data=data, **{**defaults, **fields})


def test_ur_35_every_part_of_an_image_is_in_its_digest() -> None:
    variants = [
        media_spans([image()], "r1", 100),
        media_spans([image(b"imh")], "r1", 100),
        media_spans([image(width=21)], "r1", 100),
        media_spans([image(width=30, height=20)], "r1", 100),
        media_spans([image()], "r2", 100),
        media_spans([image(width=1000, height=800)], "r1", 100),
        media_spans([image(width=1000, height=800, detail="low")], "r1", 100),
    ]
    digests = {spans[0].digest for spans in variants}
    assert len(digests) == len(variants)
    assert all(len(digest) == 32 for digest in digests)
    assert media_spans([image()], "r1", 100)[0].start == 3


def test_images_that_cannot_travel_are_refused() -> None:
    with pytest.raises(Failure) as caught:
        media_spans([image(b"x" * 60), image(b"y" * 60)], "r1", 100)
    assert caught.value.reason is Reason.NOT_FITTING
    for broken in (image(b""), image(num_tokens=0)):
        with pytest.raises(Failure) as caught:
            media_spans([broken], "r1", 100)
        assert caught.value.reason is Reason.IMAGE_INVALID


def encoded(kind: str, schema: str = "", reasoning: bool = False) -> recipe.EncodeResponse:
    return recipe.EncodeResponse(
        constraint_kind=kind,
        constraint_schema=schema,
        starts_in_reasoning=reasoning,
        end_of_thinking_id=128_822,
    )


def tools(strict: bool | None) -> str:
    return json.dumps([{"type": "function", "function": {"name": "f", "strict": strict}}])


def test_a_constraint_waits_for_the_end_of_reasoning() -> None:
    thinking = constraint_of(encoded("json", '{"type":"object"}', reasoning=True))
    assert thinking is not None
    assert thinking.trigger_token_ids == (128_822).to_bytes(4, "little")
    at_once = constraint_of(encoded("json", ""))
    assert at_once is not None
    assert at_once.type == so.GRAMMAR_TYPE_JSON_OBJECT
    assert at_once.trigger_token_ids == b""
    ref = thinking.grammar_ref("key", "a:1")
    assert (ref.artifact_key, ref.address) == ("key", "a:1")
    assert ref.trigger_token_ids == thinking.trigger_token_ids


@pytest.mark.parametrize(
    ("kind", "schema", "expected"),
    [
        ("", "", None),
        ("regex", "a+", so.GRAMMAR_TYPE_REGEX),
        ("json", '{"type":"object"}', so.GRAMMAR_TYPE_JSON_SCHEMA),
        ("tool_call", tools(True), so.GRAMMAR_TYPE_TOOL_CALL),
        ("tool_call", tools(None), None),
        ("tool_call_required", tools(False), so.GRAMMAR_TYPE_TOOL_CALL_REQUIRED),
    ],
)
def test_each_kind_has_its_grammar(kind: str, schema: str, expected: int | None) -> None:
    found = constraint_of(encoded(kind, schema))
    assert (found.type if found else None) == expected
    if found is not None:
        assert found.needs_special_ids is kind.startswith("tool_call")


def test_ur_67_an_unknown_kind_is_refused_not_dropped() -> None:
    with pytest.raises(Failure) as caught:
        constraint_of(encoded("xml"))
    assert caught.value.reason is Reason.UNSUPPORTED_FEATURE
    with pytest.raises(Failure):
        constraint_named("xml", "")
    assert constraint_named("", "") is None
