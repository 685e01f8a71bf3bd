"""What an image says of itself: its format and size, read from its header, no pixel decoded.

Runs on a worker thread; every failure is the image's own (IMAGE_INVALID).
Source: engine.md, section 6.4; reliability-and-security.md, S-05.
"""

from __future__ import annotations

import io
import struct
import warnings
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from services.common.errors import Failure, Reason

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


@dataclass(frozen=True)
class ImageFacts:
    format: str
    width: int
    height: int


def image_facts(data: bytes, max_bytes: int, max_pixels: int) -> ImageFacts:
    """Returns format and size. Raises: Failure(IMAGE_INVALID)."""
    if not data:
        raise Failure(Reason.IMAGE_INVALID, "the image has no bytes")
    if len(data) > max_bytes:
        raise Failure(
            Reason.IMAGE_INVALID,
            f"the image has {len(data)} bytes, the limit is {max_bytes}",
            {"num_bytes": str(len(data)), "max_bytes": str(max_bytes)},
        )
    try:
        with warnings.catch_warnings():
            # A size beyond the library's own limit is judged by ours, below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                facts = ImageFacts(image.format or "", image.width, image.height)
    except Image.DecompressionBombError:
        raise Failure(Reason.IMAGE_INVALID, "the image has too many pixels") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, struct.error):
        raise Failure(Reason.IMAGE_INVALID, "the bytes are not an image we read") from None
    if facts.width < 1 or facts.height < 1 or facts.width * facts.height > max_pixels:
        raise Failure(
            Reason.IMAGE_INVALID,
            f"the image has {facts.width} x {facts.height} pixels",
            {"width": str(facts.width), "height": str(facts.height)},
        )
    return facts
