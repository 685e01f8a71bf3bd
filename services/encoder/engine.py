"""One card: a queue of images, packed into forwards, with a cache in front. No gRPC here.

Load is counted in patches from the moment an image is taken until it is done, failed or cancelled.
Source: engine.md, sections 6.2 to 6.4.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.encoder.cache import EmbeddingCache
from services.encoder.config import EncoderConfig
from services.encoder.header import image_facts
from services.encoder.patches import Plan, cache_key, pack_batches, plan_geometry
from services.engine.sim.pattern import embedding

log = logging.getLogger(__name__)

PROCESSOR_ID = "1"


class Encoder(Protocol):
    """What computes embeddings: `sim`, and later the vision network."""

    async def forward(self, items: list[Item]) -> list[bytes | Failure]:
        """One forward; an image that fails does not fail the others."""
        ...


@dataclass(eq=False)
class Item:
    """One image on its way. `result` is set once, with bytes or a Failure."""

    digest: bytes
    data: bytes
    plan: Plan
    key: bytes
    result: asyncio.Future[bytes] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    num_waiting: int = 1  # callers that want it; 0 cancels what has not started


class SimEncoder:
    """Deterministic embeddings of an image's digest, in its predicted time."""

    def __init__(self, config: EncoderConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock

    async def forward(self, items: list[Item]) -> list[bytes | Failure]:
        config = self._config
        patches = sum(item.plan.num_patches for item in items)
        await self._clock.sleep(patches * config.model.ns_per_patch / 1e9 * config.model.time_scale)
        return [embedding(item.digest, item.plan.num_tokens, config.model.hidden) for item in items]


@dataclass(frozen=True)
class Encoded:
    """The embedding of an image, [num_tokens, hidden] bf16, and how it came about."""

    plan: Plan
    data: bytes
    cached: bool


class EncoderEngine:
    """The card's queue and cache."""

    def __init__(
        self, config: EncoderConfig, encoder: Encoder | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.config = config
        self.accepting = True
        self.patches_in_progress = 0
        self.num_encoded = 0
        self.num_failed = 0
        self.num_resized = 0  # decoded size was not the declared one
        self.num_forwards = 0
        self.cache = EmbeddingCache(config.cache_bytes, config.cache_ttl_s)
        self.last_progress_s = clock.now_s()
        self._encoder = encoder or SimEncoder(config, clock)
        self._clock = clock
        self._queue: deque[Item] = deque()
        self._in_flight: dict[bytes, Item] = {}  # one computation per key
        self._wake = asyncio.Event()

    @property
    def num_in_progress(self) -> int:
        return len(self._in_flight)

    def plan(self, width: int, height: int) -> Plan:
        """Geometry of a declared size. Raises: Failure(INVALID_REQUEST)."""
        try:
            return plan_geometry(width, height, self.config.model.patches)
        except ValueError as error:
            raise Failure(Reason.INVALID_REQUEST, str(error)) from None

    async def encode(
        self, width: int, height: int, data: bytes, digest: bytes, tenant: str = ""
    ) -> Encoded:
        """Encodes one image, or finds it. Cancelling stops what has not started.

        Raises: Failure with IMAGE_INVALID, INVALID_REQUEST, ENGINE_FULL, DRAINING or DEADLINE.
        """
        config = self.config
        if not self.accepting:
            raise Failure(Reason.DRAINING, "the card takes no new images")
        if len(digest) != 32:
            raise Failure(Reason.INVALID_REQUEST, "an image's digest has 32 bytes")
        plan = self.plan(width, height)
        namespace = f"{config.model.weights_id}\0{tenant}"
        key = await asyncio.to_thread(
            cache_key, namespace, PROCESSOR_ID, config.model.patches, width, height, data + digest
        )
        found = self.cache.get(key, self._clock.now_s())
        if found is not None:
            return Encoded(plan, found, cached=True)
        facts = await asyncio.to_thread(
            image_facts, data, config.max_image_bytes, config.max_image_pixels
        )
        if (facts.width, facts.height) != (width, height):
            # The span is planned already: such an image is resized to it, and counted.
            self.num_resized += 1
        found = self.cache.get(key, self._clock.now_s())
        if found is not None:  # computed while we looked at the header
            return Encoded(plan, found, cached=True)
        item = self._join(key, plan, data, digest)
        try:
            async with asyncio.timeout(config.image_timeout_s):
                return Encoded(plan, await asyncio.shield(item.result), cached=False)
        except TimeoutError:
            raise Failure(Reason.DEADLINE, "the image took too long") from None
        finally:
            self._leave(item)

    def _join(self, key: bytes, plan: Plan, data: bytes, digest: bytes) -> Item:
        """The computation of a key: the one under way, or a new one."""
        item = self._in_flight.get(key)
        if item is not None:
            item.num_waiting += 1
            return item
        if self.patches_in_progress + plan.num_patches > self.config.max_queued_patches:
            raise Failure(Reason.ENGINE_FULL, "the card's queue is full", retry_after_s=0.5)
        item = Item(digest, data, plan, key)
        self._in_flight[key] = item
        self.patches_in_progress += plan.num_patches
        self._queue.append(item)
        self._wake.set()
        return item

    def _leave(self, item: Item) -> None:
        item.num_waiting -= 1
        if item.num_waiting == 0 and not item.result.done() and item in self._queue:
            self._queue.remove(item)
            item.result.cancel()
            self._done(item)

    def _done(self, item: Item) -> None:
        if self._in_flight.pop(item.key, None) is not None:
            self.patches_in_progress -= item.plan.num_patches

    async def run(self) -> None:
        """Forwards batch after batch until cancelled."""
        while True:
            while self._queue:
                await self._forward(self._next_batch())
                self.last_progress_s = self._clock.now_s()
            self._wake.clear()
            self.last_progress_s = self._clock.now_s()
            await self._wake.wait()

    def _next_batch(self) -> list[Item]:
        loads = [item.plan.num_patches for item in self._queue]
        first = pack_batches(loads, self.config.max_batch_patches)[0]
        return [self._queue.popleft() for _ in first]

    async def _forward(self, items: list[Item]) -> None:
        self.num_forwards += 1
        try:
            results = await self._encoder.forward(items)
        except Exception:
            log.exception("a forward failed")
            results = [Failure(Reason.INTERNAL, "the encoder failed")] * len(items)
        now_s = self._clock.now_s()
        for item, result in zip(items, results, strict=True):
            self._done(item)
            if isinstance(result, Failure):
                self.num_failed += 1
                item.result.set_exception(result)
                item.result.exception()  # a result nobody waits for any more is no warning
                continue
            self.num_encoded += 1
            self.cache.put(item.key, result, now_s)
            item.result.set_result(result)

    def stalled_for_s(self) -> float:
        """How long a forward has been due without one completing."""
        return self._clock.now_s() - self.last_progress_s if self._in_flight else 0.0
