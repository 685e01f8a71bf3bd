"""DecodeService and KvTransferService: the same cases on the fake and on the real server."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from pelagos.common.v1 import errors_pb2
from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.service import RuntimeConfig, running
from services.decode.client import DecodeClient, Reservation
from services.decode.config import DecodeConfig
from services.decode.engine import DecodeEngine
from services.decode.fake import FakeDecode
from services.decode.main import build_engine
from services.engine.records import key_from_proto
from services.engine.requests import RequestKey
from services.engine.streams import StreamLimits
from services.engine.transfer_client import Outgoing
from tests.contract.engine_parts import Prefilled, prefilled, prompt_ids, quick_model, spec

MODEL = quick_model()
CONFIG = DecodeConfig(
    num_blocks=64,
    max_seqs=4,
    model=MODEL,
    streams=StreamLimits(wait_unknown_s=0.3),
    runtime=RuntimeConfig(uvloop=False),
)


@dataclass
class Subject:
    """A decode engine to test, by its client; `engine` is for looking at what is held."""

    client: Any
    address: str
    engine: DecodeEngine

    async def reserve(self, key: RequestKey, num_tokens: int = 40, **change: Any) -> Reservation:
        fields = {
            "num_tokens": num_tokens,
            "expected_output": 20,
            "layout_signature": self.engine.layout.signature,
        } | change
        return await self.client.reserve(self.address, key, **fields)

    async def deliver(self, sequence: Prefilled) -> tuple[Reservation, str]:
        key = key_from_proto(sequence.record.key)
        held = await self.reserve(key, sequence.num_tokens)
        transfer_id = await self.push(sequence, held)
        return held, transfer_id

    async def push(self, sequence: Prefilled, held: Reservation, pieces: Any = None) -> str:
        return await self.client.push(
            self.address,
            key_from_proto(sequence.record.key),
            held.reservation_id,
            self.engine.layout.signature,
            sequence.num_tokens,
            sequence.pieces if pieces is None else pieces,
        )

    async def start(self, sequence: Prefilled) -> RequestKey:
        held, transfer_id = await self.deliver(sequence)
        await self.client.run(self.address, held.reservation_id, sequence.record, transfer_id)
        return key_from_proto(sequence.record.key)

    async def idle(self) -> None:
        """Waits until nothing is held any more: the end of every test (T9)."""
        engine = self.engine
        for _ in range(2000):
            left = (
                engine.num_blocks_used,
                engine.num_slots_used,
                engine.num_held,
                engine.num_running,
                len(engine.transfers),
                sum(rank.blocks.num_quarantined for rank in engine.ranks),
            )
            if not any(left):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"blocks, slots, leases, requests, transfers, quarantine: {left}")


@pytest.fixture(params=["fake", "real"])
async def subject(request) -> AsyncIterator[Subject]:
    if request.param == "fake":
        async with FakeDecode(CONFIG) as fake:
            found = Subject(fake, "", fake.engine)
            yield found
            await found.idle()
        return
    engines: list[DecodeEngine] = []

    async def build(runtime: Any) -> None:
        engines.append(await build_engine(runtime))

    async with running("decode", CONFIG, build) as runtime:
        found = Subject(DecodeClient(runtime.channels), runtime.address, engines[0])
        yield found
        await found.idle()


async def sequence(request_id: str = "r", num: int = 50, **change: Any) -> Prefilled:
    return await prefilled(spec(request_id, prompt_ids(num), **change), MODEL)


def ids(data: bytes) -> list[int]:
    found = array("I")
    found.frombytes(data)
    return list(found)


async def test_a_delivered_sequence_decodes_to_its_end(subject):
    given = await sequence()
    held, transfer_id = await subject.deliver(given)
    said, kinds = [], []
    async with subject.client.follow(
        subject.address, held.reservation_id, given.record, transfer_id
    ) as events:
        async for event in events:
            kinds.append(event.WhichOneof("event"))
            if event.HasField("tokens"):
                assert event.tokens.first_index == 1 + len(said)
                said += ids(event.tokens.token_ids)
            last = event
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert last.finished.reason == pb.FINISH_REASON_LENGTH
    assert last.finished.usage.output_tokens == 20
    assert said == await given.continued(19)


async def test_a_reader_that_comes_later_gets_every_token_from_its_index(subject):
    given = await sequence()
    key = await subject.start(given)
    async with (
        subject.client.attach(subject.address, "e") as channel,
        channel.subscribe(key, 0) as stream,
    ):
        events = [event async for event in stream]
    said = [i for e in events if e.HasField("tokens") for i in ids(e.tokens.token_ids)]
    assert said == [*ids(given.record.output_tokens), *await given.continued(19)]
    assert {event.epoch for event in events} == {key.epoch}


async def test_reserving_twice_holds_once(subject):
    first = await subject.reserve(RequestKey("r", 0, 1))
    second = await subject.reserve(RequestKey("r", 0, 1))
    assert first.reservation_id == second.reservation_id
    assert subject.engine.num_held == 1
    assert first.blocks_held == 4  # 40 tokens, 5 drafts, 6 back: 51 positions of 16
    assert await subject.client.release(subject.address, first.reservation_id)
    assert not await subject.client.release(subject.address, first.reservation_id)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout_signature": "other"}, Reason.LAYOUT_MISMATCH),
        ({"expected_output": 1500}, Reason.NOT_FITTING),
        ({"num_tokens": 1020}, Reason.NOT_FITTING),
        ({"rank": 3}, Reason.INVALID_REQUEST),
    ],
)
async def test_what_can_never_be_held_is_refused_with_its_reason(subject, change, reason):
    with pytest.raises(Failure) as failure:
        await subject.reserve(RequestKey("r"), **change)
    assert failure.value.reason is reason


async def test_a_full_engine_says_when_to_come_back(subject):
    held = [await subject.reserve(RequestKey(f"r{i}")) for i in range(4)]
    with pytest.raises(Failure) as failure:
        await subject.reserve(RequestKey("r4"))
    assert failure.value.reason is Reason.ENGINE_FULL
    assert failure.value.retry_after_s > 0
    for reservation in held:
        await subject.client.release(subject.address, reservation.reservation_id)
    again = await subject.reserve(RequestKey("r4"))
    await subject.client.release(subject.address, again.reservation_id)


async def test_a_lease_can_be_renewed_and_lapses_without(subject):
    held = await subject.reserve(RequestKey("r"), lease_ms=30_000)
    assert await subject.client.renew(subject.address, held.reservation_id, 60_000) == 60.0
    await subject.client.renew(subject.address, held.reservation_id, 50)
    await subject.idle()
    with pytest.raises(Failure) as failure:
        await subject.client.renew(subject.address, held.reservation_id)
    assert failure.value.reason is Reason.NOT_FOUND
    assert subject.engine.num_lapsed == 1


async def test_a_record_without_its_bytes_is_not_decoded(subject):
    given = await sequence()
    held = await subject.reserve(key_from_proto(given.record.key), given.num_tokens)
    with pytest.raises(Failure) as failure:
        await subject.client.run(subject.address, held.reservation_id, given.record, "xfer-none")
    assert failure.value.reason is Reason.HANDOFF_MISMATCH


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_checksum": bytes(16)},
        {"coverage_tokens": 40},
        {"num_cached": 49},
        {"state_position": 3},
        {"output_tokens": b""},
    ],
)
async def test_a_record_that_does_not_agree_with_the_bytes_is_refused(subject, wrong):
    given = await sequence()
    held, transfer_id = await subject.deliver(given)
    for name, value in wrong.items():
        setattr(given.record, name, value)
    with pytest.raises(Failure) as failure:
        await subject.client.run(subject.address, held.reservation_id, given.record, transfer_id)
    assert failure.value.reason is Reason.HANDOFF_MISMATCH
    with pytest.raises(Failure) as failure:
        await subject.client.run(subject.address, held.reservation_id, given.record, transfer_id)
    assert failure.value.reason is Reason.NOT_FOUND


async def test_t18_bytes_of_another_sequence_are_noticed_though_every_checksum_agrees(subject):
    given, other = await sequence(), await prefilled(spec("r", prompt_ids(50, seed=3)), MODEL)
    held = await subject.reserve(key_from_proto(given.record.key), given.num_tokens)
    transfer_id = await subject.push(other, held)
    given.record.kv_checksum = other.record.kv_checksum
    with pytest.raises(Failure) as failure:
        await subject.client.run(subject.address, held.reservation_id, given.record, transfer_id)
    assert failure.value.reason is Reason.HANDOFF_MISMATCH


@pytest.mark.parametrize("broken", ["missing state", "missing block", "twice", "short", "unknown"])
async def test_p_36_a_transfer_that_is_not_what_was_announced_is_refused(subject, broken):
    given = await sequence()
    held = await subject.reserve(key_from_proto(given.record.key), given.num_tokens)
    pieces = list(given.pieces)
    if broken == "missing state":
        pieces = pieces[:-1]
    elif broken == "missing block":
        pieces = pieces[1:]
    elif broken == "twice":
        pieces = [pieces[0], *pieces]
    elif broken == "short":
        pieces[0] = Outgoing(pieces[0].kind, 0, pieces[0].data[:-4])
    else:
        pieces[0] = Outgoing(pieces[0].kind, 77, pieces[0].data)
    with pytest.raises(Failure) as failure:
        await subject.push(given, held, pieces)
    assert failure.value.reason is Reason.HANDOFF_MISMATCH
    # The reservation is still ours: a whole delivery goes through.
    transfer_id = await subject.push(given, held)
    await subject.client.run(subject.address, held.reservation_id, given.record, transfer_id)


async def test_a_transfer_needs_the_reservation_it_is_for(subject):
    given = await sequence()
    nobody = Reservation("rsv-none", 0, 0, 0.0, "")
    with pytest.raises(Failure) as failure:
        await subject.push(given, nobody)
    assert failure.value.reason is Reason.NOT_FOUND
    held = await subject.reserve(RequestKey("another"), given.num_tokens)
    with pytest.raises(Failure) as failure:
        await subject.push(given, held)
    assert failure.value.reason is Reason.HANDOFF_MISMATCH
    await subject.client.release(subject.address, held.reservation_id)


async def test_an_abort_is_safe_in_every_state_and_twice(subject):
    key = RequestKey("r", 0, 1)
    assert not await subject.client.abort(subject.address, key)
    await subject.reserve(key)
    assert await subject.client.abort(subject.address, key)
    given = await sequence("s", max_tokens=1900)
    running = await subject.start(given)
    assert not await subject.client.abort(subject.address, replace(running, attempt=5))
    assert await subject.client.abort(subject.address, replace(running, epoch=0))
    assert not await subject.client.abort(subject.address, running)
    async with (
        subject.client.attach(subject.address, "e") as channel,
        channel.subscribe(running, 0) as stream,
    ):
        events = [event async for event in stream]
    assert events[-1].finished.reason == pb.FINISH_REASON_ABORT


async def test_leaving_a_subscription_aborts_its_request(subject):
    key = await subject.start(await sequence(max_tokens=1900))
    async with (
        subject.client.attach(subject.address, "e") as channel,
        channel.subscribe(key, 0) as stream,
    ):
        async for _ in stream:
            break
        assert subject.engine.num_running == 1
    await subject.idle()


async def test_a_subscription_to_nothing_fails_after_its_wait(subject):
    async with (
        subject.client.attach(subject.address, "e") as channel,
        channel.subscribe(RequestKey("nobody"), 0) as stream,
    ):
        events = [event async for event in stream]
    assert [e.failed.reason for e in events] == [errors_pb2.REASON_NOT_FOUND]


async def test_the_same_attempt_does_not_run_twice(subject):
    await subject.start(await sequence(max_tokens=1900))
    again = await sequence(max_tokens=1900)
    held, transfer_id = await subject.deliver(again)
    with pytest.raises(Failure) as failure:
        await subject.client.run(subject.address, held.reservation_id, again.record, transfer_id)
    assert failure.value.reason is Reason.CONFLICT
    newer = await sequence(max_tokens=1900, attempt=1)
    key = await subject.start(newer)
    await subject.client.abort(subject.address, key)


async def test_an_export_without_a_target_stops_the_request_and_gives_it_back(subject):
    key = await subject.start(await sequence(max_tokens=1900))
    assert await subject.client.export(subject.address, key) is None
    async with (
        subject.client.attach(subject.address, "e") as channel,
        channel.subscribe(key, 0) as stream,
    ):
        events = [event async for event in stream]
    assert events[-1].finished.reason == pb.FINISH_REASON_PREEMPTED_RESUMABLE
    with pytest.raises(Failure) as failure:
        await subject.client.export(subject.address, key)
    assert failure.value.reason is Reason.NOT_FOUND


async def test_a_deadline_ends_a_running_request_with_its_reason(subject):
    given = await sequence(max_tokens=1900)
    given.record.spec.deadline_unix_ms = 1
    key = await subject.start(given)
    async with (
        subject.client.attach(subject.address, "e") as channel,
        channel.subscribe(key, 0) as stream,
    ):
        events = [event async for event in stream]
    assert events[-1].failed.reason == errors_pb2.REASON_DEADLINE
