"""An encoder engine in memory, with the same contract as the client: the real card, no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from services.encoder.client import Embedding, Picture, Size
from services.encoder.config import EncoderConfig, EncoderModelConfig
from services.encoder.engine import EncoderEngine
from services.encoder.patches import Plan


class FakeEncoder:
    """`async with FakeEncoder() as encoder: await encoder.encode("", picture)`."""

    def __init__(self, config: EncoderConfig | None = None) -> None:
        self.engine = EncoderEngine(
            config or EncoderConfig(model=EncoderModelConfig(time_scale=0.0))
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeEncoder:
        self._task = asyncio.create_task(self.engine.run(), name="fake encoder")
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

    async def plan(self, address: str, sizes: Sequence[tuple[int, int]]) -> list[Size]:
        """Geometry of declared sizes."""
        return [_size(self.engine.plan(width, height)) for width, height in sizes]

    async def encode(self, address: str, picture: Picture) -> Embedding:
        """Encodes one image."""
        done = await self.engine.encode(
            picture.width, picture.height, picture.data, picture.digest, picture.tenant
        )
        return Embedding(_size(done.plan), self.engine.config.model.hidden, done.data, done.cached)


def _size(plan: Plan) -> Size:
    return Size(plan.width, plan.height, plan.num_tokens, plan.num_patches)
