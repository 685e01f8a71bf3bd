"""Sinkhorn's iteration over planes: the 16 coefficients outermost, rows innermost.

The iteration is dozens of tiny steps on a 4 x 4 matrix per row; on a CPU its price is the calls.
Additions and divisions are rounded exactly, so that a row's bits do not depend on the others.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.hyper import mix_logits


def hc_mixes(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    project: object = F.linear,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.reference.hyper.hc_mixes`."""
    pre, post, logits = mix_logits(h, fn, base, scale, hc_eps, norm_eps, project)
    comb = logits.softmax(-1).permute(1, 2, 0).contiguous().numpy()  # [in, out, n]
    eps = np.float32(hc_eps)
    comb += eps
    rows = np.empty((comb.shape[0], 1, comb.shape[2]), np.float32)
    columns = np.empty((1, *comb.shape[1:]), np.float32)

    def by_column() -> None:
        np.add.reduce(comb, axis=0, keepdims=True, out=columns)
        np.add(columns, eps, out=columns)
        np.divide(comb, columns, out=comb)

    by_column()
    for _ in range(iterations - 1):
        np.add.reduce(comb, axis=1, keepdims=True, out=rows)
        np.add(rows, eps, out=rows)
        np.divide(comb, rows, out=comb)
        by_column()
    return pre, post, torch.from_numpy(comb).permute(2, 0, 1)
