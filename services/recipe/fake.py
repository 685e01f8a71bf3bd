"""The codec for the tests of siblings: the real one, embedded, loaded once per process.

recipe = FakeRecipe()
encoded = await recipe.encode(pb.EncodeRequest(protocol=pb.PROTOCOL_CHAT, body=body))

It is pure and starts in a fraction of a second, so a second implementation would only be wrong
in places.
"""

from __future__ import annotations

from functools import cache

from services.recipe.client import EmbeddedRecipe
from services.recipe.config import RecipeConfig
from services.recipe.registry import Registry, load_registry


@cache
def _registry() -> Registry:
    return load_registry(RecipeConfig())


class FakeRecipe(EmbeddedRecipe):
    """The defaults of the service, without a server."""

    def __init__(self) -> None:
        config = RecipeConfig()
        super().__init__(config, _registry())
