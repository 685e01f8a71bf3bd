"""Responses. Nothing is stored: `store` reads as false, there is no `previous_response_id`."""

from __future__ import annotations

from services.common.errors import Api
from services.entrypoint.api.dialect import Dialect

DIALECT = Dialect(
    Api.RESPONSES,
    paths=("/v1/responses", "/responses", "/beta/responses"),
    takes_images=True,
)
