"""Hyper-connections: several residual streams, mixed by coefficients of the token itself.

The last coefficients are a doubly stochastic matrix, made by Sinkhorn's iteration. The mix of a
site is consumed by the next one. Source: model.md, section 5.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.norm import rms_norm


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
    """Returns (pre [n, M], post [n, M], comb [n, M, M]), float32.

    Args:
        h: [n, M, D]; fn: [M * (M + 2), M * D]; base: [M * (M + 2)]; scale: [3], float32.
        project: linear to use in place of `F.linear` where row tiles are fixed.
    """
    pre, post, logits = mix_logits(h, fn, base, scale, hc_eps, norm_eps, project)
    comb = logits.softmax(-1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    return pre, post, comb


def mix_logits(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    hc_eps: float,
    norm_eps: float,
    project: object = F.linear,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns pre, post, and the combination before it is normalised, [n, M, M]."""
    streams = h.shape[1]
    flat = h.flatten(1).float()
    z = project(flat, fn)  # type: ignore[operator]
    z = z * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    widths = torch.cat(
        [scale[i].expand(num) for i, num in enumerate((streams, streams, streams * streams))]
    )
    z = torch.addcmul(base, z, widths)
    gates = z[:, : 2 * streams].sigmoid()
    return (
        gates[:, :streams] + hc_eps,
        2 * gates[:, streams:],
        z[:, 2 * streams :].unflatten(1, (streams, streams)),
    )


def hc_collapse(h: Tensor, pre: Tensor) -> Tensor:
    """Returns the weighted sum of the streams, [n, D], summed in float32."""
    return torch.bmm(pre[:, None, :], h.float())[:, 0].to(h.dtype)


def hc_expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Returns the streams after a site: out[j] = post[j] * y + sum_i comb[i, j] * h[i]."""
    mixed = torch.bmm(comb.transpose(1, 2), h.float())
    return mixed.addcmul_(post[:, :, None], y.float()[:, None, :]).to(h.dtype)


def hc_expand_collapse_norm(
    y: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    pre_prev: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Closes one site and opens the next: (new streams, normed input of the next site)."""
    out = hc_expand(y, h, post, comb)
    return out, rms_norm(hc_collapse(out, pre_prev), norm_weight, eps)
