"""A decode engine in memory, with the same contract as the client: the real engine, no gRPC.

    async with FakeDecode() as decode:
        held = await decode.reserve("", key, num_tokens=40, expected_output=8,
                                    layout_signature=decode.engine.layout.signature)

Addresses are arguments as in the client, and are not looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from types import TracebackType

from pelagos.decode.v1 import decode_pb2 as pb
from pelagos.engine.v1 import kv_transfer_pb2, records_pb2

from services.common.rpc_errors import from_proto
from services.decode.client import Reservation
from services.decode.config import DecodeConfig
from services.decode.engine import DecodeEngine, Identity
from services.decode.server import DecodeServicer
from services.engine.attach_client import AttachChannel, attach_in_memory
from services.engine.config import ModelConfig
from services.engine.persister import Persister
from services.engine.records import key_to_proto
from services.engine.requests import RequestKey
from services.engine.sim.config import SimConfig
from services.engine.sim.tokens import Scripts
from services.engine.transfer_client import Outgoing, chunks_of

ADDRESS = "fake:decode"


def quick_model(mode: str = "hash") -> ModelConfig:
    """A simulated model that answers at once."""
    return ModelConfig(max_model_len=8192, sim=SimConfig(mode=mode, time_scale=0.0))


class FakeDecode:
    """One instance."""

    def __init__(self, config: DecodeConfig | None = None, scripts: Scripts | None = None) -> None:
        self.config = config or DecodeConfig(num_blocks=128, model=quick_model())
        layout = self.config.model.layout()
        self.engine = DecodeEngine(
            self.config,
            [
                self.config.model.make_runner(
                    self.config.num_blocks, for_prefill=False, scripts=scripts
                )
                for _ in range(self.config.num_ranks)
            ],
            Identity("decode-fake", "boot", ADDRESS),
            persister=Persister(
                lambda: None,
                layout=bytes.fromhex(layout.signature),
                writer_id="decode-fake",
                block_bytes=layout.block_bytes,
                max_queue_bytes=layout.block_bytes,
                by_decode=True,
            ),
        )
        self._servicer = DecodeServicer(self.engine)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeDecode:
        self._task = asyncio.create_task(self.engine.run(), name="fake decode")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.engine.close()

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
        """Holds room."""
        answer = await self._servicer.Reserve(
            pb.ReserveRequest(
                key=key_to_proto(key),
                num_tokens=num_tokens,
                expected_output_tokens=expected_output,
                layout_signature=layout_signature,
                rank=rank,
                lease_ms=lease_ms,
            ),
            None,
        )
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
        """Prolongs a lease."""
        return self.engine.renew(reservation_id, lease_ms)

    async def release(self, address: str, reservation_id: str) -> bool:
        """Gives a reservation back."""
        return self.engine.release(reservation_id)

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
        timeout_s: float = 60.0,
    ) -> str:
        """Delivers KV and state."""
        opened = await self.engine.transfers.Open(
            kv_transfer_pb2.OpenRequest(
                key=key_to_proto(key),
                direction=kv_transfer_pb2.TRANSFER_DIRECTION_PUSH,
                layout_signature=layout_signature,
                to_position=num_tokens,
                reservation_id=reservation_id,
            ),
            None,
        )

        async def chunks() -> AsyncIterator[kv_transfer_pb2.PushRequest]:
            for seq, chunk in enumerate(chunks_of(opened, key.request_id, pieces)):
                chunk.seq = seq
                yield kv_transfer_pb2.PushRequest(chunk=chunk)

        async with aclosing(self.engine.transfers.Push(chunks(), None)) as answers:
            async for answer in answers:
                if answer.HasField("error"):
                    raise from_proto(answer.error)
        return opened.transfer_id

    async def run(
        self,
        address: str,
        reservation_id: str,
        record: records_pb2.HandoffRecord,
        transfer_id: str,
    ) -> None:
        """Commits a delivered sequence."""
        constraint = await self.engine.constraint_of(record)
        self.engine.commit(reservation_id, record, transfer_id, constraint)

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
        async with aclosing(self._servicer.Run(request, None)) as responses:

            async def events() -> AsyncIterator[records_pb2.RequestEvent]:
                async for response in responses:
                    yield response.event

            yield events()

    def attach(
        self, address: str, entrypoint_id: str
    ) -> AbstractAsyncContextManager[AttachChannel]:
        """Opens a channel."""
        return attach_in_memory(self.engine.hub, pb.AttachRequest, pb.AttachResponse, entrypoint_id)

    async def export(
        self, address: str, key: RequestKey, target_address: str = ""
    ) -> records_pb2.Moved | None:
        """Moves a request, or only stops it."""
        moved: records_pb2.Moved | None = None
        request = pb.ExportRequest(key=key_to_proto(key), target_address=target_address)
        async for response in self._servicer.Export(request, None):
            if response.HasField("failed"):
                raise from_proto(response.failed)
            if response.HasField("moved"):
                moved = response.moved
        return moved

    async def abort(self, address: str, key: RequestKey) -> bool:
        """Ends a request in any state."""
        return self.engine.abort(key)
