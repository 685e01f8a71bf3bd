"""Calls a decode engine: reserve, deliver, run, follow, move, abort.

client = DecodeClient(channels)
held = await client.reserve(address, key, num_tokens=300, expected_output=64, ...)
transfer_id = await client.push(address, key, held.reservation_id, signature, 300, pieces)
await client.run(address, held.reservation_id, record, transfer_id)
async with client.attach(address, "entrypoint-1") as channel:
    async with channel.subscribe(key, from_index=1) as events:
        async for event in events: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from pelagos.decode.v1 import decode_pb2 as pb
from pelagos.decode.v1 import decode_pb2_grpc as rpc
from pelagos.engine.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, records_pb2

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call, stream_call
from services.common.rpc_errors import from_proto
from services.engine.attach_client import AttachChannel, attach
from services.engine.records import key_to_proto
from services.engine.requests import RequestKey
from services.engine.transfer_client import Outgoing, push

_RPC_TIMEOUT_S = 2.0
_RUN_TIMEOUT_S = 10.0
_MOVE_TIMEOUT_S = 60.0
_RENEWALS = 3  # of a lease: one that is late or lost leaves two more


@dataclass(frozen=True)
class Reservation:
    """Room that is held for a sequence."""

    reservation_id: str
    rank: int
    blocks_held: int
    lease_s: float
    boot_id: str


class DecodeCalls(Protocol):
    """What an engine that hands over needs; the client and the fake offer it."""

    async def reserve(
        self,
        address: str,
        key: RequestKey,
        *,
        num_tokens: int,
        expected_output: int,
        layout_signature: str,
        rank: int = 0,
        lease_ms: int = 0,
    ) -> Reservation: ...

    async def renew(self, address: str, reservation_id: str, lease_ms: int = 0) -> float: ...

    async def push(
        self,
        address: str,
        key: RequestKey,
        reservation_id: str,
        layout_signature: str,
        num_tokens: int,
        pieces: Iterable[Outgoing],
        *,
        block_keys: bytes = b"",
        timeout_s: float = _MOVE_TIMEOUT_S,
    ) -> str: ...

    async def run(
        self,
        address: str,
        reservation_id: str,
        record: records_pb2.HandoffRecord,
        transfer_id: str,
    ) -> None: ...

    async def abort(self, address: str, key: RequestKey) -> bool: ...


async def keep_lease(
    client: DecodeCalls,
    address: str,
    reservation_id: str,
    lease_s: float,
    may_hold: Callable[[], bool] = lambda: True,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Renews a lease in time for as long as `may_hold`; ends when it is gone. To be cancelled."""
    while True:
        await clock.sleep(lease_s / _RENEWALS)
        if not may_hold():
            return
        try:
            await client.renew(address, reservation_id)
        except Failure as failure:
            if failure.reason is Reason.NOT_FOUND:
                return


@asynccontextmanager
async def lease_kept(
    client: DecodeCalls, address: str, reservation_id: str, lease_s: float
) -> AsyncIterator[None]:
    """Renews a lease while the block runs."""
    keeper = asyncio.create_task(keep_lease(client, address, reservation_id, lease_s))
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


