"""The codec's service: the same cases on the embedded codec and on the real server."""

import asyncio
import json
import struct
from contextlib import asynccontextmanager

import pytest
from pelagos.recipe.v1 import recipe_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.service import running
from services.recipe import main as recipe_main
from services.recipe.client import BODY_KEY, RecipeClient
from services.recipe.config import RecipeConfig
from services.recipe.fake import FakeRecipe

FLASH = "DeepSeek-V4.1-Flash"
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@asynccontextmanager
async def real():
    config = RecipeConfig(listen="127.0.0.1:0")
    async with running("recipe", config, recipe_main.build) as runtime:
        yield RecipeClient(runtime.channels, runtime.address)


@asynccontextmanager
async def fake():
    yield FakeRecipe()


@pytest.fixture(params=["fake", "real"])
async def recipe(request):
    async with fake() if request.param == "fake" else real() as opened, asyncio.timeout(100):
        yield opened


def chat(content="Hi", **more):
    body = {"model": FLASH, "messages": [{"role": "user", "content": content}], **more}
    return pb.EncodeRequest(protocol=pb.PROTOCOL_CHAT, body=json.dumps(body).encode())


def ids(token_ids):
    return list(memoryview(token_ids).cast("I"))


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


async def test_a_request_becomes_everything_the_pipeline_needs(recipe):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    encoded = await recipe.encode(chat(tools=tools, stream=True, seed=7, max_tokens=5))
    assert ids(encoded.token_ids)[0] == 0
    assert ids(encoded.token_ids)[-2:] == [128804, 128821]
    assert (encoded.model, encoded.model_version, encoded.stream) == (FLASH, "v4.1", True)
    assert (encoded.thinking, encoded.starts_in_reasoning, encoded.has_tools) == (True,) * 3
    assert (encoded.max_tokens, encoded.seed, encoded.constraint_kind) == (5, 7, "tool_call")
    assert ids(encoded.stop_token_ids) == [1]
    assert encoded.end_of_thinking_id == 128822
    assert encoded.tokenizer_id == "deepseek-v4.1"
    assert not encoded.prompt_text
    large = await recipe.encode(chat("word " * 20_000))  # beside the event loop
    assert len(ids(large.token_ids)) > 20_000


async def test_image_placeholders_are_widened(recipe):
    blocks = [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}},
    ]
    encoded = await recipe.encode(chat(blocks))
    inline, external = encoded.images
    token_ids = ids(encoded.token_ids)
    assert (inline.width, inline.height, inline.url) == (1, 1, "")
    assert inline.data.startswith(b"\x89PNG")
    assert set(token_ids[inline.start : inline.start + inline.num_tokens]) == {129264}
    assert token_ids.count(129264) == inline.num_tokens + 1
    assert (external.num_tokens, external.url) == (0, "https://example.com/x.png")
    assert token_ids[external.start] == 129264
    request = chat(blocks)
    count = await recipe.count_tokens(
        pb.CountTokensRequest(protocol=request.protocol, body=request.body)
    )
    assert count.num_tokens == len(token_ids)
    assert count.image_tokens == inline.num_tokens + 1


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.EncodeRequest(protocol=pb.PROTOCOL_CHAT, body=b"{"), Reason.INVALID_REQUEST),
        (chat(temperature=3), Reason.INVALID_REQUEST),
        (chat("x " * 2_000, max_tokens=2_000), Reason.CONTEXT_LENGTH),
        (
            chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
            Reason.IMAGE_INVALID,
        ),
    ],
)
async def test_a_refusal_has_its_reason_and_the_apis_body(recipe, request_, reason):
    request_.context_limit = 3_000
    with pytest.raises(Failure) as refused:
        await recipe.encode(request_)
    assert refused.value.reason is reason
    body = json.loads(refused.value.metadata[BODY_KEY])
    assert body["error"]["message"] == refused.value.message


@pytest.mark.parametrize("quoted", ["m" * 20_000, "漢字" * 9_000, '"\\\n' * 30_000])
async def test_a_refusal_that_quotes_much_keeps_its_reason_and_the_apis_shape(recipe, quoted):
    request = pb.EncodeRequest(
        protocol=pb.PROTOCOL_CHAT,
        body=json.dumps({"model": quoted, "messages": [{"role": "user", "content": "x"}]}).encode(),
    )
    with pytest.raises(Failure) as refused:
        await recipe.encode(request)
    assert refused.value.reason is Reason.INVALID_REQUEST
    body = refused.value.metadata[BODY_KEY]
    error = json.loads(body)["error"]
    assert error["message"] == refused.value.message
    assert error["type"] == error["code"] == "invalid_request_error"
    assert quoted[:100] in error["message"]
    assert "characters) …" in error["message"]


