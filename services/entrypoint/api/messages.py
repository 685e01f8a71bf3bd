"""Messages, and its token counting."""

from __future__ import annotations

from typing import Final

from services.common.errors import Api
from services.entrypoint.api.dialect import Dialect

DIALECT = Dialect(
    Api.MESSAGES,
    paths=("/v1/messages", "/messages", "/anthropic/v1/messages", "/beta/messages"),
    takes_images=False,  # its own limit is the total, images included
)
COUNT_TOKENS_PATHS: Final = tuple(f"{path}/count_tokens" for path in DIALECT.paths)
