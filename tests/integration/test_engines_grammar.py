"""Constrained output through prefill, decode and moves, with the real compiler."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import jsonschema
from pelagos.engine.v1 import records_pb2 as pb
from pelagos.so_compiler.v1 import so_compiler_pb2

from services.common.service import RuntimeConfig, running
from services.engine.grammar import _tokenizer
from services.so_compiler.client import SoCompilerClient
from services.so_compiler.config import SoCompilerConfig
from services.so_compiler.main import build as build_so_compiler
from tests.integration.engine_kit import (
    Cluster,
    ask,
    cluster,
    move_while_running,
    nothing_held,
    prompt_ids,
    spec,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@asynccontextmanager
async def with_compiler(found: Cluster):
    """A real compiler beside the engines; yields how to compile a schema."""
    config = SoCompilerConfig(
        listen="127.0.0.1:0", num_workers=1, runtime=RuntimeConfig(uvloop=False)
    )
    async with running("so-compiler", config, build_so_compiler, store=found.store) as runtime:

        async def compile_schema(schema) -> pb.GrammarRef:
            answer = await SoCompilerClient(found.channels).compile(
                runtime.address,
                so_compiler_pb2.CompileRequest(
                    type=so_compiler_pb2.GRAMMAR_TYPE_JSON_SCHEMA,
                    source=json.dumps(schema),
                    tokenizer_id=found.prefill_config.model.vocabulary_id,
                ),
            )
            return pb.GrammarRef(artifact_key=answer.artifact_key, address=runtime.address)

        yield compile_schema


def text_of(found: Cluster, token_ids: list[int]) -> str:
    library = found.prefill_config.model.grammar_library()
    return str(_tokenizer(library.path, library.vocab_size, 1).decode_str(token_ids))


async def test_t16_constrained_output_parses_with_drafts_on_and_the_same_without(tmp_path):
    texts = []
    for dspark in ("variable", "none"):
        async with (
            cluster(tmp_path, sim={"stop_every": 6}, decode={"dspark": dspark}) as found,
            with_compiler(found) as compile_schema,
        ):
            request = spec("r", prompt_ids(40), max_tokens=600)
            request.grammar.CopyFrom(await compile_schema(SCHEMA))
            answer = await ask(found, request)
            assert answer.event.finished.reason == pb.FINISH_REASON_STOP, answer.event
            texts.append(text_of(found, answer.token_ids))
            await nothing_held(found)
    document = json.loads(texts[0])
    jsonschema.validate(document, SCHEMA)
    assert texts[0] == texts[1]


async def test_ur_68_a_thinking_answer_is_free_and_then_constrained(tmp_path):
    async with (
        cluster(tmp_path, sim={"stop_every": 6}) as found,
        with_compiler(found) as compile_schema,
    ):
        prompt = prompt_ids(40)
        prompt.extend([128804, 128821])  # the assistant's turn begins with a thought
        request = spec("r", prompt, max_tokens=600)
        request.sampling.end_of_thinking_id = 128822
        request.sampling.starts_in_reasoning = True
        request.grammar.CopyFrom(await compile_schema(SCHEMA))
        request.grammar.trigger_token_ids = (128822).to_bytes(4, "little")
        answer = await ask(found, request)
        end = answer.token_ids.index(128822)
        assert end == 8
        jsonschema.validate(json.loads(text_of(found, answer.token_ids[end + 1 :])), SCHEMA)
        assert answer.event.finished.usage.reasoning_tokens == 9


async def test_ur_69_a_matcher_that_breaks_ends_its_request_alone(tmp_path):
    async with (
        cluster(tmp_path, sim={"stop_every": 6}) as found,
        with_compiler(found) as compile_schema,
    ):
        request = spec("r", prompt_ids(40), max_tokens=600)
        request.grammar.CopyFrom(await compile_schema(SCHEMA))
        decode = found.decodes[0].core
        original = decode.constraint_of

        async def broken(record):
            constraint = await original(record)
            if constraint is not None:
                constraint._matcher = None  # any call on it fails
            return constraint

        decode.constraint_of = broken
        free, bad = await asyncio.gather(
            ask(found, spec("free", prompt_ids(30))), ask(found, request)
        )
        assert bad.event.finished.reason == pb.FINISH_REASON_GRAMMAR_ERROR
        assert free.end == "finished"
        await nothing_held(found)


async def test_5_5_a_moved_request_keeps_its_constraint(tmp_path):
    async with (
        cluster(tmp_path, decodes=2, sim={"stop_every": 6}) as found,
        with_compiler(found) as compile_schema,
    ):
        many = {"type": "array", "items": {"type": "boolean"}, "minItems": 90, "maxItems": 90}
        grammar = await compile_schema(many)

        def request(name):
            made = spec(name, prompt_ids(40), max_tokens=600)
            made.grammar.CopyFrom(grammar)
            return made

        reference = await ask(found, request("ref"))
        await nothing_held(found)
        answer = await move_while_running(found, request("r"))
        assert answer.token_ids == reference.token_ids
        assert len(json.loads(text_of(found, answer.token_ids))) == 90
