"""Single RPCs of the path, called directly at idle services: what each costs alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from grpc_health.v1 import health_pb2, health_pb2_grpc
from pelagos.engine.v1 import engine_control_pb2, engine_control_pb2_grpc
from pelagos.kvstore.v1 import check_pb2
from pelagos.recipe.v1 import recipe_pb2 as recipe

from deploy.local.stack import Stack
from services.common.rpc_client import Channels, call
from services.decode.client import DecodeClient
from services.engine.requests import RequestKey
from services.entrypoint.catalog import Profile, profile_of
from services.kvstore.client import CheckClient
from services.lb.decode.client import DecodeLbClient, PickRequest
from services.recipe.client import RecipeClient
from tests.bench.load_client import LoadConfig, body_of, prompts

NUM_STREAMS = 64  # of the batched Parse
_WARM = 3


async def measure(stack: Stack, config: LoadConfig, num_calls: int) -> dict[str, list[float]]:
    """Returns the times of each call, ms, one after the other; none overlap."""
    channels = Channels()
    try:
        return await _measure(stack, channels, config, num_calls)
    finally:
        await channels.close()


async def _measure(
    stack: Stack, channels: Channels, config: LoadConfig, num_calls: int
) -> dict[str, list[float]]:
    codec = RecipeClient(channels, stack["recipe"].address)
    check = CheckClient(channels, stack["check"].address)
    ranks = DecodeLbClient(channels, lambda: stack["decode-lb"].address)
    decode_address = stack.of("decode")[0].address
    decode = DecodeClient(channels)
    health = health_pb2_grpc.HealthStub(channels.get(stack["recipe"].address))
    profile = await _profile(channels, decode_address)
    body = body_of(config, next(prompts(config)))
    request = recipe.EncodeRequest(protocol=recipe.PROTOCOL_CHAT, body=body)
    encoded = await codec.encode(request)
    num_tokens = len(encoded.token_ids) // 4
    found: dict[str, list[float]] = {}

    async def series(name: str, one: Callable[[int], Awaitable[float]]) -> None:
        times = [await one(index) for index in range(_WARM + num_calls)]
        found[name] = times[_WARM:]

    async def nothing(index: int) -> float:
        return await _timed(call(health.Check, health_pb2.HealthCheckRequest(), timeout_s=5))

    async def encode(index: int) -> float:
        return await _timed(codec.encode(request))

    async def match(index: int) -> float:
        message = _match_request(encoded.token_ids, profile, f"bench-match-{index}")
        return await _timed(check.match(message, timeout_s=5))

    async def pick(index: int) -> float:
        request_id = f"bench-pick-{time.time_ns()}-{index}"
        started_s = time.perf_counter()
        picked = await ranks.pick(PickRequest(request_id, num_tokens + config.max_tokens))
        took_ms = 1e3 * (time.perf_counter() - started_s)
        await ranks.return_rank(request_id, 0, picked.instance_id)
        return took_ms

    async def reserve(index: int) -> float:
        key = RequestKey(f"bench-reserve-{time.time_ns()}-{index}", attempt=1)
        started_s = time.perf_counter()
        held = await decode.reserve(
            decode_address,
            key,
            num_tokens=num_tokens,
            expected_output=config.max_tokens,
            layout_signature=profile.layout_signature,
        )
        took_ms = 1e3 * (time.perf_counter() - started_s)
        await decode.release(decode_address, held.reservation_id)
        return took_ms

    await series("an RPC that does nothing", nothing)
    await series("recipe.Encode", encode)
    await series("CHECK.Match", match)
    await series("decode-lb.PickRank", pick)
    await series("decode.Reserve", reserve)
    for num_streams in (1, NUM_STREAMS):
        times = await _parse(codec, encoded, num_streams, _WARM + num_calls)
        streams = "1 stream" if num_streams == 1 else f"{num_streams} streams"
        found[f"recipe.Parse, a step of {streams}"] = times[_WARM:]
    return found


async def _parse(
    codec: RecipeClient, encoded: recipe.EncodeResponse, num_streams: int, num_steps: int
) -> list[float]:
    """Returns what each batch took that carries one token of every stream."""
    ids = memoryview(encoded.token_ids)
    first = len(ids) // 8 // 4 * 4  # a word of the prompt's middle, whatever surrounds the text
    times = []
    async with codec.parse() as parsing:
        items = []
        for stream_id in range(1, num_streams + 1):
            opened = recipe.ParseOpen(
                parse_state=encoded.parse_state,
                response_id=f"bench-{stream_id}",
                model_version=encoded.model_version,
            )
            ready = recipe.ParseReady(prompt_tokens=len(ids) // 4)
            items.append(recipe.ParseItem(stream_id=stream_id, open=opened))
            items.append(recipe.ParseItem(stream_id=stream_id, ready=ready))
        for step in range(num_steps):
            at = first + 4 * (step % (len(ids) // 16))
            tokens = recipe.ParseTokens(token_ids=bytes(ids[at : at + 4]))
            items += [
                recipe.ParseItem(stream_id=stream_id, tokens=tokens)
                for stream_id in range(1, num_streams + 1)
            ]
            started_s = time.perf_counter()
            async with asyncio.timeout(10):
                await parsing.step(items)
            times.append(1e3 * (time.perf_counter() - started_s))
            items = []
    return times


async def _profile(channels: Channels, address: str) -> Profile:
    stub = engine_control_pb2_grpc.EngineControlServiceStub(channels.get(address))
    return profile_of(await call(stub.Describe, engine_control_pb2.DescribeRequest(), timeout_s=5))


def _match_request(token_ids: bytes, profile: Profile, request_id: str) -> check_pb2.MatchRequest:
    return check_pb2.MatchRequest(
        token_ids=token_ids,
        model_id=profile.cache_model_id,
        layout_fingerprint=profile.layout_digest,
        tenant="default",
        scope="tenant",
        request_id=request_id,
        block_tokens=profile.block_tokens,
        ring_tokens=profile.ring_tokens,
    )


async def _timed(work: Awaitable[object]) -> float:
    started_s = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - started_s)
