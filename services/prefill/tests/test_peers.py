"""What a request may ask of the encoders at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.encoder.client import Embedding, Picture, Size
from services.engine.requests import Image
from services.kvstore.client import MediaSpan
from services.lb.vision.client import Card
from services.prefill.peers import GrpcPeers


class Cards:
    """Every image gets the one card; counts how many are there at a time."""

    def __init__(self) -> None:
        self.num_now = self.num_most = 0

    @asynccontextmanager
    async def card(self, num_patches: int, *_: object) -> AsyncIterator[Card]:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            yield Card("c", "c:1", "ticket")
        finally:
            self.num_now -= 1


class Encoder:
    async def encode(self, address: str, picture: Picture) -> Embedding:
        await asyncio.sleep(0)
        return Embedding(Size(14, 14, 4, 1), 1, picture.data, cached=False)


async def test_a_request_of_many_images_leaves_room_on_the_cards() -> None:
    parts: Any = None
    peers = GrpcPeers(*[parts] * 6, block_bytes=1, ring=parts, rng=random.Random(1))
    peers._cards = cards = Cards()  # type: ignore[assignment]
    peers._encoder = Encoder()  # type: ignore[assignment]
    images = [
        Image(MediaSpan(4 * i, 4, bytes(32)), 14, 14, i.to_bytes(2, "little")) for i in range(600)
    ]
    found = await peers.encode("r", "t", images)
    assert found == {image.span.start: image.data for image in images}
    assert 1 < cards.num_most <= 16
    assert cards.num_now == 0
