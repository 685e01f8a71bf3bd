"""The three HTTP dialects: paths, error shapes and limits that differ between them."""

from __future__ import annotations

from services.common.errors import Api
from services.entrypoint.api import chat, messages, responses
from services.entrypoint.api.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (chat.DIALECT, responses.DIALECT, messages.DIALECT)

__all__ = ["DIALECTS", "Dialect", "dialect_of"]


def dialect_of(api: Api) -> Dialect:
    """Returns the dialect of an API."""
    return next(dialect for dialect in DIALECTS if dialect.api is api)
