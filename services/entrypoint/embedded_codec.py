"""The codec in this process: one hop less, at the price of this process's cores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from pelagos.recipe.v1 import recipe_pb2 as recipe

from services.recipe.client import EmbeddedRecipe, RecipeConfig

T = TypeVar("T")

# A larger body takes longer to encode than to move to a thread; the native code gives the lock up.
_INLINE_BODY_BYTES: Final = 32 * 1024


class EmbeddedCodec:
    """`neighbours.Codec` over the embedded recipe."""

    def __init__(self, embedded: EmbeddedRecipe) -> None:
        self._recipe = embedded

    @classmethod
    def load(
        cls, tokenizer_folder: str, tokenizers: dict[str, str], models: dict[str, str]
    ) -> EmbeddedCodec:
        """Loads the tokenizers. Raises: RuntimeError, ValueError."""
        config = RecipeConfig(
            tokenizer_folder=tokenizer_folder, tokenizers=tokenizers, models=models
        )
        return cls(EmbeddedRecipe(config))

    async def encode(self, request: recipe.EncodeRequest) -> recipe.EncodeResponse:
        """Converts, renders and encodes."""
        if len(request.body) <= _INLINE_BODY_BYTES:
            return await self._recipe.encode(request)
        return await asyncio.to_thread(_finish, self._recipe.encode(request))

    async def count_tokens(self, request: recipe.CountTokensRequest) -> recipe.CountTokensResponse:
        """Counts."""
        if len(request.body) <= _INLINE_BODY_BYTES:
            return await self._recipe.count_tokens(request)
        return await asyncio.to_thread(_finish, self._recipe.count_tokens(request))

    async def list_models(self) -> Sequence[recipe.Model]:
        """Lists what the codec knows."""
        return await self._recipe.list_models()

    async def run(
        self,
        next_batch: Callable[[], asyncio.Future[Sequence[recipe.ParseItem]]],
        on_results: Callable[[Sequence[recipe.ParseResult]], None],
    ) -> None:
        """Parses batches as they come; never lost."""
        async with self._recipe.parse() as parsing:
            while True:
                on_results(await parsing.step(await next_batch()))


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns what a coroutine returns that never waits for anything."""
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        return stopped.value  # type: ignore[no-any-return]
    coroutine.close()
    raise AssertionError("the embedded codec does not wait")