class DecodeClient:
    """One object for any number of decode instances; addresses are arguments."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def _stub(self, address: str) -> rpc.DecodeServiceStub:
        return rpc.DecodeServiceStub(self._channels.get(address))

    async def reserve(
        self,
        address: str,
        key: RequestKey,
        *,
        num_tokens: int,
        expected_output: int,
        layout_signature: str,
        rank: int = 0,
        lease_ms: int = 0,
    ) -> Reservation:
        """Holds room. Raises: the engine's refusal as Failure (ENGINE_FULL, NOT_FITTING, ...)."""
        request = pb.ReserveRequest(
            key=key_to_proto(key),
            num_tokens=num_tokens,
            expected_output_tokens=expected_output,
            layout_signature=layout_signature,
            rank=rank,
            lease_ms=lease_ms,
        )
        answer = await call(self._stub(address).Reserve, request, timeout_s=_RPC_TIMEOUT_S)
        if not answer.granted:
            raise from_proto(answer.refusal)
        return Reservation(
            answer.reservation_id,
            answer.rank,
            answer.blocks_held,
            answer.lease_ms / 1e3,
            answer.boot_id,
        )

    async def renew(self, address: str, reservation_id: str, lease_ms: int = 0) -> float:
        """Prolongs a lease; returns its seconds. Raises: Failure(NOT_FOUND) when it lapsed."""
        request = pb.RenewRequest(reservation_id=reservation_id, lease_ms=lease_ms)
        answer = await call(self._stub(address).Renew, request, timeout_s=_RPC_TIMEOUT_S)
        return float(answer.lease_ms) / 1e3

    async def release(self, address: str, reservation_id: str) -> bool:
        """Gives a reservation back; False when it was not held any more."""
        request = pb.ReleaseRequest(reservation_id=reservation_id)
        answer = await call(self._stub(address).Release, request, timeout_s=_RPC_TIMEOUT_S)
        return bool(answer.released)

    async def push(
        self,
        address: str,
        key: RequestKey,
        reservation_id: str,
        layout_signature: str,
        num_tokens: int,
        pieces: Iterable[Outgoing],
        *,
        block_keys: bytes = b"",
        timeout_s: float = _MOVE_TIMEOUT_S,
    ) -> str:
        """Sends KV and state of positions [0, num_tokens); returns the transfer's id."""
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channels.get(address))
        request = kv_transfer_pb2.OpenRequest(
            key=key_to_proto(key),
            direction=kv_transfer_pb2.TRANSFER_DIRECTION_PUSH,
            layout_signature=layout_signature,
            to_position=num_tokens,
            block_keys=block_keys,
            want_state=True,
            reservation_id=reservation_id,
            transports=["grpc"],
        )
        return await push(stub, request, pieces, timeout_s)

    async def run(
        self,
        address: str,
        reservation_id: str,
        record: records_pb2.HandoffRecord,
        transfer_id: str,
    ) -> None:
        """Commits a delivered sequence; it runs on for its Attach readers.

        Raises: Failure; NOT_FOUND and HANDOFF_MISMATCH mean that it must be delivered again.
        """
        request = pb.RunRequest(
            reservation_id=reservation_id, record=record, transfer_id=transfer_id, detached=True
        )
        async with stream_call(
            self._stub(address).Run, request, timeout_s=_RUN_TIMEOUT_S
        ) as stream:
            first = await stream.read()
        if first is None or not first.event.HasField("accepted"):
            raise Failure(Reason.BACKEND_LOST, "the engine ended the call without an answer")

    @asynccontextmanager
    async def follow(
        self,
        address: str,
        reservation_id: str,
        record: records_pb2.HandoffRecord,
        transfer_id: str,
    ) -> AsyncIterator[AsyncIterator[records_pb2.RequestEvent]]:
        """Commits a delivered sequence and follows it; leaving the block aborts it."""
        request = pb.RunRequest(
            reservation_id=reservation_id, record=record, transfer_id=transfer_id
        )
        async with stream_call(self._stub(address).Run, request) as stream:

            async def events() -> AsyncIterator[records_pb2.RequestEvent]:
                async for response in stream:
                    yield response.event

            yield events()

    def attach(
        self, address: str, entrypoint_id: str
    ) -> AbstractAsyncContextManager[AttachChannel]:
        """Opens the channel that carries the events of all requests of one entrypoint there."""
        return attach(self._stub(address).Attach, pb.AttachRequest, entrypoint_id)

    async def export(
        self, address: str, key: RequestKey, target_address: str = ""
    ) -> records_pb2.Moved | None:
        """Moves a request to another engine; None when it was only stopped and recorded.

        Raises: Failure when it could not be moved; it then goes on where it was.
        """
        request = pb.ExportRequest(key=key_to_proto(key), target_address=target_address)
        moved: records_pb2.Moved | None = None
        async with stream_call(
            self._stub(address).Export, request, timeout_s=_MOVE_TIMEOUT_S
        ) as stream:
            async for response in stream:
                if response.HasField("failed"):
                    raise from_proto(response.failed)
                if response.HasField("moved"):
                    moved = response.moved
        return moved

    async def abort(self, address: str, key: RequestKey) -> bool:
        """Ends a request in any state; False when it is not there. Safe to repeat."""
        request = pb.AbortRequest(key=key_to_proto(key))
        answer = await call(self._stub(address).Abort, request, timeout_s=_RPC_TIMEOUT_S)
        return bool(answer.found)
