"""What the codec knows of its models, asked for now and then and remembered in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from pelagos.recipe.v1 import recipe_pb2 as recipe

from services.common.clock import Clock
from services.common.errors import Failure

_KEEP_S: Final = 30.0


class Lister(Protocol):
    """The part of the codec that is needed here."""

    async def list_models(self) -> Sequence[recipe.Model]:
        """Lists models and tokenizers."""
        ...


class CodecModels:
    """The codec's table; an old one serves while the codec is away."""

    def __init__(self, codec: Lister, clock: Clock) -> None:
        self._codec = codec
        self._clock = clock
        self._models: Sequence[recipe.Model] = ()
        self._until_s = 0.0

    async def all(self) -> Sequence[recipe.Model]:
        """Returns the models. Raises Failure when they were never heard of."""
        if self._clock.now_s() >= self._until_s or not self._models:
            try:
                self._models = await self._codec.list_models()
                self._until_s = self._clock.now_s() + _KEEP_S
            except Failure:
                if not self._models:
                    raise
        return self._models

    async def special_ids(self, tokenizer_id: str) -> dict[str, int]:
        """Returns the named special tokens of a tokenizer, nothing for an unknown one."""
        for model in await self.all():
            if model.tokenizer_id == tokenizer_id:
                return dict(model.special_ids)
        return {}
