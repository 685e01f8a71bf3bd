"""Hyper-connection coefficients with NumPy: the iteration runs over planes of coefficients.

It is dozens of tiny steps on a 4 x 4 matrix per row; on a CPU its price is the calls, and NumPy's
are a fraction of torch's. With the coefficients outermost and the rows innermost every step is
one pass over rows, whose additions and divisions are rounded exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def hc_mixes(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    project: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.reference.hyper.hc_mixes`."""
    rows, streams, width = h.shape
    flat = h.reshape(rows, streams * width).float()
    z = project(flat, fn).numpy()
    norm = torch.linalg.vector_norm(flat, dim=1).numpy()
    by, at = scale.numpy(), base.numpy()
    z = z * (1 / np.sqrt(norm * norm / np.float32(flat.shape[1]) + np.float32(norm_eps)))[:, None]
    eps = np.float32(hc_eps)
    with np.errstate(over="ignore"):
        pre = 1 / (1 + np.exp(-(z[:, :streams] * by[0] + at[:streams]))) + eps
        gate = z[:, streams : 2 * streams] * by[1] + at[streams : 2 * streams]
        post = 2 / (1 + np.exp(-gate))
    # [in, out, n]
    planes = np.ascontiguousarray((z[:, 2 * streams :] * by[2] + at[2 * streams :]).T)
    comb = planes.reshape(streams, streams, rows)
    comb = np.exp(comb - comb.max(axis=1, keepdims=True))
    comb = comb / comb.sum(axis=1, keepdims=True) + eps
    by_row = np.empty((streams, 1, rows), np.float32)
    by_column = np.empty((1, streams, rows), np.float32)
    add, divide = np.add.reduce, np.divide
    add(comb, axis=0, keepdims=True, out=by_column, initial=eps)
    divide(comb, by_column, out=comb)
    for _ in range(iterations - 1):
        add(comb, axis=1, keepdims=True, out=by_row, initial=eps)
        divide(comb, by_row, out=comb)
        add(comb, axis=0, keepdims=True, out=by_column, initial=eps)
        divide(comb, by_column, out=comb)
    mixed = torch.from_numpy(comb).permute(2, 0, 1)
    return torch.from_numpy(pre), torch.from_numpy(post), mixed
