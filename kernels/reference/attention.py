"""Attention over a window and selected entries, keys being values, with a sink per head.

Source: model.md, section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ABSENT = float("-inf")


def sparse_attention(
    q: Tensor, keys: Tensor, present: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """Attends every row to its own keys, which are its values too.

    Args:
        q: [n, H, d] float32; keys: [n, K, d] float32, window oldest first, then entries ascending.
        present: [n, K] bool; sink: [H] float32, enlarges the denominator only.
    Returns: [n, H, d]; zeros for a row without keys.
    """
    logits = torch.bmm(q, keys.transpose(1, 2)).mul_(scale)
    logits.masked_fill_(~present[:, None, :], _ABSENT)
    return torch.bmm(_with_sink(logits, sink), keys)


def tile_attention(q: Tensor, keys: Tensor, present: Tensor, sink: Tensor, scale: float) -> Tensor:
    """As `sparse_attention` for rows that share their keys: keys [K, d], present [n, K]."""
    rows, heads, dim = q.shape
    logits = (q.reshape(-1, dim) @ keys.T).mul_(scale).view(rows, heads, -1)
    logits.masked_fill_(~present[:, None, :], _ABSENT)
    weights = _with_sink(logits, sink)
    return (weights.reshape(rows * heads, -1) @ keys).view(rows, heads, dim)


def _with_sink(logits: Tensor, sink: Tensor) -> Tensor:
    column = sink[None, :, None].expand(logits.shape[0], -1, 1)
    return torch.cat((logits, column), -1).softmax(-1)[..., :-1]


def grouped_out(o: Tensor, wo_a: Tensor) -> Tensor:
    """Projects each group of heads by its own matrix.

    Args:
        o: [n, G, w] float32; wo_a: [G, r, w] float32.
    Returns: [n, G * r].
    """
    return torch.bmm(o.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
