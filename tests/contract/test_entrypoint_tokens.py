"""The contract of pelagos.entrypoint.v1, on the fake and on the real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from pelagos.engine.v1 import records_pb2 as records
from pelagos.entrypoint.v1 import entrypoint_pb2 as pb

from services.common.errors import Failure, Reason
from services.entrypoint import fake
from services.entrypoint.auth import Identity, StoredKey, digest_key, format_keys, parse_keys
from services.entrypoint.client import Entrypoint, EntrypointClient
from services.entrypoint.tests.stack import MODEL, running_stack

Side = Callable[[Path], AbstractAsyncContextManager[tuple[Entrypoint, Entrypoint, Entrypoint, str]]]


@asynccontextmanager
async def _fake(
    folder: Path,
) -> AsyncIterator[tuple[Entrypoint, Entrypoint, Entrypoint, str]]:
    service = fake.FakeService()
    yield (
        fake.FakeEntrypoint(service, "key-a"),
        fake.FakeEntrypoint(service, "key-b"),
        fake.FakeEntrypoint(service, "wrong"),
        fake.MODEL,
    )


@asynccontextmanager
async def _real(
    folder: Path,
) -> AsyncIterator[tuple[Entrypoint, Entrypoint, Entrypoint, str]]:
    async with running_stack(folder) as stack:
        keys = folder / "keys"
        pepper = (keys / "pepper").read_bytes()
        second = StoredKey(Identity("second", "tenant-b"), digest_key(pepper, "key-b"))
        stored = parse_keys((keys / "keys.json").read_text())
        (keys / "keys.json").write_text(format_keys([*stored, second]))
        stack.parts.keys.reload()
        channels, address = stack.runtime.channels, stack.runtime.address
        yield (
            EntrypointClient(channels, address, stack.key),
            EntrypointClient(channels, address, "key-b"),
            EntrypointClient(channels, address, "wrong"),
            MODEL,
        )


SIDES = pytest.mark.parametrize("side", [_fake, _real], ids=["fake", "real"])


def request(default_model: str, **fields: object) -> pb.GenerateRequest:
    defaults: dict[str, object] = {
        "model": default_model,
        "prompt_tokens": b"".join(i.to_bytes(4, "little") for i in (7, 8, 9)),
        "sampling": records.Sampling(temperature=1.0, top_p=1.0, max_tokens=5),
    }
    return pb.GenerateRequest(**{**defaults, **fields})  # type: ignore[arg-type]


async def collect(client: Entrypoint, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with client.generate(message, timeout_s=30) as output:
        return [event async for event in output]


@SIDES
async def test_tokens_come_in_order_and_then_one_end(side: Side, tmp_path: Path) -> None:
    async with side(tmp_path) as (client, _, _, model):
        events = await collect(client, request(model, request_id="mine"))
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[-1] == "finished"
        assert set(kinds[:-1]) == {"tokens"}
        index = 0
        for event in events[:-1]:
            assert event.tokens.first_index == index
            index += len(event.tokens.token_ids) // 4
        assert index == 5
        assert events[-1].finished.reason == records.FINISH_REASON_LENGTH
        assert events[-1].usage.prompt_tokens == 3
        assert events[-1].usage.output_tokens == 5
        assert events[0].HasField("usage")
        assert {event.request_id for event in events} == {"mine"}


@SIDES
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "nobody's"}, Reason.NOT_FOUND),
        ({"prompt_tokens": b""}, Reason.INVALID_REQUEST),
        ({"prompt_tokens": b"123"}, Reason.INVALID_REQUEST),
        ({"prompt_tokens": b"1234" * 100_000}, Reason.CONTEXT_LENGTH),
        ({"sampling": records.Sampling(max_tokens=0)}, Reason.INVALID_REQUEST),
        ({"sampling": records.Sampling(max_tokens=1, temperature=9)}, Reason.INVALID_REQUEST),
        (
            {"sampling": records.Sampling(max_tokens=1, temperature=float("nan"))},
            Reason.INVALID_REQUEST,
        ),
        ({"sampling": records.Sampling(max_tokens=1, top_logprobs=3)}, Reason.INVALID_REQUEST),
        ({"constraint_type": "xml"}, Reason.INVALID_REQUEST),
        ({"request_id": "has blanks"}, Reason.INVALID_REQUEST),
        ({"cache_salt": "x" * 257}, Reason.INVALID_REQUEST),
    ],
)
async def test_bad_requests_fail_before_the_first_message(
    side: Side, tmp_path: Path, fields: dict[str, object], reason: Reason
) -> None:
    async with side(tmp_path) as (client, _, _, model):
        with pytest.raises(Failure) as caught:
            await collect(client, request(model, **fields))
        assert caught.value.reason is reason


@SIDES
async def test_s_01_every_rpc_needs_a_key(side: Side, tmp_path: Path) -> None:
    async with side(tmp_path) as (_, _, stranger, model):
        for attempt in (
            collect(stranger, request(model)),
            stranger.models(),
            stranger.explain("mine"),
        ):
            with pytest.raises(Failure) as caught:
                await attempt
            assert caught.value.reason is Reason.UNAUTHENTICATED


@SIDES
async def test_s_02_a_request_is_explained_to_its_own_tenant(side: Side, tmp_path: Path) -> None:
    async with side(tmp_path) as (client, other, _, model):
        await collect(client, request(model, request_id="mine"))
        explained = await client.explain("mine")
        assert explained.outcome == "ok"
        assert explained.prompt_tokens == 3
        assert explained.attempts == 1
        assert explained.ended_by == "absent"
        for caller, request_id in ((other, "mine"), (client, "none")):
            with pytest.raises(Failure) as caught:
                await caller.explain(request_id)
            assert caught.value.reason is Reason.NOT_FOUND


@SIDES
async def test_models_are_listed(side: Side, tmp_path: Path) -> None:
    async with side(tmp_path) as (client, _, _, model):
        models = await client.models()
        assert [m.id for m in models] == [model]
        assert models[0].context_length == 100_000


@SIDES
async def test_p_06_leaving_early_is_a_cancelled_request(side: Side, tmp_path: Path) -> None:
    async with side(tmp_path) as (client, _, _, model):
        wanted = request(
            model,
            request_id="left",
            sampling=records.Sampling(temperature=1.0, top_p=1.0, max_tokens=100_000),
        )
        async with client.generate(wanted, timeout_s=30) as output:
            async for event in output:
                assert event.WhichOneof("event") == "tokens"
                break

        outcome = ""
        async with asyncio.timeout(20):
            while not outcome:
                outcome = (await client.explain("left")).outcome
        assert outcome == "client_cancel"
