"""Hyper-connections in one call each: what they cost a CPU is calls, not arithmetic.

Making a 4 x 4 matrix doubly stochastic is dozens of tiny steps per row; the crate `native` takes
eight rows through them side by side. Other types than float32 go the plain way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import _native
from kernels.cpu.norm import is_native
from kernels.reference import hyper


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
    if any(x.requires_grad for x in (h, fn, base, scale)):
        return hyper.hc_mixes(
            h,
            fn,
            base,
            scale,
            iterations=iterations,
            hc_eps=hc_eps,
            norm_eps=norm_eps,
            project=project,
        )
    rows, streams, _ = h.shape
    flat = h.flatten(1).float().contiguous()
    pre = np.empty((rows, streams), np.float32)
    post = np.empty((rows, streams), np.float32)
    comb = np.empty((rows, streams, streams), np.float32)
    _native.hc_mixes(
        flat.numpy(),
        project(flat, fn).contiguous().numpy(),
        base.numpy(),
        scale.numpy(),
        streams,
        iterations,
        hc_eps,
        norm_eps,
        pre,
        post,
        comb,
    )
    return torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(comb)


def hc_expand_collapse_norm(
    y: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    pre_prev: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.hyper.hc_expand_collapse_norm`."""
    if not is_native(y, h, post, comb, pre_prev, norm_weight):
        return hyper.hc_expand_collapse_norm(y, h, post, comb, pre_prev, norm_weight, eps)
    streams = np.empty(h.shape, np.float32)
    x = np.empty(y.shape, np.float32)
    _native.hc_close(
        y.contiguous().numpy(),
        h.contiguous().numpy(),
        post.contiguous().numpy(),
        comb.contiguous().numpy(),
        pre_prev.contiguous().numpy(),
        norm_weight.numpy(),
        h.shape[1],
        eps,
        streams,
        x,
    )
    return torch.from_numpy(streams), torch.from_numpy(x)
