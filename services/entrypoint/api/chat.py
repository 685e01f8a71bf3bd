"""Chat Completions."""

from __future__ import annotations

from services.common.errors import Api
from services.entrypoint.api.dialect import Dialect

DIALECT = Dialect(
    Api.CHAT,
    paths=("/v1/chat/completions", "/chat/completions", "/beta/chat/completions"),
    takes_images=True,
)
