"""The conformance checks of decode engines.

Reservations can be driven at any engine. Sequences need KV bytes: the suite makes those of the
simulated model itself, where the engine's layout is the simulation's.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace

from pelagos.decode.v1 import decode_pb2, decode_pb2_grpc
from pelagos.engine.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.rpc_client import call, stream_call
from services.common.rpc_errors import from_proto
from services.engine.config import ModelConfig
from services.engine.conformance_kit import Check, CheckFailed, NotDriven, Target, require
from services.engine.layout import Geometry
from services.engine.sim.config import SimConfig
from services.engine.sim.prompt import Prefilled, prefilled
from services.engine.transfer_client import Outgoing, push

_TIMEOUT_S = 5.0
_LONG = 1 << 14


def decode_checks() -> list[tuple[str, Check]]:
    """The checks, by name."""
    return [
        ("reserving is idempotent", _reserving_is_idempotent),
        ("a lease lapses and frees", _leases_lapse),
        ("what never fits is refused", _refusals_have_reasons),
        ("aborts are safe", _aborts_are_safe),
        ("T8 a delivered sequence goes on without gap or repeat", _streams_are_continuous),
        ("P-36 damaged deliveries are refused", _damage_is_refused),
    ]


class _Decode:
    """The engine's RPCs, with ids of this run."""

    def __init__(self, target: Target) -> None:
        channel = target.channels.get(target.address)
        self.stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self.transfer = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
        self.signature = target.about.layout_signature
        self._prefix = f"conformance-{secrets.token_hex(4)}"

    def key(self, name: str) -> pb.RequestKey:
        return pb.RequestKey(request_id=f"{self._prefix}-{name}", epoch=1)

    async def reserve(self, key: pb.RequestKey, num: int = 60, **change: object) -> str:
        fields: dict[str, object] = {
            "num_tokens": num,
            "expected_output_tokens": 32,
            "layout_signature": self.signature,
        }
        request = decode_pb2.ReserveRequest(key=key, **(fields | change))  # type: ignore[arg-type]
        answer = await call(self.stub.Reserve, request, timeout_s=_TIMEOUT_S)
        if not answer.granted:
            raise from_proto(answer.refusal)
        return str(answer.reservation_id)

    async def release(self, reservation_id: str) -> bool:
        request = decode_pb2.ReleaseRequest(reservation_id=reservation_id)
        answer = await call(self.stub.Release, request, timeout_s=_TIMEOUT_S)
        return bool(answer.released)

    async def abort(self, key: pb.RequestKey) -> bool:
        request = decode_pb2.AbortRequest(key=key)
        return bool((await call(self.stub.Abort, request, timeout_s=_TIMEOUT_S)).found)

    async def deliver(self, sequence: Prefilled, pieces: list[Outgoing]) -> tuple[str, str]:
        key = sequence.record.key
        held = await self.reserve(key, sequence.record.num_cached)
        request = kv_transfer_pb2.OpenRequest(
            key=key,
            direction=kv_transfer_pb2.TRANSFER_DIRECTION_PUSH,
            layout_signature=self.signature,
            to_position=sequence.record.num_cached,
            want_state=True,
            reservation_id=held,
            transports=["grpc"],
        )
        return held, await push(self.transfer, request, pieces, timeout_s=30)

    async def run(
        self, sequence: Prefilled, held: str, transfer_id: str
    ) -> AsyncIterator[pb.RequestEvent]:
        request = decode_pb2.RunRequest(
            reservation_id=held, record=sequence.record, transfer_id=transfer_id
        )
        async with stream_call(self.stub.Run, request, timeout_s=60) as stream:
            async for response in stream:
                yield response.event


async def _reserving_is_idempotent(target: Target) -> None:
    engine = _Decode(target)
    key = engine.key("twice")
    first, second = await engine.reserve(key), await engine.reserve(key)
    require(first == second, "one request holds two reservations")
    require(await engine.release(first), "a held reservation was not found")
    require(not await engine.release(first), "a reservation was released twice")


async def _leases_lapse(target: Target) -> None:
    engine = _Decode(target)
    before = sum(rank.blocks_free for rank in await target.loads())
    held = await engine.reserve(engine.key("lapse"), lease_ms=2000)
    after = sum(rank.blocks_free for rank in await target.loads())
    require(after < before, "a reservation holds no blocks")
    for _ in range(200):
        if sum(rank.blocks_free for rank in await target.loads()) == before:
            break
        await asyncio.sleep(0.05)
    else:
        raise CheckFailed("blocks of a lapsed lease are not free after 10 s (P-36)")
    try:
        request = decode_pb2.RenewRequest(reservation_id=held)
        await call(engine.stub.Renew, request, timeout_s=_TIMEOUT_S)
    except Failure as failure:
        require(failure.reason is Reason.NOT_FOUND, f"renewing gives {failure.reason.value}")
    else:
        raise CheckFailed("a lapsed lease was renewed")


