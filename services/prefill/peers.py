"""The services a prefill engine asks before a request runs, over gRPC.

Source: engine.md, sections 1.7, 5.1 and 6.2; kvcache-and-balancing.md, sections 6 and 14.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import suppress

from pelagos.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from pelagos.engine.v1 import records_pb2 as pb
from pelagos.lb.v1 import vision_lb_pb2, vision_lb_pb2_grpc
from pelagos.so_compiler.v1 import so_compiler_pb2, so_compiler_pb2_grpc

from services.common.errors import Failure, Reason
from services.common.membership import ClusterView, Member
from services.common.rpc_client import Channels, call, stream_call
from services.common.rpc_errors import from_proto
from services.engine.requests import Image
from services.engine.stores import NearestStore
from services.engine.windows import Windows
from services.prefill.deps import Fetched

log = logging.getLogger(__name__)

VISION_LB = "vision-lb"
_PICK_TIMEOUT_S = 0.2  # a machine that does not answer in this time is skipped (section 14)
_MAX_MACHINES = 3
_FETCH_TIMEOUT_S = 30.0
# Patches behind one token of a span: a cell of 3 x 3 (engine.md, 6.1). The card plans exactly.
_PATCHES_PER_TOKEN = 9


class GrpcPeers:
    """Found in the membership view, called by address."""

    def __init__(
        self,
        view: ClusterView,
        channels: Channels,
        store: NearestStore,
        windows: Windows,
        layout_digest: bytes,
        rng: random.Random,
    ) -> None:
        self._view = view
        self._channels = channels
        self._store = store
        self._windows = windows
        self._layout_digest = layout_digest
        self._rng = rng

    async def fetch_blocks(
        self, spec: pb.RequestSpec, keys: list[bytes], into: list[Fetched]
    ) -> None:
        """Fetches blocks from the store of this machine, in the order of the chain."""
        store = self._store.client()
        if store is None:
            return
        arrived: dict[int, Fetched] = {}
        async with store.fetch(
            b"".join(keys),
            self._layout_digest,
            parent_key=spec.namespace.root,
            priority=spec.priority,
            pin_id=spec.hit.pin_id,
            request_id=spec.key.request_id,
        ) as blocks:
            async for block in blocks:
                if not block.is_ok:
                    if block.index == len(into):
                        return  # nothing after a missing block can be used
                    continue
                arrived[block.index] = Fetched(block.payload, block.approximate)
                while len(into) in arrived:
                    into.append(arrived.pop(len(into)))
                if len(into) == len(keys):
                    return

    async def fetch_window(self, block_key: bytes, location: pb.SwaLocation) -> bytes | None:
        """Fetches a window state from the machine that made it; None is a miss."""
        return await self._windows.fetch(block_key, location)

    async def fetch_grammar(self, grammar: pb.GrammarRef) -> bytes:
        """Fetches a compiled artifact. Raises: Failure(NOT_FOUND) when it was evicted."""
        address = grammar.address
        if not address:
            compilers = self._view.members("so-compiler")
            if not compilers:
                raise Failure(Reason.NO_INSTANCE, "no grammar compiler is known")
            address = self._rng.choice(compilers).address
        stub = so_compiler_pb2_grpc.SoCompilerServiceStub(self._channels.get(address))
        request = so_compiler_pb2.FetchRequest(artifact_key=grammar.artifact_key)
        data = bytearray()
        async with stream_call(stub.Fetch, request, timeout_s=_FETCH_TIMEOUT_S) as stream:
            async for part in stream:
                data += part.data
        return bytes(data)

    # --- images ---------------------------------------------------------------------------------

    async def encode(self, request_id: str, tenant: str, images: list[Image]) -> dict[int, bytes]:
        """Encodes images, each on the least loaded card of a machine drawn at random."""
        async with asyncio.TaskGroup() as group:
            tasks = {
                image.span.start: group.create_task(self._encode_one(request_id, tenant, image))
                for image in images
            }
        return {start: task.result() for start, task in tasks.items()}

    async def _encode_one(self, request_id: str, tenant: str, image: Image) -> bytes:
        """Encodes one image; a machine or card that fails is left and another one asked."""
        last = Failure(Reason.NO_INSTANCE, "no vision machine is known", retry_after_s=1.0)
        machines = list(self._view.members(VISION_LB))
        self._rng.shuffle(machines)
        for machine in machines[:_MAX_MACHINES]:
            try:
                return await self._encode_at(machine, request_id, tenant, image)
            except Failure as failure:
                if failure.reason in (Reason.IMAGE_INVALID, Reason.INVALID_REQUEST):
                    raise
                last = failure
                log.info(
                    "vision machine failed",
                    extra={"request_id": request_id, "reason": failure.reason.value},
                )
        raise last

    async def _encode_at(
        self, machine: Member, request_id: str, tenant: str, image: Image
    ) -> bytes:
        balancer = vision_lb_pb2_grpc.VisionLbServiceStub(self._channels.get(machine.address))
        card = await call(
            balancer.PickCard,
            vision_lb_pb2.PickCardRequest(
                request_id=request_id, num_patches=image.span.num_tokens * _PATCHES_PER_TOKEN
            ),
            timeout_s=_PICK_TIMEOUT_S,
        )
        fault = False
        try:
            return await self._encode_on(card, request_id, tenant, image)
        except Failure as failure:
            fault = failure.reason is Reason.BACKEND_LOST
            raise
        finally:
            release = vision_lb_pb2.ReleaseCardRequest(ticket=card.ticket, card_fault=fault)
            with suppress(Failure):
                await asyncio.shield(call(balancer.ReleaseCard, release, timeout_s=1.0))

    async def _encode_on(
        self, card: vision_lb_pb2.PickCardResponse, request_id: str, tenant: str, image: Image
    ) -> bytes:
        stub = encoder_pb2_grpc.EncoderServiceStub(self._channels.get(card.address))
        request = encoder_pb2.EncodeRequest(
            item_id="0",
            width=image.width,
            height=image.height,
            data=image.data,
            digest=image.span.digest,
            tenant=tenant,
            request_id=request_id,
            ticket=card.ticket,
        )

        async def one() -> AsyncIterator[encoder_pb2.EncodeRequest]:
            yield request

        data, total = bytearray(), None
        async with stream_call(stub.Encode, one(), timeout_s=_FETCH_TIMEOUT_S) as stream:
            async for part in stream:
                if part.HasField("error"):
                    raise from_proto(part.error)
                if part.offset_bytes != len(data):
                    raise Failure(Reason.BACKEND_LOST, "a piece of an embedding is missing")
                data += part.embeddings
                total = part.total_bytes
                if part.geometry.num_tokens != image.span.num_tokens:
                    raise Failure(
                        Reason.INVALID_REQUEST, "the span and the image's size do not agree"
                    )
        if total is None or len(data) != total:
            raise Failure(Reason.BACKEND_LOST, "the encoder ended without a whole embedding")
        return bytes(data)
