"""Writes into caches, and the pooling of two tokens into one entry. Source: model.md, 7.1 and 10.

A pool is addressed by slot numbers; -1 drops the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import formats


def store_window(kv: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Quantises window rows to E4M3 with E8M0 scales and writes them.

    Args:
        kv: [n, d] float; pool: [slots, d + d / 32] uint8, values then scales; slots: [n] int64.
    """
    write_rows(window_bytes(kv), pool, slots)


def window_bytes(kv: Tensor) -> Tensor:
    """Returns the stored form of window rows, [n, d + d / 32] uint8."""
    values, scales = formats.quant_fp8_rows(kv)
    return torch.cat((values.view(torch.uint8), scales), -1)


def window_values(data: Tensor) -> Tensor:
    """Returns what stored window rows stand for, [..., d] float32."""
    dim = data.shape[-1] * formats.GROUP // (formats.GROUP + 1)
    return formats.dequant_fp8_rows(
        data[..., :dim].view(torch.float8_e4m3fn), data[..., dim:].contiguous()
    )


def entry_bytes(entries: Tensor) -> Tensor:
    """Returns the stored form of main entries, [n, d / 2 + d / 16] uint8."""
    packed, scales = formats.quant_fp4_kv(entries)
    return torch.cat((packed, scales.view(torch.uint8)), -1)


def entry_values(data: Tensor) -> Tensor:
    """Returns what stored main entries stand for, [..., d] float32."""
    half = data.shape[-1] * 8 // 9
    return formats.dequant_fp4_kv(data[..., :half], data[..., half:].view(torch.float8_e4m3fn))


def store_block_kv(entries: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Quantises main entries to E2M1 with E4M3 scales and writes them.

    Args:
        entries: [n, d] float, rotated; pool: [slots, d / 2 + d / 16] uint8; slots: [n] int64.
    """
    write_rows(entry_bytes(entries), pool, slots)


def write_rows(rows: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Writes rows to their slots; later rows win, -1 drops."""
    kept = slots >= 0
    if bool(kept.all()):
        pool[slots] = rows
    else:
        pool[slots[kept]] = rows[kept]


def pool_c2(
    score: Tensor,
    value: Tensor,
    state: Tensor,
    state_slots: Tensor,
    previous: Tensor,
    previous_slots: Tensor,
    closes: Tensor,
    writes: Tensor | None,
) -> Tensor:
    """Pools pairs of tokens by a softmax per channel over their two scores; keeps what is open.

    Args:
        score, value: [n, d] float32 of this step's rows.
        state: [slots, 2, d] float32, (score, value) of rows that wait for their partner.
        state_slots: [w] slot of each row that is kept; writes: [w] rows that are kept there, None
            for all.
        closes: [g] rows that end a group; previous: [g] row of the partner in this step, or -1
            where it lies in `state` at previous_slots: [g].
    Returns: [g, d] float32, before the norm.
    """
    held = state[previous_slots.clamp(min=0)]
    inside = (previous >= 0)[:, None]
    partner = previous.clamp(min=0)
    first_score = torch.where(inside, score[partner], held[:, 0])
    first_value = torch.where(inside, value[partner], held[:, 1])
    scores = torch.stack((first_score, score[closes]))
    weights = scores.softmax(0)
    pooled = weights[0] * first_value + weights[1] * value[closes]
    own = torch.stack((score, value), 1)
    state.index_copy_(0, state_slots, own if writes is None else own[writes])
    return pooled
