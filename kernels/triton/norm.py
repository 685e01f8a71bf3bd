"""RMSNorm of a row and rotation of its last channels, in one pass.

Window KV and queries are normed and turned right after their projection; apart these are two reads
and two writes of every row. Source: model.md, section 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `kernels.reference.norm.rms_norm`."""
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if len(flat):
        _norm_kernel[(len(flat),)](
            flat, flat if weight is None else weight, out, flat.stride(0), flat.shape[1], eps,
            weight is not None, triton.next_power_of_2(flat.shape[1]),
        )  # fmt: skip
    return out.view(x.shape)


def rope_(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    """As `kernels.reference.norm.rope_`: in place; x [n, h, d], turns [n, pairs] complex64."""
    rows, heads, dim = x.shape
    pairs = turns.shape[1]
    if rows and heads:
        _rope_kernel[(rows, heads)](
            x, torch.view_as_real(turns).contiguous(), x.stride(0), x.stride(1), dim, pairs,
            inverse, triton.next_power_of_2(pairs),
        )  # fmt: skip
    return x


@triton.jit
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, width, eps, WEIGHTED: tl.constexpr, PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAD)
    there = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    out = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps))
    if WEIGHTED:
        out *= tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _rope_kernel(
    x_ptr, turn_ptr, row_stride, head_stride, dim, pairs, INVERSE: tl.constexpr, PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, PAD)
    there = pair < pairs
    turn = turn_ptr + (row * pairs + pair) * 2
    cos = tl.load(turn, mask=there, other=1.0)
    sin = tl.load(turn + 1, mask=there, other=0.0)
    if INVERSE:
        sin = -sin
    at = x_ptr + row * row_stride + head * head_stride + dim - 2 * pairs + 2 * pair
    a = tl.load(at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + 1, mask=there, other=0.0).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    tl.store(at, (a * cos - b * sin).to(kind), mask=there)
    tl.store(at + 1, (a * sin + b * cos).to(kind), mask=there)


SOURCES = {
    "rms_norm": (
        _norm_kernel,
        {"x_ptr": "bf16", "out_ptr": "bf16"},
        {"WEIGHTED": True, "PAD": 8192},
    ),
    "rope_": (_rope_kernel, {"x_ptr": "bf16"}, {"INVERSE": True, "PAD": 32}),
}
