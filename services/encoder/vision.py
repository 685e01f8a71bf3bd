"""The vision network behind the card: decodes, fits and encodes in a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from services.common.errors import Failure, Reason
from services.encoder.config import EncoderConfig
from services.encoder.engine import Item


class TorchEncoder:
    """Implements `Encoder` with the tower of the model's checkpoint."""

    def __init__(self, config: EncoderConfig) -> None:
        # Light engines never get here: torch is loaded by the first card that asks for it.
        from services.engine.model.serve import tower_of

        self._model = config.model
        self._worker = ThreadPoolExecutor(1, "vision")
        self._tower = tower_of(config.model.torch)

    async def forward(self, items: list[Item]) -> list[bytes | Failure]:
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(self._worker, self._encode, item) for item in items]

    def _encode(self, item: Item) -> bytes | Failure:
        """Returns [tokens, hidden] bf16; an image that cannot be read is its own fault."""
        import torch

        from services.engine.model.vision import fit_pixels

        plan, ratio = item.plan, self._model.patches.max_wh_ratio
        stretch = ratio is not None and plan.width >= ratio * plan.height
        try:
            pixels: np.ndarray = fit_pixels(item.data, plan.width, plan.height, stretch=stretch)
        except (OSError, ValueError) as error:
            return Failure(Reason.IMAGE_INVALID, f"the image cannot be decoded: {error}")
        with torch.inference_mode():
            span = self._tower.encode([pixels])[0].to(torch.bfloat16)
        assert len(span) == plan.num_tokens, "the plan counts the span's rows"
        return span.contiguous().view(torch.uint8).numpy().tobytes()
