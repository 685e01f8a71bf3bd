"""The services a prefill engine asks before a request runs, over gRPC.

Source: engine.md, sections 1.7, 5.1 and 6.2; kvcache-and-balancing.md, sections 6 and 14.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.rpc_client import Channels
from services.encoder.client import EncoderClient, Picture
from services.engine.grammar import Constraint
from services.engine.grammars import Grammars
from services.engine.requests import Image, Sampling
from services.engine.store_ring import Lease, StoreRing, leased
from services.engine.stores import NearestStore
from services.engine.windows import Windows
from services.kvstore.client import StoreClient
from services.lb.vision.client import EncoderCards, machines_of
from services.prefill.deps import Fetched

log = logging.getLogger(__name__)

# Patches behind one token of a span: a cell of 3 x 3 (engine.md, 6.1). The card plans exactly.
_PATCHES_PER_TOKEN = 9
# Images of one request at a time. All at once, one request of many images fills the queue of every
# card, is refused itself however often it comes again, and so is everybody else meanwhile.
_IMAGES_AT_ONCE: Final = 16


class GrpcPeers:
    """Found in the membership view, called by address."""

    def __init__(
        self,
        view: ClusterView,
        channels: Channels,
        store: NearestStore,
        windows: Windows,
        grammars: Grammars,
        layout_digest: bytes,
        block_bytes: int,
        ring: StoreRing,
        rng: random.Random,
    ) -> None:
        self._view = view
        self._channels = channels
        self._store = store
        self._windows = windows
        self._layout_digest = layout_digest
        self._block_bytes = block_bytes
        self._ring = ring
        self._grammars = grammars
        self._encoder = EncoderClient(channels)
        self._cards = EncoderCards(machines_of(view, channels), rng=rng)

    async def fetch_blocks(
        self, spec: pb.RequestSpec, keys: list[bytes], into: list[Fetched]
    ) -> None:
        """Fetches blocks from the store of this machine, in the order of the chain.

        By as many at a time as there are slots of shared memory, or all at once without it.
        """
        store = self._store.client()
        while store is not None and len(into) < len(keys):
            first = len(into)
            lease = self._ring.take(len(keys) - first) if self._store.shares_memory else None
            end = len(keys) if lease is None else first + len(lease.slots)
            with leased(lease):
                await self._fetch_some(store, spec, keys, end, into, lease)
            if len(into) < end:
                return  # nothing after a missing block can be used

    async def _fetch_some(
        self,
        store: StoreClient,
        spec: pb.RequestSpec,
        keys: list[bytes],
        end: int,
        into: list[Fetched],
        lease: Lease | None,
    ) -> None:
        """Appends the blocks from len(into) to `end`, or up to the first that is missing."""
        first = len(into)
        arrived: dict[int, Fetched] = {}
        async with store.fetch(
            b"".join(keys[first:end]),
            self._layout_digest,
            ring=None if lease is None else lease.ring,
            slots=() if lease is None else lease.slots,
            parent_key=keys[first - 1] if first else spec.namespace.root,
            priority=spec.priority,
            pin_id=spec.hit.pin_id,
            request_id=spec.key.request_id,
        ) as blocks:
            async for block in blocks:
                at = first + block.index
                # What has another length was never a block of this layout.
                if not block.is_ok or block.num_bytes != self._block_bytes:
                    if at == len(into):
                        return
                    continue
                payload = block.payload
                if lease is not None:
                    payload = lease.read(block.index, block.num_bytes)
                arrived[at] = Fetched(payload, block.approximate)
                while len(into) in arrived:
                    into.append(arrived.pop(len(into)))
                if len(into) == end:
                    return

    async def fetch_window(self, block_key: bytes, location: pb.SwaLocation) -> bytes | None:
        """Fetches a window state from the machine that made it; None is a miss."""
        return await self._windows.fetch(block_key, location)

    @property
    def can_constrain(self) -> bool:
        """Whether the grammar backend and a vocabulary are installed."""
        return self._grammars.available

    async def constraint(
        self, grammar: pb.GrammarRef, sampling: Sampling, said: list[int]
    ) -> Constraint:
        """The constraint of a request, its output so far replayed."""
        return await self._grammars.constraint(grammar, sampling, said)

    # --- images ---------------------------------------------------------------------------------

    async def encode(self, request_id: str, tenant: str, images: list[Image]) -> dict[int, bytes]:
        """Encodes images, each on the least loaded card of a machine drawn at random."""
        room = asyncio.Semaphore(_IMAGES_AT_ONCE)

        async def one(image: Image) -> bytes:
            async with room:
                return await self._encode_one(request_id, tenant, image)

        async with asyncio.TaskGroup() as group:
            tasks = {image.span.start: group.create_task(one(image)) for image in images}
        return {start: task.result() for start, task in tasks.items()}

    async def _encode_one(self, request_id: str, tenant: str, image: Image) -> bytes:
        """Encodes one image; a card that is lost is left and another one asked, once (6.4)."""
        failed: set[str] = set()
        num_patches = image.span.num_tokens * _PATCHES_PER_TOKEN
        while True:
            card_id = ""
            try:
                async with self._cards.card(num_patches, request_id, frozenset(failed)) as card:
                    card_id = card.instance_id
                    found = await self._encoder.encode(
                        card.address,
                        Picture(
                            image.width,
                            image.height,
                            image.data,
                            image.span.digest,
                            tenant,
                            request_id,
                            card.ticket,
                        ),
                    )
            except Failure as failure:
                if failure.reason is not Reason.BACKEND_LOST or failed or not card_id:
                    raise
                failed.add(card_id)
                log.info("card lost", extra={"request_id": request_id})
                continue
            if found.size.num_tokens != image.span.num_tokens:
                raise Failure(Reason.INVALID_REQUEST, "the span and the image's size do not agree")
            return found.data
