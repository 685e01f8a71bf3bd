"""The contract of pelagos.so_compiler.v1, on the fake and on the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pelagos.so_compiler.v1 import so_compiler_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.service import running
from services.so_compiler.client import SoCompiler, SoCompilerClient
from services.so_compiler.config import GrammarLimits, SoCompilerConfig
from services.so_compiler.fake import FakeSoCompiler
from services.so_compiler.main import build


@asynccontextmanager
async def _fake() -> AsyncIterator[tuple[SoCompiler, str]]:
    yield FakeSoCompiler(), "anywhere"


@asynccontextmanager
async def _real() -> AsyncIterator[tuple[SoCompiler, str]]:
    # The budget of steps is what is tested; a busy machine must not end a compile by the clock.
    limits = GrammarLimits(cpu_s=60.0, wall_s=60.0)
    config = SoCompilerConfig(listen="127.0.0.1:0", grammar=limits)
    async with running("so-compiler", config, build) as runtime:
        yield SoCompilerClient(runtime.channels), runtime.address


SIDES = pytest.mark.parametrize("side", [_fake, _real], ids=["fake", "real"])
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'


def request(**fields: object) -> pb.CompileRequest:
    defaults: dict[str, object] = {
        "type": pb.GRAMMAR_TYPE_JSON_SCHEMA,
        "source": SCHEMA,
        "strict": True,
        "tokenizer_id": "tok-1",
        "tenant": "acme",
    }
    return pb.CompileRequest(**{**defaults, **fields})  # type: ignore[arg-type]


@SIDES
async def test_compile_is_idempotent_and_fetch_returns_the_artifact(side) -> None:
    async with side() as (compiler, address):
        first = await compiler.compile(address, request())
        again = await compiler.compile(address, request())
        assert not first.cached
        assert again.cached
        assert again.compile_ms == 0
        assert first.artifact_key == again.artifact_key
        grammar = await compiler.fetch(address, first.artifact_key)
        assert len(grammar.data) == first.size_bytes
        assert grammar.backend == "llguidance"
        assert grammar.tokenizer_id == "tok-1"


@SIDES
async def test_every_input_is_part_of_the_key(side) -> None:
    async with side() as (compiler, address):
        variants = [
            request(),
            request(source=SCHEMA.replace("integer", "string")),
            request(tokenizer_id="tok-2"),
            request(tenant="globex"),
            request(strict=False),
            request(type=pb.GRAMMAR_TYPE_JSON_OBJECT, source=""),
        ]
        keys = [(await compiler.compile(address, v)).artifact_key for v in variants]
        assert len(set(keys)) == len(keys)


@SIDES
async def test_refusals_name_reason_and_path(side) -> None:
    async with side() as (compiler, address):
        for source, reason, path in (
            ('{"not":{}}', Reason.SCHEMA_UNSUPPORTED, "$.not"),
            (
                '{"type":"string","pattern":"[ab]*a[ab]{60}"}',
                Reason.GRAMMAR_BUDGET,
                "$.pattern",
            ),
        ):
            for _ in range(2):  # the second one from memory
                with pytest.raises(Failure) as caught:
                    await compiler.compile(address, request(source=source))
                assert caught.value.reason is reason
                assert caught.value.metadata["path"] == path


@SIDES
async def test_an_unknown_artifact_is_not_found(side) -> None:
    async with side() as (compiler, address):
        with pytest.raises(Failure) as caught:
            await compiler.fetch(address, "0" * 64)
        assert caught.value.reason is Reason.NOT_FOUND


@SIDES
async def test_a_type_must_be_given(side) -> None:
    async with side() as (compiler, address):
        with pytest.raises(Failure) as caught:
            await compiler.compile(address, pb.CompileRequest(source="x"))
        assert caught.value.reason is Reason.INVALID_REQUEST


@SIDES
async def test_tool_calls_need_the_token_inside_their_tags(side) -> None:
    tools = (
        '[{"type":"function","function":{"name":"f","description":null,'
        '"parameters":{"type":"object","properties":{}},"strict":true}}]'
    )
    async with side() as (compiler, address):
        wanted = request(type=pb.GRAMMAR_TYPE_TOOL_CALL, source=tools, special_ids={"Dsml": 99})
        compiled = await compiler.compile(address, wanted)
        grammar = await compiler.fetch(address, compiled.artifact_key)
        assert b"<[99]>" in grammar.data
        with pytest.raises(Failure) as caught:
            await compiler.compile(address, request(type=pb.GRAMMAR_TYPE_TOOL_CALL, source=tools))
        assert caught.value.reason is Reason.UNSUPPORTED_FEATURE
