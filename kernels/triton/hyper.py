"""Hyper-connections: coefficients by Sinkhorn's iteration, and expand, collapse, norm in one pass.

The iteration is forty tiny steps on an M x M matrix per row: on a GPU its price is launches, so it
runs in registers, many rows per program. Source: model.md, section 5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.products import product

_ROWS = 32  # rows of one program of the iteration


def hc_mixes(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    project: Callable[[Tensor, Tensor], Tensor] = product,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.reference.hyper.hc_mixes`; M is a power of two."""
    rows, streams, width = h.shape
    flat = h.reshape(rows, streams * width)
    z = project(flat.float(), fn)
    pre = torch.empty(rows, streams, device=h.device)
    post = torch.empty_like(pre)
    comb = torch.empty(rows, streams, streams, device=h.device)
    if rows:
        square = torch.linalg.vector_norm(flat.float(), dim=1).square()
        _mixes_kernel[(triton.cdiv(rows, _ROWS),)](
            z.contiguous(), square, base, scale, pre, post, comb,
            rows, flat.shape[1], iterations, hc_eps, norm_eps, streams, _ROWS,
        )  # fmt: skip
    return pre, post, comb


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _mixes_kernel(
    z_ptr, square_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr,
    num_rows, width, iterations, hc_eps, norm_eps, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    there = row < num_rows
    norm = tl.load(square_ptr + row, mask=there, other=1.0) / width
    factor = 1.0 / tl.sqrt(norm + norm_eps)
    own = tl.arange(0, M)
    columns = M * (M + 2)
    z = z_ptr + row[:, None] * columns
    some = there[:, None]
    first = tl.load(z + own[None, :], mask=some, other=0.0) * factor[:, None]
    pre = _sigmoid(first * tl.load(scale_ptr) + tl.load(base_ptr + own)[None, :]) + hc_eps
    tl.store(pre_ptr + row[:, None] * M + own[None, :], pre, mask=some)
    second = tl.load(z + M + own[None, :], mask=some, other=0.0) * factor[:, None]
    gate = second * tl.load(scale_ptr + 1) + tl.load(base_ptr + M + own)[None, :]
    tl.store(post_ptr + row[:, None] * M + own[None, :], 2.0 * _sigmoid(gate), mask=some)
    # [row, in, out]
    cell = own[:, None] * M + own[None, :]
    at = row[:, None, None] * columns + 2 * M + cell[None, :, :]
    all_there = there[:, None, None]
    c = tl.load(z_ptr + at, mask=all_there, other=0.0) * factor[:, None, None]
    c = c * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * M + cell)[None, :, :]
    c = tl.exp(c - tl.max(c, 2)[:, :, None])
    c = c / tl.sum(c, 2)[:, :, None] + hc_eps
    c = c / (tl.sum(c, 1)[:, None, :] + hc_eps)
    for _ in range(iterations - 1):
        c = c / (tl.sum(c, 2)[:, :, None] + hc_eps)
        c = c / (tl.sum(c, 1)[:, None, :] + hc_eps)
    tl.store(comb_ptr + row[:, None, None] * M * M + cell[None, :, :], c, mask=all_there)


def hc_expand_collapse_norm(
    y: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    pre_prev: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.hyper.hc_expand_collapse_norm`: streams are read and written once."""
    rows, streams, width = h.shape
    out = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    x = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if rows:
        _close_kernel[(rows,)](
            y.contiguous(), h.contiguous(), post.contiguous(), comb.contiguous(),
            pre_prev.contiguous(), norm_weight, out, x,
            width, eps, streams, triton.next_power_of_2(width),
        )  # fmt: skip
    return out, x


@triton.jit
def _close_kernel(
    y_ptr, h_ptr, post_ptr, comb_ptr, pre_ptr, weight_ptr, out_ptr, x_ptr,
    width, eps, M: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAD)
    there = at < width
    y = tl.load(y_ptr + row * width + at, mask=there, other=0.0).to(tl.float32)
    kind = h_ptr.dtype.element_ty
    total = tl.zeros((PAD,), tl.float32)
    for j in tl.static_range(M):
        mixed = tl.load(post_ptr + row * M + j) * y
        for i in tl.static_range(M):
            part = tl.load(h_ptr + (row * M + i) * width + at, mask=there, other=0.0)
            mixed += tl.load(comb_ptr + row * M * M + i * M + j) * part.to(tl.float32)
        # What the next site reads has been rounded to the streams' type.
        kept = mixed.to(kind)
        tl.store(out_ptr + (row * M + j) * width + at, kept, mask=there)
        total += tl.load(pre_ptr + row * M + j) * kept.to(tl.float32)
    total = total.to(kind).to(tl.float32)
    mean = tl.sum(total * total, 0) / width
    weight = tl.load(weight_ptr + at, mask=there, other=0.0)
    normed = total * (1.0 / tl.sqrt(mean + eps)) * weight
    tl.store(x_ptr + row * width + at, normed.to(kind), mask=there)


SOURCES = {
    "hc_mixes": (_mixes_kernel, {}, {"M": 4, "R": _ROWS}),
    "hc_expand_collapse_norm": (
        _close_kernel,
        {"y_ptr": "bf16", "h_ptr": "bf16", "out_ptr": "bf16", "x_ptr": "bf16"},
        {"M": 4, "PAD": 8192},
    ),
}
