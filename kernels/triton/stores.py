"""Quantise and store cache records in one pass: window rows (FP8) and main entries (FP4).

Source: model.md, sections 10 and 11; reference: kernels/reference/stores.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.formats import e8m0_of, e8m0_to_float, float_to_e2m1, float_to_e4m3

_GROUP, _KV_GROUP = 32, 16


def store_window(kv: Tensor, pool: Tensor, slots: Tensor) -> None:
    """As `kernels.reference.stores.store_window`. kv: [n, d], d a multiple of 32."""
    rows, dim = kv.shape
    if rows:
        kv, slots = _dense(kv), slots.contiguous()
        groups = dim // _GROUP
        _window_kernel[(rows,)](
            kv, pool, slots, kv.stride(0), pool.stride(0), dim, groups, _power(groups)
        )


def store_block_kv(entries: Tensor, pool: Tensor, slots: Tensor) -> None:
    """As `kernels.reference.stores.store_block_kv`. entries: [n, d], d a multiple of 16."""
    rows, dim = entries.shape
    if rows:
        entries, slots = _dense(entries), slots.contiguous()
        groups = dim // _KV_GROUP
        _entry_kernel[(rows,)](
            entries, pool, slots, entries.stride(0), pool.stride(0), dim, groups, _power(groups)
        )


def _dense(rows: Tensor) -> Tensor:
    """Returns rows whose channels lie side by side."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _power(count: int) -> int:
    return int(triton.next_power_of_2(count))


@triton.jit
def _window_kernel(
    x_ptr, pool_ptr, slot_ptr, x_stride, pool_stride, DIM, GROUPS, G_PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    if slot >= 0:
        group = tl.arange(0, G_PAD)
        at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        there = group < GROUPS
        x = tl.load(x_ptr + row * x_stride + at, mask=there[:, None], other=0.0).to(tl.float32)
        scale = e8m0_of(tl.max(tl.abs(x), 1), 1.0 / 448.0, 1e-4)
        # The inverse of a power of two is one, so this is the division, exactly.
        values = float_to_e4m3(x * e8m0_to_float(254 - scale)[:, None])
        out = pool_ptr + slot.to(tl.int64) * pool_stride
        tl.store(out + at, values, mask=there[:, None])
        tl.store(out + DIM + group, scale.to(tl.uint8), mask=there)


@triton.jit
def _entry_kernel(
    x_ptr, pool_ptr, slot_ptr, x_stride, pool_stride, DIM, GROUPS, G_PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    if slot >= 0:
        group = tl.arange(0, G_PAD)
        pair = group[:, None] * 8 + tl.arange(0, 8)[None, :]
        there = group < GROUPS
        source = x_ptr + row * x_stride + 2 * pair
        low = tl.load(source, mask=there[:, None], other=0.0).to(tl.float32)
        high = tl.load(source + 1, mask=there[:, None], other=0.0).to(tl.float32)
        amax = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        wanted = tl.minimum(tl.maximum(amax * (1.0 / 6.0), 0.001953125), 448.0)
        scale = float_to_e4m3(wanted)
        wide = _positive_e4m3(scale)[:, None]
        first = float_to_e2m1(tl.div_rn(low, tl.broadcast_to(wide, low.shape)))
        second = float_to_e2m1(tl.div_rn(high, tl.broadcast_to(wide, high.shape)))
        codes = first | (second << 4)
        out = pool_ptr + slot.to(tl.int64) * pool_stride
        tl.store(out + pair, codes, mask=there[:, None])
        tl.store(out + DIM // 2 + group, scale, mask=there)


@triton.jit
def _positive_e4m3(byte):
    half = byte.to(tl.uint16) << 7
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


SOURCES = {
    "store_window": (_window_kernel, {"x_ptr": "bf16", "pool_ptr": "u8"}, {"G_PAD": 16}),
    "store_block_kv": (_entry_kernel, {"x_ptr": "bf16", "pool_ptr": "u8"}, {"G_PAD": 32}),
}
