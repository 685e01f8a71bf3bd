"""Scores of compressed entries for the index, keys read from their pages as they are stored.

A program takes one row and a tile of entries; it stops at once where the row sees none of them, so
that a step padded to the widest table costs what its rows really look at.
Source: model.md, sections 7.2 and 20.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.formats import e2m1_to_float, e8m0_to_float

_ENTRIES = 64
_KINDS = {"raw": 0, "fp4ix": 1}


def paged_scores(
    queries: Tensor,
    weights: Tensor,
    pool: Tensor,
    req: Tensor,
    tables: Tensor,
    visible: Tensor,
    per_block: int,
    kind: str,
    tile: int = 0,
) -> Tensor:
    """As `kernels.reference.index.paged_scores`; tiles have one size whatever `tile` is."""
    rows, heads, dim = queries.shape
    most = tables.shape[1] * per_block
    out = torch.empty(rows, most, device=queries.device)
    if rows and most:
        _scores_kernel[(rows, triton.cdiv(most, _ENTRIES))](
            queries.contiguous(), weights.contiguous(), pool, req.contiguous(),
            tables.contiguous(), visible.contiguous(), out,
            heads, dim, pool.stride(0), tables.shape[1], per_block, most,
            _KINDS[kind], triton.next_power_of_2(max(heads, 16)),
            triton.next_power_of_2(max(dim, 16)), _ENTRIES,
        )  # fmt: skip
    return out


@triton.jit
def _scores_kernel(
    q_ptr, weight_ptr, pool_ptr, req_ptr, table_ptr, visible_ptr, out_ptr,
    heads, dim, stride, table_width, per_block, most,
    KIND: tl.constexpr, H: tl.constexpr, PAD: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * E + tl.arange(0, E)
    seen = tl.minimum(tl.load(visible_ptr + row), most)
    if tl.program_id(1) * E >= seen:
        tl.store(out_ptr + row * most + entry, float("-inf"), mask=entry < most)
        return
    there = entry < seen
    req = tl.load(req_ptr + row)
    block = tl.load(table_ptr + req * table_width + entry // per_block, mask=there, other=0)
    base = (block.to(tl.int64) * per_block + entry % per_block) * stride
    channel = tl.arange(0, PAD)
    inside = there[:, None] & (channel < dim)[None, :]
    if KIND == 0:
        keys = tl.load(pool_ptr + base[:, None] + channel[None, :], mask=inside, other=0.0)
    else:
        packed = tl.load(pool_ptr + base[:, None] + channel[None, :] // 2, mask=inside, other=0)
        codes = (packed >> ((channel % 2) * 4)[None, :].to(tl.uint8)) & 15
        scale_at = base[:, None] + dim // 2 + channel[None, :] // 32
        keys = e2m1_to_float(codes) * e8m0_to_float(
            tl.load(pool_ptr + scale_at, mask=inside, other=0)
        )
    head = tl.arange(0, H)
    place = (row * heads + head)[:, None] * dim + channel[None, :]
    q = tl.load(q_ptr + place, mask=(head < heads)[:, None] & (channel < dim)[None, :], other=0.0)
    products = tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
    weight = tl.load(weight_ptr + row * heads + head, mask=head < heads, other=0.0)
    score = tl.sum(products * weight[:, None], 0)
    score = tl.where(there, score, float("-inf"))
    tl.store(out_ptr + row * most + entry, score, mask=entry < most)


SOURCES = {
    "paged_scores": (
        _scores_kernel,
        {
            "pool_ptr": "u8",
            "req_ptr": "i64",
            "table_ptr": "i64",
            "visible_ptr": "i64",
        },
        {"KIND": 1, "H": 32, "PAD": 128, "E": _ENTRIES},
    ),
}