async def test_ur_66_the_constraint_of_a_strict_schema_keeps_every_keyword(recipe):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 3, "minimun": 1}},
        "required": ["a"],
    }
    enforced = {**schema["properties"]["a"]}
    tool = {"name": "f", "parameters": schema, "strict": True}
    tools = await recipe.encode(chat(tools=[{"type": "function", "function": tool}]))
    (declared,) = json.loads(tools.constraint_schema)
    assert declared["function"]["parameters"]["properties"]["a"] == enforced
    json_schema = {"name": "n", "schema": schema, "strict": True}
    answer = await recipe.encode(
        chat(response_format={"type": "json_schema", "json_schema": json_schema})
    )
    assert json.loads(answer.constraint_schema)["properties"]["a"] == enforced


async def test_an_unknown_tokenizer_is_not_found(recipe):
    for call in (
        recipe.encode(pb.EncodeRequest(protocol=pb.PROTOCOL_CHAT, tokenizer="none")),
        recipe.tokenize(pb.TokenizeRequest(text="x", tokenizer="none")),
        recipe.detokenize(pb.DetokenizeRequest(tokenizer="none")),
    ):
        with pytest.raises(Failure) as refused:
            await call
        assert refused.value.reason is Reason.NOT_FOUND


async def test_text_goes_to_ids_and_back(recipe):
    text = "a</think>你"
    plain = await recipe.tokenize(pb.TokenizeRequest(text=text))
    special = await recipe.tokenize(pb.TokenizeRequest(text=text, with_special=True))
    assert 128822 not in ids(plain.token_ids)
    assert 128822 in ids(special.token_ids)
    for token_ids in (plain.token_ids, special.token_ids):
        decoded = await recipe.detokenize(pb.DetokenizeRequest(token_ids=token_ids))
        assert decoded.text == text
    with pytest.raises(Failure) as refused:
        await recipe.detokenize(pb.DetokenizeRequest(token_ids=b"abc"))
    assert refused.value.reason is Reason.INVALID_REQUEST


async def test_models_are_listed_with_their_special_ids(recipe):
    models = {model.name: model for model in await recipe.list_models()}
    assert list(models) == ["DeepSeek-V4-Pro", FLASH]
    flash = models[FLASH]
    assert (flash.version, flash.tokenizer, flash.vocab_size) == ("v4.1", "v4.1", 129_280)
    assert flash.special_ids["Dsml"] == 128825
    assert len(flash.special_ids) == 18
    assert "System" not in models["DeepSeek-V4-Pro"].special_ids


def opened(stream_id, encoded, **more):
    step = pb.ParseOpen(parse_state=encoded.parse_state, response_id=f"r{stream_id}", **more)
    return pb.ParseItem(stream_id=stream_id, open=step)


def tokens(stream_id, *token_ids):
    return pb.ParseItem(stream_id=stream_id, tokens=pb.ParseTokens(token_ids=u32(*token_ids)))


async def test_many_streams_share_a_call_and_a_failing_one_ends_alone(recipe):
    whole = await recipe.encode(chat())
    streamed = await recipe.encode(chat(stream=True, stop=["END"]))
    hello = ids((await recipe.tokenize(pb.TokenizeRequest(text="Hello"))).token_ids)
    end = ids((await recipe.tokenize(pb.TokenizeRequest(text=" END tail"))).token_ids)
    ready = pb.ParseReady(prompt_tokens=9, cached_tokens=4)
    async with recipe.parse() as parsing:
        results = await parsing.step(
            [
                opened(1, whole),
                opened(2, streamed),
                pb.ParseItem(stream_id=3, open=pb.ParseOpen(parse_state=b"no")),
                pb.ParseItem(stream_id=1, ready=ready),
                pb.ParseItem(stream_id=2, ready=ready),
                tokens(1, *hello),
                tokens(2, 128822, *hello),
                tokens(4, *hello),
            ]
        )
        by_id = {result.stream_id: result for result in results}
        assert by_id[3].done
        assert by_id[3].error
        assert not by_id[2].done
        assert b'"content":"Hello"' in by_id[2].sse
        results = await parsing.step(
            [
                tokens(1, 128822),
                tokens(2, *end),
                tokens(2, *end),
                tokens(1, *hello),
                pb.ParseItem(stream_id=1, finish=pb.PARSE_FINISH_LENGTH),
            ]
        )
        by_id = {result.stream_id: result for result in results}
        assert sorted(by_id) == [1, 2]
        assert (by_id[2].done, by_id[2].stopped, by_id[2].error) == (True, True, "")
        assert by_id[2].sse.endswith(b"data: [DONE]\n\n")
        assert by_id[2].folded == b""
        response = json.loads(by_id[1].folded)
        message = response["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hello", "Hello")
        assert response["usage"]["prompt_cache_hit_tokens"] == 4
        assert response["choices"][0]["finish_reason"] == "length"
        assert by_id[1].completion_tokens == 2 * len(hello) + 1
        assert not by_id[1].stopped


