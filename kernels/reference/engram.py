"""Rows of an n-gram memory, and the gate through which it enters the streams.

Source: model.md, section 13.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.stores import window_values


def engram_gather(table: Tensor, rows: Tensor) -> Tensor:
    """Returns rows of a table as they are stored, [*rows.shape, d] float32.

    table: [R, d + d / 32] uint8, E4M3 values, then E8M0 scales; rows: int64 of any shape.
    """
    found = window_values(table[rows.reshape(-1)])
    return found.view(*rows.shape, found.shape[-1])


def engram_gate(
    h: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    eps: float,
    image: Tensor | None = None,
) -> Tensor:
    """Adds the memory's value to each stream, as far as its key fits the stream.

    Args:
        h: [n, M, D]; key: [n, M, D]; value: [n, D]; weight: [M, D] float32, the product of the
            query's and the key's.
        image: [n] bool, rows that take nothing.
    Returns: [n, M, D], new streams.
    """
    wide, keys = h.float(), key.float()
    scale = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (wide * weight * keys).sum(-1) * scale * wide.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp(min=1e-6).sqrt())
    if image is not None:
        gate = gate.masked_fill(image[:, None], 0.0)
    return (wide + gate[:, :, None] * value.float()[:, None, :]).to(h.dtype)
