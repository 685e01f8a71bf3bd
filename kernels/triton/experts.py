"""Routed experts over (row, expert) pairs: one grouped product per matrix, no host in between.

Pairs are sorted by expert; every expert's pairs fill tiles of a fixed height of their own, so that
a tile reads one matrix. How many tiles there are is a device value: the grid is as large as it can
get, and programs past the end return. Packed E2M1 matrices are expanded in registers.
Source: model.md, sections 11, 12 and 20.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.experts import Matrices, swiglu
from kernels.triton.formats import e2m1_to_float, e8m0_to_float

_ROWS, _OUT, _IN = 16, 64, 64


def grouped_mlp_static(
    x: Tensor,
    pair_rows: Tensor,
    pair_experts: Tensor,
    pair_weights: Tensor,
    w13: Matrices,
    w2: Matrices,
    limit: float,
    *,
    project: object = None,
    before_down: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """As `kernels.reference.experts.grouped_mlp_static`.

    Args:
        w13, w2: [E, out, in] float32 or bfloat16, or (packed [E, out, in / 2] uint8, scales
            [E, out, in / 32] uint8).
        project: not used: tiles have one height, so a row's bits depend on nothing else.
    """
    tiles = sorted_tiles(pair_experts, _experts(w13))
    gate_up = _grouped(x, pair_rows, tiles, w13)
    middle = swiglu(gate_up, pair_weights, limit)
    if before_down is not None:
        middle = before_down(middle)
    own = torch.arange(len(pair_rows), device=x.device)
    return _grouped(middle, own, tiles, w2)


def _experts(w: Matrices) -> int:
    return (w if isinstance(w, Tensor) else w[0]).shape[0]


def sorted_tiles(pair_experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Lays pairs out in tiles of one expert each.

    Returns: pair of every place [tiles * 16], -1 where none; expert of every tile, -1 where none.
    The number of tiles is the most that so many pairs can need.
    """
    pairs, device = len(pair_experts), pair_experts.device
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts = counts.scatter_add_(0, pair_experts, torch.ones_like(pair_experts))
    needed = (counts + _ROWS - 1) // _ROWS
    ends = needed.cumsum(0)
    most = min(pairs, num_experts + pairs // _ROWS)
    at = torch.arange(most, device=device)
    expert = torch.searchsorted(ends, at, right=True)
    expert = torch.where(at < ends[-1], expert, -1)
    order = pair_experts.sort(stable=True).indices
    sorted_experts = pair_experts[order]
    firsts = counts.cumsum(0) - counts
    within = torch.arange(pairs, device=device) - firsts[sorted_experts]
    place = (ends - needed)[sorted_experts] * _ROWS + within
    places = torch.full((most * _ROWS,), -1, dtype=torch.int64, device=device)
    return places.index_copy_(0, place, order), expert


def _grouped(x: Tensor, rows: Tensor, tiles: tuple[Tensor, Tensor], w: Matrices) -> Tensor:
    """Returns x[rows[p]] W[expert of p]^T for every pair p, [p, out] float32."""
    places, expert = tiles
    packed = not isinstance(w, Tensor)
    matrix, scale = (w, w) if isinstance(w, Tensor) else w
    num_out, num_in = matrix.shape[1], matrix.shape[2] * (2 if packed else 1)
    out = torch.empty(len(rows), num_out, device=x.device)
    if len(rows):
        # The interpreter's bfloat16 product is wrong; these values are the same in float32.
        wide = x.device.type == "cpu" or (not packed and matrix.dtype == torch.float32)
        _grouped_kernel[(len(expert), triton.cdiv(num_out, _OUT))](
            x.contiguous(), rows.contiguous(), places, expert, matrix, scale, out,
            num_in, num_out, packed, wide, _ROWS, _OUT, _IN,
        )  # fmt: skip
    return out


@triton.jit
def _grouped_kernel(
    x_ptr, row_ptr, place_ptr, expert_ptr, w_ptr, scale_ptr, out_ptr, num_in, num_out,
    PACKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(place_ptr + tile * ROWS + tl.arange(0, ROWS))
    there = pair >= 0
    row = tl.load(row_ptr + pair, mask=there, other=0).to(tl.int64)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for begin in range(0, num_in, INS):
        at = begin + tl.arange(0, INS)
        inside = at < num_in
        x = tl.load(
            x_ptr + row[:, None] * num_in + at[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        both = (column < num_out)[:, None] & inside[None, :]
        line = expert * num_out + column.to(tl.int64)
        if PACKED:
            byte = tl.load(
                w_ptr + line[:, None] * (num_in // 2) + at[None, :] // 2, mask=both, other=0
            )
            codes = (byte >> ((at % 2) * 4)[None, :].to(tl.uint8)) & 15
            scale = tl.load(
                scale_ptr + line[:, None] * (num_in // 32) + at[None, :] // 32, mask=both, other=0
            )
            w = e2m1_to_float(codes) * e8m0_to_float(scale)
        else:
            w = tl.load(w_ptr + line[:, None] * num_in + at[None, :], mask=both, other=0.0)
            w = w.to(tl.float32)
        if WIDE:
            total += tl.dot(x, tl.trans(w), input_precision="ieee")
        else:
            # E4M3 activations and E2M1 weights with scales of two's powers are bfloat16 values.
            total += tl.dot(x.to(tl.bfloat16), tl.trans(w.to(tl.bfloat16)))
    tl.store(
        out_ptr + pair[:, None] * num_out + column[None, :],
        total,
        mask=there[:, None] & (column < num_out)[None, :],
    )


SOURCES = {
    "grouped_mlp_static": (
        _grouped_kernel,
        {
            "row_ptr": "i64",
            "place_ptr": "i64",
            "expert_ptr": "i64",
            "w_ptr": "u8",
            "scale_ptr": "u8",
        },
        {"PACKED": True, "WIDE": False, "ROWS": _ROWS, "OUTS": _OUT, "INS": _IN},
    ),
}
