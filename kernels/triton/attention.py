"""Attention over a window and selected entries, read from their pools as they are stored.

Keys are values: a gathered tile is decoded once and serves both products. A program takes one row
and a tile of heads and walks the row's keys; logits are kept online (running maximum and sum), so
nothing of the size of keys is ever written. Source: model.md, sections 6 and 20.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.formats import e2m1_to_float, e4m3_to_float, e8m0_to_float

_HEADS, _KEYS = 16, 32
RAW, FP8, FP4 = 0, 1, 2  # how a pool holds its rows
_KINDS = {"raw": RAW, "fp8": FP8, "fp4kv": FP4}


def paged_attention(
    q: Tensor,
    window: Tensor,
    window_at: Tensor,
    window_present: Tensor,
    entries: Tensor | None,
    entry_at: Tensor | None,
    entry_present: Tensor | None,
    sink: Tensor,
    scale: float,
    kinds: tuple[str, str],
) -> Tensor:
    """As `kernels.reference.attention.paged_attention`; q in bfloat16 takes the tensor cores."""
    rows, heads, dim = q.shape
    out = torch.empty(q.shape, device=q.device)
    if rows == 0:
        return out
    if entries is None or entry_at is None or entry_present is None:
        entries, entry_at, entry_present = window, window_at[:, :0], window_present[:, :0]
    fast = q.dtype == torch.bfloat16
    if fast and q.device.type == "cpu":  # the interpreter's bfloat16 product is wrong
        fast, q = False, q.float()
    grid = (rows, triton.cdiv(heads, _HEADS))
    _attention_kernel[grid](
        q.contiguous(), window, window_at.contiguous(), window_present.contiguous(),
        entries, entry_at.contiguous(), entry_present.contiguous(), sink, out, scale,
        heads, dim, window.stride(0), window_at.shape[1], entries.stride(0), entry_at.shape[1],
        _KINDS[kinds[0]], _KINDS[kinds[1]], fast, _HEADS, _KEYS, triton.next_power_of_2(dim),
    )  # fmt: skip
    return out


@triton.jit
def _decoded(pool_ptr, base, at, dim, KIND: tl.constexpr):
    """Returns channels `at` of the records that start at `base`, float32."""
    there = (at < dim)[None, :]
    if KIND == 0:
        return tl.load(pool_ptr + base[:, None] + at[None, :], mask=there, other=0.0)
    if KIND == 1:
        values = tl.load(pool_ptr + base[:, None] + at[None, :], mask=there, other=0)
        scales = tl.load(pool_ptr + base[:, None] + dim + at[None, :] // 32, mask=there, other=0)
        return e4m3_to_float(values) * e8m0_to_float(scales)
    packed = tl.load(pool_ptr + base[:, None] + at[None, :] // 2, mask=there, other=0)
    codes = (packed >> ((at % 2) * 4)[None, :].to(tl.uint8)) & 15
    scale_at = base[:, None] + dim // 2 + at[None, :] // 16
    scales = tl.load(pool_ptr + scale_at, mask=there, other=0)
    return e2m1_to_float(codes) * e4m3_to_float(scales)


@triton.jit
def _attend(
    q, most, total, sums, pool_ptr, stride, at_ptr, present_ptr, row, count, scale, dim, channel,
    KIND: tl.constexpr, FAST: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Takes one row's keys of a pool into the running maximum, weights and sums."""
    for begin in range(0, count, K):
        key = begin + tl.arange(0, K)
        listed = key < count
        here = tl.load(present_ptr + row * count + key, mask=listed, other=0).to(tl.int1)
        slot = tl.load(at_ptr + row * count + key, mask=listed & here, other=0)
        keys = _decoded(pool_ptr, slot.to(tl.int64) * stride, channel, dim, KIND)
        if FAST:
            # Stored keys are bfloat16 values, and so is q: this product loses nothing.
            logits = tl.dot(q, tl.trans(keys.to(tl.bfloat16))) * scale
        else:
            logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where((listed & here)[None, :], logits, float("-inf"))
        higher = tl.maximum(most, tl.max(logits, 1))
        # A maximum of -inf: no key has been seen, and there is nothing to scale down.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(logits - safe[:, None])
        shrink = tl.exp(tl.where(most == float("-inf"), float("-inf"), most - safe))
        total = total * shrink + tl.sum(weights, 1)
        if FAST:
            added = tl.dot(weights.to(tl.bfloat16), keys.to(tl.bfloat16))
        else:
            added = tl.dot(weights, keys, input_precision="ieee")
        sums = sums * shrink[:, None] + added
        most = higher
    return most, total, sums


@triton.jit
def _attention_kernel(
    q_ptr, window_ptr, window_at_ptr, window_present_ptr,
    entry_ptr, entry_at_ptr, entry_present_ptr, sink_ptr, out_ptr, scale,
    heads, dim, window_stride, window_count, entry_stride, entry_count,
    WINDOW_KIND: tl.constexpr, ENTRY_KIND: tl.constexpr, FAST: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    channel = tl.arange(0, PAD)
    inside = (head < heads)[:, None] & (channel < dim)[None, :]
    place = (row * heads + head)[:, None] * dim + channel[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0)
    most = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    sums = tl.zeros((H, PAD), tl.float32)
    most, total, sums = _attend(
        q, most, total, sums, window_ptr, window_stride, window_at_ptr, window_present_ptr,
        row, window_count, scale, dim, channel, WINDOW_KIND, FAST, K,
    )  # fmt: skip
    most, total, sums = _attend(
        q, most, total, sums, entry_ptr, entry_stride, entry_at_ptr, entry_present_ptr,
        row, entry_count, scale, dim, channel, ENTRY_KIND, FAST, K,
    )  # fmt: skip
    sink = tl.load(sink_ptr + head, mask=head < heads, other=0.0)
    # The sink enlarges the denominator alone, and keeps it above zero without keys.
    higher = tl.maximum(most, sink)
    shrink = tl.exp(tl.where(most == float("-inf"), float("-inf"), most - higher))
    total = total * shrink + tl.exp(sink - higher)
    out = sums * (shrink / total)[:, None]
    tl.store(out_ptr + place, out, mask=inside)


SOURCES = {
    "paged_attention": (
        _attention_kernel,
        {
            "q_ptr": "bf16",
            "window_ptr": "u8",
            "window_at_ptr": "i64",
            "window_present_ptr": "i1",
            "entry_ptr": "u8",
            "entry_at_ptr": "i64",
            "entry_present_ptr": "i1",
        },
        {"WINDOW_KIND": FP8, "ENTRY_KIND": FP4, "FAST": True, "H": _HEADS, "K": _KEYS, "PAD": 512},
    ),
}
