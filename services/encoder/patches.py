"""Geometry of an image: planned size, tokens, patches; and its cache key.

Pure arithmetic on declared width and height: no pixel is decoded here (S-05).
Source: engine.md, sections 6.1 to 6.3; recipe.md, sections 11.3 and 11.4; model.md, section 17.1.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

MAX_ROUNDS = 10
MAX_SIDE_PX = 16_383  # what WebP can hold; the codec counts every image's span within it
MAX_SIDE_ROUNDS = 6


@dataclass(frozen=True)
class PatchConfig:
    patch: int = 14
    downsample: int = 3
    max_tokens: int = 1024
    min_pixels: int = 544 * 544  # 0 is off
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.patch < 1 or self.downsample < 1 or self.max_tokens < 4:
            raise ValueError("patch and downsample are positive, max_tokens is at least 4")


@dataclass(frozen=True)
class Plan:
    """Planned size in pixels, its grids, and the tokens of the span it fills in a prompt."""

    width: int
    height: int
    vit_width: int
    vit_height: int
    llm_width: int
    llm_height: int

    @property
    def num_tokens(self) -> int:
        """START, per row its cells and one NEWLINE, END."""
        return self.llm_height * (self.llm_width + 1) + 2

    @property
    def num_patches(self) -> int:
        """The load of an image: ViT patches after planning (6.2)."""
        return self.vit_width * self.vit_height


class NotConverged(ValueError):
    """The planned size still changes after ten rounds: our own mistake, not the caller's."""


def plan_geometry(width: int, height: int, config: PatchConfig) -> Plan:
    """Planned size and grids of an image of declared `width` x `height`, both at least 1."""
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} x {height} pixels has no area")
    size = _settle(width, height, config)
    for _ in range(MAX_SIDE_ROUNDS):
        if max(size) <= MAX_SIDE_PX:
            return _grids(*size, config)
        size = _settle(*_within_side(*size, config.patch), config)
    raise NotConverged(f"{width} x {height} does not settle")


def _settle(width: int, height: int, config: PatchConfig) -> tuple[int, int]:
    """The size that plans to itself."""
    size = (width, height)
    for _ in range(MAX_ROUNDS):
        planned = _plan_once(*size, config)
        if planned == size:
            return size
        size = planned
    raise NotConverged(f"{width} x {height} does not settle")


def _within_side(width: int, height: int, patch: int) -> tuple[int, int]:
    """A slim image scaled onto the grid within the longest side (recipe.md, section 11.4)."""
    longest = MAX_SIDE_PX // patch * patch
    scale = longest / max(width, height)
    return (
        min(math.ceil(width * scale / patch) * patch, longest),
        min(math.ceil(height * scale / patch) * patch, longest),
    )


def _plan_once(w: int, h: int, config: PatchConfig) -> tuple[int, int]:
    patch = config.patch
    if config.max_wh_ratio and w > config.max_wh_ratio * h:
        w = int(config.max_wh_ratio * h)
    if config.min_pixels and w * h < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (w * h))
        w, h = int(w * scale), int(h * scale)
    plan = _grids(-(-w // patch) * patch, -(-h // patch) * patch, config)
    if plan.num_tokens <= config.max_tokens:
        return plan.width, plan.height
    return _shrink(w, h, config)


def _shrink(w: int, h: int, config: PatchConfig) -> tuple[int, int]:
    """The largest size of the same shape whose tokens fit (step 5 of 6.1)."""
    patch, cell = config.patch, config.patch * config.downsample
    budget = config.max_tokens - 2
    ratio = h / w
    x = math.sqrt(budget / ratio + 0.25) - 0.5
    y = x * ratio
    if x < 1:
        return cell, budget // 2 * cell
    if y < 1:
        return (budget - 1) * cell, cell
    factor = min(int(x) * cell / w, int(y) * cell / h)
    return int(w * factor / patch) * patch, int(h * factor / patch) * patch


def _grids(w: int, h: int, config: PatchConfig) -> Plan:
    vit_width, vit_height = w // config.patch, h // config.patch
    r = config.downsample
    return Plan(w, h, vit_width, vit_height, -(-vit_width // r), -(-vit_height // r))


def image_load(width: int, height: int, config: PatchConfig, raw: bool = False) -> int:
    """Patches an image costs; `raw` counts the declared size instead of the planned one (6.2)."""
    if raw:
        return -(-width // config.patch) * -(-height // config.patch)
    return plan_geometry(width, height, config).num_patches


def cache_key(
    weights_id: str, processor_id: str, config: PatchConfig, width: int, height: int, data: bytes
) -> bytes:
    """Key of an embedding: everything that decides its bytes (6.3)."""
    digest = hashlib.sha256()
    for part in (weights_id, processor_id, repr(config), f"{width}x{height}"):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    digest.update(data)
    return digest.digest()


def pick_card(patches_in_progress: list[int]) -> int:
    """The card with the fewest patches queued and running; ties to the lowest (T-VIS-1)."""
    return min(range(len(patches_in_progress)), key=lambda card: (patches_in_progress[card], card))


def pack_batches(loads: list[int], max_patches: int) -> list[list[int]]:
    """Indices of images packed in order into forwards of at most `max_patches` patches.

    An image larger than a whole forward gets one of its own.
    """
    batches: list[list[int]] = []
    room = 0
    for index, load in enumerate(loads):
        if not batches or load > room:
            batches.append([])
            room = max_patches
        batches[-1].append(index)
        room -= load
    return batches
