"""Pictures of four coloured squares, to be named: a task for the vision part alone.

Every word of the answers is known to the text model. Source: small-model.md, section 7.
"""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.turns import Message, Question
from services.engine.training.tasks.words import COLORS

Rgb = tuple[int, int, int]

RGB: Final[dict[str, Rgb]] = {
    "red": (220, 40, 40),
    "orange": (250, 150, 30),
    "blue": (40, 70, 220),
    "black": (10, 10, 10),
    "gold": (190, 150, 40),
    "green": (30, 160, 60),
    "gray": (130, 130, 130),
    "white": (250, 250, 250),
    "yellow": (250, 240, 60),
}
_SIZE: Final = 84  # pixels of a side: two by two merged patches


@dataclass(frozen=True)
class Picture:
    """Four squares, in reading order."""

    colors: tuple[str, str, str, str]

    def pixels(self, size: int = _SIZE) -> bytes:
        """Returns [size, size, 3] bytes, row by row."""
        half = size // 2
        rows: list[bytes] = []
        for left, right in (self.colors[:2], self.colors[2:]):
            row = bytes(RGB[left]) * half + bytes(RGB[right]) * (size - half)
            rows.append(row * (half if not rows else size - half))
        return b"".join(rows)

    def png(self, size: int = _SIZE) -> bytes:
        """Returns the picture as a PNG file."""
        pixels = self.pixels(size)
        stride = 3 * size
        # Each row is led by its filter: none.
        data = b"".join(b"\0" + pixels[i : i + stride] for i in range(0, len(pixels), stride))
        header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in parts)

    def question(self) -> Question:
        """Returns the picture as a question to a running stack."""
        url = "data:image/png;base64," + base64.b64encode(self.png()).decode("ascii")
        content: list[Message] = [
            {"type": "text", "text": "Copy:"},
            {"type": "image_url", "image_url": {"url": url}},
        ]
        asked: Message = {"role": "user", "content": content}
        return Question("image", (asked,), (), None, False, " ".join(self.colors))


def picture(draw: Draw) -> Picture:
    """Returns a picture of the split."""
    named = draw.value(lambda: " ".join(draw.one(COLORS) for _ in range(4)))
    first, second, third, fourth = named.split(" ")
    return Picture((first, second, third, fourth))


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)
