"""Patches, two-dimensional rotation and attention of the vision tower. Source: model.md, 17."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def patchify(pixels: Tensor, patch: int) -> Tensor:
    """Cuts an image into patches, row-major, each flattened channel-major.

    Args:
        pixels: [3, h, w], sides multiples of `patch`.
    Returns: [(h / patch) * (w / patch), 3 * patch * patch].
    """
    channels, height, width = pixels.shape
    grid = pixels.reshape(channels, height // patch, patch, width // patch, patch)
    return grid.permute(1, 3, 0, 2, 4).reshape(-1, channels * patch * patch)


def rotations_2d(rows: int, columns: int, head_dim: int, theta: float) -> Tensor:
    """Returns the angles of a grid in row-major order: row pairs, then column pairs. [P, d / 2]."""
    quarter = head_dim // 4
    steps = torch.arange(quarter, dtype=torch.float32) * 2 / (head_dim // 2)
    frequencies = theta**-steps
    row = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies
    column = torch.arange(columns, dtype=torch.float32)[:, None] * frequencies
    return torch.cat(
        (
            row[:, None, :].expand(rows, columns, quarter),
            column[None, :, :].expand(rows, columns, quarter),
        ),
        -1,
    ).reshape(rows * columns, -1)


def rope_2d(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates halves of each head: x [P, h, d], angles [P, d / 2]; float32 inside."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def vit_attention(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    """Full attention within one image. q, k, v: [P, h, d]; returns [P, h, d]."""
    q, k = rope_2d(q, angles), rope_2d(k, angles)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    )
    return out[0].transpose(0, 1)
