"""What a device knows of one sequence between steps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.engine.model.rows import NO_TOKEN, Int
from services.engine.runner import Start, StateFault


@dataclass
class DeviceSequence:
    """Tokens as far as the device has come, and what its next step starts from."""

    start: Start
    num_ids: int = field(init=False)
    num_cached: int = 0
    valid_start: int = 0  # smallest position whose encoder window was computed or loaded
    decoder_from: int = 0  # the same of the decoder half
    started: bool = False
    last_step: int = 0
    on_device: bool = False  # the device carries it from step to step (resident.py)
    drafts: Int = field(default_factory=lambda: np.zeros(0, np.int64))
    confidences: tuple[float, ...] = ()
    proposals: Tensor | None = None  # [G, V], what the drafts were drawn from
    copying: Future[None] | None = None
    copies: dict[int, tuple[int, list[Tensor]]] = field(default_factory=dict)
    pictures: dict[int, Tensor] = field(default_factory=dict)  # embeddings by first position
    _ids: Int = field(init=False)
    _image: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        tokens = self.start.tokens
        known = np.frombuffer(tokens.ids, np.uint32).astype(np.int64)
        self.num_ids = len(known)
        self._ids = np.zeros(max(64, 2 * len(known)), np.int64)
        self._ids[: len(known)] = known
        self._image = np.zeros(len(known), bool)
        for span in tokens.media:
            self._image[span.start : span.end] = True

    @property
    def slot(self) -> int:
        return self.start.state_slot

    @property
    def golden(self) -> int:
        """The newest token, whose KV is not computed yet."""
        return int(self._ids[self.num_ids - 1])

    def append(self, ids: Int) -> None:
        needed = self.num_ids + len(ids)
        if needed > len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(needed, np.int64)))
        self._ids[self.num_ids : needed] = ids
        self.num_ids = needed

    def ids(self, first: int, last: int) -> Int:
        return self._ids[first:last]

    def image(self, first: int, last: int) -> np.ndarray | None:
        """Returns which positions belong to images, None when none of them does."""
        flags = self._image[first:last]
        if not flags.any():
            return None
        return np.pad(flags, (0, last - first - len(flags)))

    def recent(self, first: int, count: int) -> Int:
        """Returns the `count` ids before a position as n-grams see them."""
        low = max(0, first - count)
        ids = self._ids[low:first].copy()
        flags = self._image[low:first]
        ids[: len(flags)][flags] = NO_TOKEN
        return np.concatenate((np.full(count - len(ids), NO_TOKEN), ids))

    def pictures_in(self, first: int, last: int) -> tuple[tuple[int, Tensor], ...]:
        """Returns the embeddings of image rows in [first, last), by offset.

        Raises: StateFault where an image came without its embedding.
        """
        found = []
        for span in self.start.tokens.media:
            low, high = max(first, span.start), min(last, span.end)
            if low >= high:
                continue
            piece = self.pictures.get(span.start)
            if piece is None:
                raise StateFault(self.start.seq_id, f"image at {span.start}: no embedding")
            found.append((low - first, piece[low - span.start : high - span.start]))
        return tuple(found)

    def take_picture(self, first: int, data: bytes, width: int) -> None:
        """Keeps the embedding of the image at `first`. Raises: StateFault for a wrong size."""
        span = next((s for s in self.start.tokens.media if s.start == first), None)
        wanted = 0 if span is None else span.num_tokens * width * 2
        if span is None or len(data) != wanted:
            raise StateFault(
                self.start.seq_id, f"image at {first}: {len(data)} bytes, expected {wanted}"
            )
        values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
        self.pictures[first] = values.view(span.num_tokens, width).float()
