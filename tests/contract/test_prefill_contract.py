"""PrefillService: the same cases on the fake and on the real server."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from pelagos.common.v1 import errors_pb2
from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.service import RuntimeConfig, running
from services.common.store_memory import MemoryStore
from services.decode.config import DecodeConfig
from services.decode.engine import DecodeEngine
from services.decode.fake import FakeDecode
from services.decode.main import build_engine as build_decode
from services.engine.requests import RequestKey
from services.engine.streams import StreamLimits
from services.lb.decode.config import DecodeLbConfig
from services.lb.decode.main import build as build_decode_lb
from services.prefill.client import PrefillClient
from services.prefill.config import PrefillConfig
from services.prefill.engine import PrefillEngine
from services.prefill.fake import FakePrefill
from services.prefill.main import build_engine as build_prefill
from tests.contract.engine_parts import prefilled, prompt_ids, quick_model, spec

MODEL = quick_model()
RUNTIME = RuntimeConfig(uvloop=False)
LIMITS = StreamLimits(wait_unknown_s=0.3)
DECODE = DecodeConfig(num_blocks=160, model=MODEL, streams=LIMITS, runtime=RUNTIME)
PREFILL = PrefillConfig(
    num_blocks=200, num_state_slots=20, max_waiting=8, model=MODEL, streams=LIMITS, runtime=RUNTIME
)


@dataclass
class Subject:
    """A prefill engine to test, by its client, with a decode engine behind it."""

    client: Any
    address: str
    engine: PrefillEngine
    decode: DecodeEngine

    async def events(self, request: pb.RequestSpec) -> list[pb.RequestEvent]:
        async with self.client.run(self.address, request) as events:
            return [event async for event in events]

    async def idle(self) -> None:
        """Waits until nothing is held any more: the end of every test (T9)."""
        for key in list(self.decode._sequences.values()):
            self.decode.abort(key[1].key)
        for _ in range(2000):
            left = (
                self.engine.num_requests,
                self.engine.num_blocks_used,
                self.engine.num_slots_used,
                self.engine.ledger.total_ns,
                self.decode.num_blocks_used,
                self.decode.num_held,
            )
            if not any(left):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"requests, blocks, slots, ns, decode blocks, leases: {left}")


@pytest.fixture(params=["fake", "real"])
async def subject(request) -> AsyncIterator[Subject]:
    async with AsyncExitStack() as stack:
        if request.param == "fake":
            decode = await stack.enter_async_context(FakeDecode(DECODE))
            fake = await stack.enter_async_context(FakePrefill(decode, PREFILL))
            found = Subject(fake, "", fake.engine, decode.engine)
        else:
            store, cores = MemoryStore(), {}

            async def decode_core(runtime: Any) -> None:
                cores["decode"] = await build_decode(runtime)

            async def prefill_core(runtime: Any) -> None:
                cores["prefill"] = await build_prefill(runtime)

            lb = await stack.enter_async_context(
                running("decode-lb", DecodeLbConfig(runtime=RUNTIME), build_decode_lb, store=store)
            )
            await lb.view.wait_for(lambda view: view.leader("decode-lb") is not None)
            await stack.enter_async_context(running("decode", DECODE, decode_core, store=store))
            runtime = await stack.enter_async_context(
                running("prefill", PREFILL, prefill_core, store=store)
            )
            client = PrefillClient(runtime.channels)
            found = Subject(client, runtime.address, cores["prefill"], cores["decode"])
        yield found
        await found.idle()


def ids(data: bytes) -> list[int]:
    found = array("I")
    found.frombytes(data)
    return list(found)


async def test_a_prompt_gives_its_first_token_and_moves_on(subject):
    request = spec("r", prompt_ids(50))
    events = await subject.events(request)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-2:] == ["tokens", "moved"]
    assert set(kinds[1:-2]) == {"progress"}
    reference = await prefilled(spec("r", prompt_ids(50)), MODEL)
    assert events[-2].tokens.token_ids == reference.record.output_tokens
    assert events[-2].tokens.first_index == 0
    assert events[-2].usage.prompt_tokens == 50
    moved = events[-1].moved
    assert (moved.next_index, moved.epoch) == (1, 1)
    assert subject.decode.num_running + subject.decode.num_held <= 1


async def test_a_prompt_that_ends_with_its_first_token_finishes_here(subject):
    events = await subject.events(spec("r", prompt_ids(50), max_tokens=1))
    assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
    assert subject.decode.num_running == subject.decode.num_held == 0


async def test_resumed_output_counts_and_is_not_said_again(subject):
    request = spec("r", prompt_ids(50), max_tokens=8, attempt=1)
    request.num_resumed_tokens = 5
    events = await subject.events(request)
    tokens = next(event for event in events if event.HasField("tokens"))
    assert tokens.tokens.first_index == 5
    assert (tokens.usage.prompt_tokens, tokens.usage.output_tokens) == (45, 6)
    assert events[-1].moved.next_index == 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_tokens": b""}, Reason.INVALID_REQUEST),
        ({"prompt_tokens": b"12345"}, Reason.INVALID_REQUEST),
        ({"prompt_tokens": b"\xff\xff\xff\x00"}, Reason.INVALID_REQUEST),
        ({"prompt_tokens": prompt_ids(2100).tobytes()}, Reason.CONTEXT_LENGTH),
        ({"num_resumed_tokens": 50}, Reason.INVALID_REQUEST),
        ({"deadline_unix_ms": 1}, Reason.DEADLINE),
    ],
)
async def test_what_cannot_be_served_is_refused_at_intake(subject, change, reason):
    request = spec("r", prompt_ids(50))
    for name, value in change.items():
        setattr(request, name, value)
    with pytest.raises(Failure) as failure:
        await subject.events(request)
    assert failure.value.reason is reason
    assert subject.engine.num_requests == 0


async def test_image_tokens_belong_into_image_spans(subject):
    image_id = MODEL.image_token_id
    outside = prompt_ids(20)
    outside[3] = image_id
    with pytest.raises(Failure) as failure:
        await subject.events(spec("r", outside))
    assert failure.value.reason is Reason.INVALID_REQUEST
    wrong_span = spec("r", prompt_ids(20))
    wrong_span.media.add(start=3, num_tokens=4, width=42, height=42, digest=bytes(32))
    with pytest.raises(Failure) as failure:
        await subject.events(wrong_span)
    assert failure.value.reason is Reason.INVALID_REQUEST


async def test_an_image_without_an_encoder_fails_its_request_alone(subject):
    prompt = prompt_ids(20)
    for position in range(3, 7):
        prompt[position] = MODEL.image_token_id
    request = spec("r", prompt)
    request.media.add(start=3, num_tokens=4, width=42, height=42, digest=bytes(32))
    text, image = await asyncio.gather(
        subject.events(spec("text", prompt_ids(40))), subject.events(request)
    )
    assert image[-1].failed.reason == errors_pb2.REASON_NO_INSTANCE
    assert image[-1].failed.retryable
    assert text[-1].HasField("moved")


async def test_a_grammar_that_cannot_be_fetched_fails_its_request_alone(subject):
    request = spec("r", prompt_ids(20))
    request.grammar.artifact_key = "missing"
    events = await subject.events(request)
    assert events[-1].failed.reason == errors_pb2.REASON_NO_INSTANCE


async def test_a_full_queue_refuses_and_says_when_to_come_back(subject):
    subject.engine.config.__dict__["max_waiting"] = 0
    try:
        with pytest.raises(Failure) as failure:
            await subject.events(spec("r", prompt_ids(20)))
    finally:
        subject.engine.config.__dict__["max_waiting"] = 8
    assert failure.value.reason is Reason.ENGINE_FULL
    assert failure.value.retry_after_s > 0


async def test_a_reader_may_come_before_its_request(subject):
    async with (
        subject.client.attach(subject.address, "e") as channel,
        channel.subscribe(RequestKey("r")) as stream,
    ):
        subject.engine.submit(spec("r", prompt_ids(50)))
        kinds = [event.WhichOneof("event") async for event in stream]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "moved"


async def test_one_channel_follows_many_requests(subject):
    async with subject.client.attach(subject.address, "e") as channel:

        async def follow(number):
            async with channel.subscribe(RequestKey(f"r{number}")) as stream:
                return [event.WhichOneof("event") async for event in stream]

        tasks = [asyncio.create_task(follow(number)) for number in range(6)]
        for number in range(6):
            subject.engine.submit(spec(f"r{number}", prompt_ids(30 + number, seed=number)))
        ends = [kinds[-1] for kinds in await asyncio.gather(*tasks)]
    assert ends == ["moved"] * 6


async def test_a_second_run_of_one_attempt_conflicts(subject):
    await subject.events(spec("r", prompt_ids(50)))
    with pytest.raises(Failure) as failure:
        await subject.events(spec("r", prompt_ids(50)))
    assert failure.value.reason is Reason.CONFLICT
    assert (await subject.events(spec("r", prompt_ids(50), attempt=1)))[-1].HasField("moved")


async def test_an_abort_is_safe_and_idempotent(subject):
    assert not await subject.client.abort(subject.address, RequestKey("r"))
    subject.engine.submit(spec("r", prompt_ids(1500)))
    assert await subject.client.abort(subject.address, RequestKey("r"))
    assert not await subject.client.abort(subject.address, RequestKey("r"))
    async with (
        subject.client.attach(subject.address, "e") as channel,
        channel.subscribe(RequestKey("r")) as stream,
    ):
        events = [event async for event in stream]
    assert events[-1].finished.reason == pb.FINISH_REASON_ABORT


async def test_a_prompt_that_decode_can_never_hold_fails_with_that_reason(subject):
    # 1900 + 140 tokens fit the model; decode's 159 blocks of 16 hold them, 60 do not.
    subject.decode.ranks[0].blocks.num_blocks = 60
    try:
        events = await subject.events(spec("r", prompt_ids(900), max_tokens=500))
    finally:
        subject.decode.ranks[0].blocks.num_blocks = 160
    assert events[-1].failed.reason == errors_pb2.REASON_NOT_FITTING
    assert not events[-1].failed.retryable
