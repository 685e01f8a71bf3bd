"""Rows of the n-gram tables, read and expanded in one pass.

A table is a hundred gigabytes: it may lie in pinned memory of the host, which a GPU reads at the
addresses the rows give; only the rows asked for travel. Source: model.md, section 13.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.formats import e4m3_to_float, e8m0_to_float


def engram_gather(table: Tensor, rows: Tensor) -> Tensor:
    """As `kernels.reference.engram.engram_gather`."""
    flat = rows.reshape(-1).contiguous()
    dim = table.shape[1] * 32 // 33
    out = torch.empty(len(flat), dim, device=rows.device)
    if len(flat):
        _gather_kernel[(len(flat),)](
            table, flat, out, table.stride(0), dim, triton.next_power_of_2(dim)
        )
    return out.view(*rows.shape, dim)


@triton.jit
def _gather_kernel(table_ptr, row_ptr, out_ptr, stride, dim, PAD: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    source = table_ptr + tl.load(row_ptr + at).to(tl.int64) * stride
    channel = tl.arange(0, PAD)
    there = channel < dim
    values = tl.load(source + channel, mask=there, other=0)
    scales = tl.load(source + dim + channel // 32, mask=there, other=0)
    out = e4m3_to_float(values) * e8m0_to_float(scales)
    tl.store(out_ptr + at * dim + channel, out, mask=there)


SOURCES = {
    "engram_gather": (_gather_kernel, {"table_ptr": "u8", "row_ptr": "i64"}, {"PAD": 256}),
}