async def _refusals_have_reasons(target: Target) -> None:
    engine = _Decode(target)
    room = max(rank.blocks for rank in target.about.ranks) * target.about.kv_layout.block_tokens
    cases: list[tuple[str, dict[str, object], Reason]] = [
        ("another layout", {"layout_signature": "conformance"}, Reason.LAYOUT_MISMATCH),
    ]
    if room < target.about.max_model_len:
        cases.append(("a prompt of the whole pool", {"num_tokens": room}, Reason.NOT_FITTING))
    for name, change, reason in cases:
        try:
            held = await engine.reserve(engine.key("refused"), **change)  # type: ignore[arg-type]
        except Failure as failure:
            require(failure.reason is reason, f"{name} gives {failure.reason.value}")
        else:
            await engine.release(held)
            raise CheckFailed(f"{name} was granted")


async def _aborts_are_safe(target: Target) -> None:
    engine = _Decode(target)
    key = engine.key("abort")
    require(not await engine.abort(key), "an unknown request was found")
    await engine.reserve(key)
    require(await engine.abort(key), "a reservation was not found by its key")
    require(not await engine.abort(key), "an aborted request was found again")


async def _sequence(target: Target, engine: _Decode, name: str, seed: int) -> Prefilled:
    """Raises: NotDriven when the engine's bytes are not those of the simulation."""
    geometry = _geometry(target)
    model = ModelConfig(
        model_id=target.about.model_id, geometry=geometry, sim=SimConfig(time_scale=0.0)
    )
    signature = model.layout().signature
    if target.about.engine != "sim" or signature != target.about.layout_signature:
        raise NotDriven("the suite can make KV bytes of the simulated layout only")
    num = 3 * geometry.block_tokens + 9
    rng = random.Random(seed)
    ids = array("I", [rng.randrange(3, 100_000) for _ in range(num)])
    key = engine.key(name)
    spec = pb.RequestSpec(
        key=key,
        prompt_tokens=ids.tobytes(),
        sampling=pb.Sampling(max_tokens=32, temperature=1.0, seed=5),
    )
    return await prefilled(spec, model)


def _geometry(target: Target) -> Geometry:
    layout = target.about.kv_layout
    back = layout.ring_tokens - layout.window_tokens
    known = Geometry()
    if (layout.block_tokens, layout.window_tokens) == (known.block_tokens, known.window):
        return replace(known, max_draft=back - 1)
    # The small models keep what a window and a roll-back need, in multiples of eight.
    keep = -(-(layout.window_tokens + back) // 8) * 8
    return Geometry(layout.block_tokens, layout.window_tokens, back - 1, keep)


async def _streams_are_continuous(target: Target) -> None:
    engine = _Decode(target)
    sequence = await _sequence(target, engine, "stream", seed=1)
    held, transfer_id = await engine.deliver(sequence, sequence.pieces)
    next_index, ends, after = 1, 0, 0
    async for event in engine.run(sequence, held, transfer_id):
        after += ends
        if event.HasField("tokens"):
            require(event.tokens.first_index == next_index, "a gap or a repeat in the indices")
            num = len(event.tokens.token_ids) // 4
            require(1 <= num <= _LONG, f"{num} tokens in one event")
            next_index += num
        ends += event.WhichOneof("event") in ("finished", "failed", "moved")
    require((ends, after) == (1, 0), f"{ends} ends, {after} events after the end (P-01)")
    require(next_index <= 32, f"{next_index} tokens, the limit was 32")


async def _damage_is_refused(target: Target) -> None:
    engine = _Decode(target)
    sequence = await _sequence(target, engine, "damage", seed=2)
    broken = list(sequence.pieces)
    data = bytearray(broken[1].data)
    data[5] ^= 0x40
    broken[1] = Outgoing(broken[1].kind, broken[1].index, bytes(data))
    held, transfer_id = await engine.deliver(sequence, broken)
    try:
        async for _ in engine.run(sequence, held, transfer_id):
            raise CheckFailed("a damaged block was decoded")
    except Failure as failure:
        require(
            failure.reason in (Reason.HANDOFF_MISMATCH, Reason.BLOCK_CORRUPT),
            f"a damaged block gives {failure.reason.value}",
        )
    missing = await _sequence(target, engine, "missing", seed=3)
    try:
        await engine.deliver(missing, missing.pieces[1:])
    except Failure as failure:
        require(failure.reason is Reason.HANDOFF_MISMATCH, f"a gap gives {failure.reason.value}")
    else:
        raise CheckFailed("a delivery with a missing block was taken as whole")
    await engine.abort(missing.record.key)