async def test_a_stream_ends_by_failure_by_discarding_and_without_a_reason(recipe):
    encoded = await recipe.encode(chat(stream=True))
    async with recipe.parse() as parsing:
        fail = pb.ParseFail(reason="BACKEND_LOST", message="gone", request_id="q")
        results = await parsing.step(
            [
                opened(1, encoded),
                opened(2, encoded),
                opened(3, encoded),
                tokens(1, 300),
                tokens(2, 300),
                tokens(3, 300),
                pb.ParseItem(stream_id=1, fail=fail),
                pb.ParseItem(stream_id=2, discard=True),
                pb.ParseItem(stream_id=3, finish=pb.PARSE_FINISH_UNSPECIFIED),
            ]
        )
        by_id = {result.stream_id: result for result in results}
        assert sorted(by_id) == [1, 3]
        assert b'"request_id":"q"' in by_id[1].sse
        assert by_id[1].done
        assert by_id[3].done
        assert b'"finish_reason":"stop"' in by_id[3].sse


async def test_logprobs_travel_to_the_events(recipe):
    encoded = await recipe.encode(
        chat(stream=True, logprobs=True, top_logprobs=1, thinking={"type": "disabled"})
    )
    hello = ids((await recipe.tokenize(pb.TokenizeRequest(text="Hello"))).token_ids)
    top = [pb.TopLogprobs(token_ids=u32(hello[0]), logprobs=struct.pack("<f", -0.5))] * len(hello)
    step = pb.ParseTokens(
        token_ids=u32(*hello),
        logprobs=struct.pack(f"<{len(hello)}f", *[-0.5] * len(hello)),
        top=top,
    )
    async with recipe.parse() as parsing:
        results = await parsing.step([opened(1, encoded), pb.ParseItem(stream_id=1, tokens=step)])
    (result,) = results
    assert b'"logprob":-0.5' in result.sse
    assert b'"top_logprobs":[{' in result.sse


async def test_a_message_with_nothing_to_say_is_answered_too(recipe):
    encoded = await recipe.encode(chat(stream=True))
    async with recipe.parse() as parsing, asyncio.timeout(20):
        assert await parsing.step([]) == []
        assert await parsing.step([tokens(5, 300), pb.ParseItem(stream_id=5, discard=True)]) == []
        assert await parsing.step([opened(1, encoded)]) == []
        (result,) = await parsing.step([tokens(1, 128822, 2000)])
        assert result.sse


async def test_what_would_not_fit_an_answer_is_refused_before_it_is_made(recipe):
    for call in (
        recipe.tokenize(pb.TokenizeRequest(text="é" * (16 << 20) + "x")),
        recipe.detokenize(pb.DetokenizeRequest(token_ids=b"\1\0\0\0" * 1_000_001)),
    ):
        with pytest.raises(Failure) as refused:
            await call
        assert refused.value.reason is Reason.BODY_TOO_LARGE
    for name in ("n" * 100_000, "\0", "\n" * 20_000):
        with pytest.raises(Failure) as refused:
            await recipe.tokenize(pb.TokenizeRequest(text="x", tokenizer=name))
        assert refused.value.reason is Reason.NOT_FOUND


async def test_a_call_that_is_left_frees_its_streams_and_the_next_works():
    async with running("recipe", RecipeConfig(listen="127.0.0.1:0"), recipe_main.build) as runtime:
        recipe = RecipeClient(runtime.channels, runtime.address)
        encoded = await recipe.encode(chat(stream=True))
        encoding = asyncio.create_task(recipe.encode(chat("word " * 400_000)))
        async with recipe.parse() as parsing:
            await parsing.step([opened(number, encoded) for number in range(50)])
            assert runtime.census.snapshot()["recipe"]["streams"] == 50
        encoding.cancel()
        for _ in range(1_000):
            if not runtime.census.snapshot()["recipe"]["streams"]:
                break
            await asyncio.sleep(0.01)
        assert runtime.census.snapshot()["recipe"]["streams"] == 0
        assert (await recipe.encode(chat())).token_ids
