"""Attention over a window and selected entries, keys being values, with a sink per head.

Source: model.md, section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import stores
from kernels.reference.products import products

_ABSENT = float("-inf")


def sparse_attention(
    q: Tensor, keys: Tensor, present: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """Attends every row to its own keys, which are its values too.

    Args:
        q: [n, H, d] float32; keys: [n, K, d] float32, window oldest first, then entries ascending.
        present: [n, K] bool; sink: [H] float32, enlarges the denominator only.
    Returns: [n, H, d]; zeros for a row without keys.
    """
    logits = torch.bmm(q, keys.transpose(1, 2)).mul_(scale)
    logits.masked_fill_(~present[:, None, :], _ABSENT)
    return torch.bmm(_with_sink(logits, sink), keys)


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
    """Attends every row to records of two pools, read as they are stored. [n, H, d] float32.

    Args:
        q: [n, H, d]; window, entries: pools of records; None: a layer without entries.
        window_at, entry_at: [n, K] slots, anything where not present ([n, K] bool).
        kinds: how the pools hold their rows: "raw", "fp8" or "fp4kv".
    """
    keys, present = read_records(window, window_at, kinds[0]), window_present
    if entries is not None and entry_at is not None and entry_present is not None:
        keys = torch.cat((keys, read_records(entries, entry_at, kinds[1])), 1)
        present = torch.cat((present, entry_present), 1)
    return sparse_attention(q.float(), keys, present, sink, scale)


def read_records(pool: Tensor, at: Tensor, kind: str) -> Tensor:
    """Returns the values of records, [*at.shape, d] float32."""
    records = pool.index_select(0, at.reshape(-1))
    if kind == "fp8":
        records = stores.window_values(records)
    elif kind == "fp4kv":
        records = stores.entry_values(records)
    return records.view(*at.shape, records.shape[-1])


def tile_attention(q: Tensor, keys: Tensor, present: Tensor, sink: Tensor, scale: float) -> Tensor:
    """As `sparse_attention` for rows that share their keys: keys [K, d], present [n, K]."""
    rows, heads, dim = q.shape
    logits = (q.reshape(-1, dim) @ keys.T).mul_(scale).view(rows, heads, -1)
    logits.masked_fill_(~present[:, None, :], _ABSENT)
    weights = _with_sink(logits, sink)
    return (weights.reshape(rows * heads, -1) @ keys).view(rows, heads, dim)


def _with_sink(logits: Tensor, sink: Tensor) -> Tensor:
    column = sink[None, :, None].expand(logits.shape[0], -1, 1)
    return torch.cat((logits, column), -1).softmax(-1)[..., :-1]


def grouped_out(o: Tensor, wo_a: Tensor) -> Tensor:
    """Projects each group of heads by its own matrix.

    Args:
        o: [n, G, w] float32; wo_a: [G, r, w].
    Returns: [n, G * r].
    """
    return products(o.transpose(0, 1), wo_a).transpose(0, 1).flatten(1)
