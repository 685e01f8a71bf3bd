"""Which compressed entries a row attends: scores, exact top-k, candidate blocks.

Ties take the lower index everywhere: relu makes exact zeros, so they do occur.
Source: model.md, sections 7.2 and 7.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import formats


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor, tile: int = 0) -> Tensor:
    """Returns sum_h relu(query_h . key_j) * weight_h, [n, E] float32.

    Args:
        queries: [n, Hi, Di] float32; weights: [n, Hi] float32.
        keys: [E, Di] shared by all rows, or [n, E, Di].
        tile: entries per product, 0 for all at once; a fixed tile makes a row's bits independent
            of how many entries other rows have. Only with keys per row.
    """
    rows, heads, dim = queries.shape
    if keys.dim() == 2:
        products = (queries.reshape(-1, dim) @ keys.T).relu_()
        return torch.bmm(weights[:, None, :], products.view(rows, heads, -1))[:, 0]
    entries = keys.shape[1]
    if tile:
        tiles = -(-entries // tile)
        padded = torch.nn.functional.pad(keys, (0, 0, 0, tiles * tile - entries))
        keys = padded.reshape(rows * tiles, tile, dim)
        queries = queries.repeat_interleave(tiles, 0)
        weights = weights.repeat_interleave(tiles, 0)
    products = torch.bmm(queries, keys.transpose(1, 2)).relu_()
    scores = torch.bmm(weights[:, None, :], products)[:, 0]
    return scores.reshape(rows, tiles * tile if tile else entries)[:, :entries]


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
    """As `index_scores` with keys in pages, [n, W * per_block]; -inf where a row sees nothing.

    Args:
        pool: [slots, record], "raw" float32 or "fp4ix" bytes; req: [n] row of `tables` [B, W].
        visible: [n] entries that a row sees.
    """
    entries = torch.arange(tables.shape[1] * per_block, device=pool.device)
    slots = tables[req][:, entries // per_block] * per_block + entries % per_block
    keys = pool.index_select(0, slots.reshape(-1))
    if kind == "fp4ix":
        half = keys.shape[1] * 16 // 17
        keys = formats.dequant_fp4_index(keys[:, :half], keys[:, half:])
    scores = index_scores(queries, weights, keys.view(*slots.shape, keys.shape[-1]), tile)
    return scores.masked_fill(entries >= visible[:, None], float("-inf"))


def ordered_topk(scores: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` largest per row, largest first, ties by lower index."""
    if scores.shape[1] <= 64:
        return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    bits = (scores.float() + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    ranks = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    return (ordered + ranks).topk(count, dim=1).indices


def topk_entries(
    scores: Tensor, visible: Tensor, count: int, allowed: Tensor | None = None
) -> Tensor:
    """Returns the `count` best visible entries per row, ascending, -1 padded. [n, count] int64.

    Args:
        scores: [n, E] float32; visible: [n], entries below it may be taken.
        allowed: [n, E] bool, entries outside are not taken either.
    """
    rows, entries = scores.shape
    if count == 0 or entries == 0:
        return torch.full((rows, count), -1, dtype=torch.long, device=scores.device)
    at = torch.arange(entries, device=scores.device)
    usable = at < visible[:, None]
    if allowed is not None:
        usable &= allowed
    best = ordered_topk(scores.masked_fill(~usable, float("-inf")), min(count, entries))
    best = torch.where(usable.gather(1, best), best, entries).sort(1).values
    best = torch.where(best == entries, -1, best)
    return torch.nn.functional.pad(best, (0, count - best.shape[1]), value=-1)


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, count: int) -> Tensor:
    """Returns the `count` best blocks of consecutive entries per row, ascending, -1 padded.

    A block counts as much as its best visible entry; the one with the newest visible entry is
    always taken. [n, count] int64.
    """
    rows, entries = scores.shape
    blocks = -(-entries // block_size)
    at = torch.arange(entries, device=scores.device)
    seen = scores.masked_fill(at >= visible[:, None], float("-inf"))
    padded = torch.nn.functional.pad(seen, (0, blocks * block_size - entries), value=float("-inf"))
    best = padded.view(rows, blocks, block_size).amax(-1)
    newest = ((visible - 1) // block_size).clamp(min=0)
    best.scatter_(1, newest[:, None], float("inf"))
    visible_blocks = (visible + block_size - 1) // block_size
    return topk_entries(best, visible_blocks, count)


def candidate_mask(blocks: Tensor, entries: int, block_size: int) -> Tensor:
    """Returns which entries lie in candidate blocks, [n, entries] bool."""
    rows = blocks.shape[0]
    count = -(-entries // block_size)
    mask = torch.zeros(rows, count + 1, dtype=torch.bool, device=blocks.device)
    mask.scatter_(1, torch.where(blocks < 0, count, blocks), True)
    return mask[:, :count].repeat_interleave(block_size, 1)[:, :entries]
