"""`pelagos serve recipe`: wires the codec's service."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from pelagos.recipe.v1 import recipe_pb2_grpc as rpc

from services.common.config import ConfigError
from services.common.service import Runtime, run_service
from services.recipe.config import ROLE, RecipeConfig
from services.recipe.registry import load_registry
from services.recipe.server import RecipeServicer


async def build(runtime: Runtime[RecipeConfig]) -> None:
    """Loads the tokenizers, then serves."""
    try:
        registry = await asyncio.to_thread(load_registry, runtime.config)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    servicer = RecipeServicer(runtime.config, registry, runtime.metrics)
    runtime.server.add(rpc.add_RecipeServiceServicer_to_server, servicer, while_draining=("Parse",))
    runtime.census.register("recipe", "streams", lambda: servicer.num_streams)

    async def close() -> None:
        servicer.close()

    runtime.on_stop(close)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until it is told to stop."""
    return run_service(ROLE, RecipeConfig, build, argv)


if __name__ == "__main__":
    sys.exit(main())
