"""Images of a prompt as engines and cache keys know them.

The digest must be known before routing, where no pixels are decoded (S-05): it covers the
preprocessor's revision, the size read from the header, and the bytes as received, each with its
length, so that equal placeholders with different pictures never share KV (UR-35). With low detail
the size is the one that is left of it: the codec counted the span for that one, and the same
picture in full is another.
Source: kvcache-and-balancing.md, section 2; recipe.md, section 11.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from pelagos.engine.v1 import records_pb2 as records
from pelagos.recipe.v1 import recipe_pb2 as recipe

from services.common.errors import Failure, Reason
from services.kvstore.client import media_digest

_LOW_DETAIL: Final = "low"
_LOW_DETAIL_MAX_PX: Final = 512


def media_spans(
    images: Iterable[recipe.Image], preprocessor_revision: str, max_bytes: int
) -> list[records.MediaSpan]:
    """Returns the spans of a prompt's images.

    Raises: Failure(IMAGE_INVALID) for one without data, Failure(NOT_FITTING) when together they
    are more than may travel with a request.
    """
    spans = []
    num_bytes = 0
    for image in images:
        if not image.data or not image.num_tokens:
            raise Failure(
                Reason.IMAGE_INVALID, f"{image.path or 'an image'}: the image has no data"
            )
        num_bytes += len(image.data)
        if num_bytes > max_bytes:
            raise Failure(
                Reason.NOT_FITTING,
                f"the images of the request take more than {max_bytes} bytes",
                {"max_bytes": str(max_bytes)},
            )
        width, height = declared_size(image)
        spans.append(
            records.MediaSpan(
                start=image.start,
                num_tokens=image.num_tokens,
                width=width,
                height=height,
                digest=media_digest(preprocessor_revision, width, height, image.data),
                data=image.data,
                detail=image.detail,
            )
        )
    return spans


def declared_size(image: recipe.Image) -> tuple[int, int]:
    """Returns width and height as the encoder is to plan them: low detail shrinks the long side."""
    side = max(image.width, image.height)
    if image.detail != _LOW_DETAIL or side <= _LOW_DETAIL_MAX_PX:
        return image.width, image.height
    scale = _LOW_DETAIL_MAX_PX / side
    # Halves go up, as in the codec; Python's own round() would take them to the even side.
    return (
        max(1, math.floor(image.width * scale + 0.5)),
        max(1, math.floor(image.height * scale + 0.5)),
    )
