"""RMSNorm and rotary positions. Source: model.md, section 4."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalises rows: x * rsqrt(mean(x^2) + eps) * weight in float32, one cast at the end.

    Args:
        x: [..., d] float; weight: [d] float32, None for ones.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        scaled = scaled * weight
    return scaled.to(x.dtype)


def rope_frequencies(
    theta: float,
    rope_dim: int,
    *,
    factor: float = 1.0,
    original_len: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Returns the angle per position of each pair, [rope_dim / 2] float32.

    `original_len` above 0 applies YaRN: pairs that turn often keep their angle, slow ones are
    stretched by `factor`, with a ramp between.
    """
    pairs = torch.arange(0, rope_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / theta ** (pairs / rope_dim)
    if original_len == 0:
        return frequencies
    low, high = yarn_range(theta, rope_dim, original_len, beta_fast, beta_slow)
    ramp = ((torch.arange(rope_dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def yarn_range(
    theta: float, rope_dim: int, original_len: int, beta_fast: float, beta_slow: float
) -> tuple[int, int]:
    """Returns (first pair that is stretched at all, first that is stretched wholly)."""

    def pair_of(rotations: float) -> float:
        return rope_dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), rope_dim - 1)
    return low, high


def rotations(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Returns e^(i * position * frequency), [n, pairs] complex64."""
    angles = positions.float()[:, None] * frequencies
    return torch.complex(angles.cos(), angles.sin())


def rope_(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    """Turns adjacent pairs of the last channels of every head, in place; returns x.

    Args:
        x: [n, h, d] float, last dimension contiguous; turns: [n, pairs] from `rotations`.
        inverse: turns back.
    """
    turns = (turns.conj().resolve_conj() if inverse else turns)[:, None, :]
    tail = x[..., x.shape[-1] - 2 * turns.shape[-1] :]
    if x.dtype == torch.float32:
        pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2)))
        pairs.mul_(turns)
        return x
    pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)).contiguous())
    tail.copy_(torch.view_as_real(pairs * turns).flatten(-2))
    return x
