"""A prefill engine in memory, with the same contract as the client: the real engine, no gRPC.

    async with FakeDecode() as decode, FakePrefill(decode) as prefill:
        async with prefill.run("", spec) as events: ...

It hands over to the fake decode engine it is given; there is no cache and no image service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from types import TracebackType

from pelagos.engine.v1 import records_pb2
from pelagos.prefill.v1 import prefill_pb2 as pb

from services.common.errors import Failure, Reason
from services.decode.fake import ADDRESS, FakeDecode
from services.engine.attach_client import AttachChannel, attach_in_memory
from services.engine.grammar import Constraint
from services.engine.persister import Persister
from services.engine.requests import Image, RequestKey, Sampling
from services.engine.sim.tokens import Scripts
from services.lb.decode.client import PickedRank, PickRequest, ReportSession
from services.prefill.config import PrefillConfig
from services.prefill.deps import Fetched
from services.prefill.engine import PrefillEngine
from services.prefill.handoff import Handoff
from services.prefill.server import PrefillServicer


class NoPeers:
    """No store, no encoder, no compiler: every hit is empty, every image and grammar fails."""

    async def fetch_blocks(
        self, spec: records_pb2.RequestSpec, keys: list[bytes], into: list[Fetched]
    ) -> None:
        """Finds nothing."""

    async def fetch_window(
        self, block_key: bytes, location: records_pb2.SwaLocation
    ) -> bytes | None:
        """Finds nothing."""
        return None

    async def encode(self, request_id: str, tenant: str, images: list[Image]) -> dict[int, bytes]:
        """Fails as with no vision machine."""
        raise Failure(Reason.NO_INSTANCE, "no vision machine is known")

    @property
    def can_constrain(self) -> bool:
        """Grammars are taken, and then not found."""
        return True

    async def constraint(
        self, grammar: records_pb2.GrammarRef, sampling: Sampling, said: list[int]
    ) -> Constraint:
        """Fails as with no compiler."""
        raise Failure(Reason.NO_INSTANCE, "no grammar compiler is known")


class OneRank:
    """A decode balancer that knows one rank and always picks it."""

    async def pick(self, request: PickRequest) -> PickedRank:
        """Picks it."""
        return PickedRank("decode-fake", "boot", ADDRESS, 0, 1)

    async def return_rank(
        self, request_id: str, attempt: int, instance_id: str, instance_fault: bool = False
    ) -> bool:
        """Takes note of nothing."""
        return True

    def report(self) -> AbstractAsyncContextManager[ReportSession]:
        """Nobody reports to it."""
        raise NotImplementedError


class FakePrefill:
    """One instance."""

    def __init__(
        self,
        decode: FakeDecode,
        config: PrefillConfig | None = None,
        scripts: Scripts | None = None,
    ) -> None:
        self.config = config or PrefillConfig(num_blocks=256, model=decode.config.model)
        layout = self.config.model.layout()
        self.engine = PrefillEngine(
            self.config,
            [
                self.config.model.make_runner(
                    self.config.num_blocks, for_prefill=True, scripts=scripts
                )
                for _ in range(self.config.num_ranks)
            ],
            "prefill-fake",
            peers=NoPeers(),
            handoff=Handoff(
                decode,
                OneRank(),
                instance_id="prefill-fake",
                boot_id="boot",
                attempts=self.config.handoff_attempts,
                pick_wait_s=1.0,
            ),
            persister=Persister(
                lambda: None,
                layout=bytes.fromhex(layout.signature),
                writer_id="prefill-fake",
                block_bytes=layout.block_bytes,
                max_queue_bytes=layout.block_bytes,
                by_decode=False,
            ),
        )
        self._servicer = PrefillServicer(self.engine)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakePrefill:
        self._task = asyncio.create_task(self.engine.run(), name="fake prefill")
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

    @asynccontextmanager
    async def run(
        self, address: str, spec: records_pb2.RequestSpec
    ) -> AsyncIterator[AsyncIterator[records_pb2.RequestEvent]]:
        """Enqueues a request and follows it; leaving the block aborts it."""
        async with aclosing(self._servicer.Run(pb.RunRequest(spec=spec), None)) as responses:

            async def events() -> AsyncIterator[records_pb2.RequestEvent]:
                async for response in responses:
                    yield response.event

            yield events()

    def attach(
        self, address: str, entrypoint_id: str
    ) -> AbstractAsyncContextManager[AttachChannel]:
        """Opens a channel."""
        return attach_in_memory(self.engine.hub, pb.AttachRequest, pb.AttachResponse, entrypoint_id)

    async def abort(self, address: str, key: RequestKey) -> bool:
        """Ends a request in any state."""
        return self.engine.abort(key)
