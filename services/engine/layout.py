"""Geometry of a model's caches: block, window, ring and the byte layout two engines must share.

Nothing here is a constant of the code: a model configuration gives every number, and the digest of
all of them (`KvLayout.signature`) decides whether two engines may exchange KV.
Source: engine.md, sections 0 and 7.2; architecture.md, section 7 ("block size, ring, window").
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property


@dataclass(frozen=True)
class Geometry:
    """Token counts that the schedulers work with; the defaults are those of the Flash model."""

    block_tokens: int = 128
    window: int = 128  # the query at position i sees keys in [i - window + 1, i]
    max_draft: int = 5  # draft tokens produced per decode step (G)
    keep_tokens: int = 140  # suffix of the prompt that runs through the decoder layers (KEEP)

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.window < 1 or self.max_draft < 0:
            raise ValueError("block_tokens and window are positive, max_draft is not negative")
        if self.keep_tokens < self.window + self.back:
            # After rolling back every draft the window must still be whole (engine.md, 1.9).
            raise ValueError(
                f"keep_tokens is {self.keep_tokens}, the window needs {self.window + self.back}"
            )

    @property
    def back(self) -> int:
        """Most positions one decode step can write (BACK)."""
        return self.max_draft + 1

    @property
    def ring(self) -> int:
        """Slots per layer of a decode ring; position p lives in slot p mod ring."""
        return self.window + self.back

    @property
    def prefill_ring(self) -> int:
        """Slots a prefill ring needs so that the window before the last boundary is still there."""
        return self.ring + self.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True)
class Section:
    """Bytes of one source layer inside a block."""

    source_layer: int
    offset_bytes: int
    length_bytes: int
    element_format: str
    compress_ratio: int


@dataclass(frozen=True)
class Region:
    """Bytes of one part of a sequence's state: `slots` records of `record_bytes`."""

    name: str
    slots: int
    record_bytes: int
    storable: bool  # only encoder rings may be kept at an attach point (engine.md, section 0)

    @property
    def length_bytes(self) -> int:
        return self.slots * self.record_bytes


@dataclass(frozen=True)
class KvLayout:
    """What must be equal for bytes of two engines to be interchangeable."""

    geometry: Geometry
    block_bytes: int
    sections: tuple[Section, ...]
    regions: tuple[Region, ...]
    model_id: str
    weights_id: str
    byte_order: str = "little"

    def __post_init__(self) -> None:
        at = 0
        for section in self.sections:
            if section.offset_bytes != at:
                raise ValueError(f"section at {section.offset_bytes}, expected {at}")
            at += section.length_bytes
        if at > self.block_bytes:
            raise ValueError(f"sections need {at} bytes, a block has {self.block_bytes}")

    @property
    def state_bytes(self) -> int:
        return sum(region.length_bytes for region in self.regions)

    @property
    def window_bytes(self) -> int:
        """Bytes of the part of a state that may be stored at an attach point."""
        return sum(region.length_bytes for region in self.regions if region.storable)

    @cached_property
    def signature(self) -> str:
        """Digest over every field; engines exchange KV only when theirs are equal."""
        # Every pick, reservation and transfer names it.
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
