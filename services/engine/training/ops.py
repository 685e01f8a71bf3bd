"""Differentiable operations of the network, plain: what `native.py` computes fast on a CPU.

The forward of most is the engine's own reference; gradients are torch's. Rows that are routed or
looked up carry their own gradient on both paths.
Source: model.md, sections 4 to 7 and 12; small-model.md, section 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import hyper
from kernels.reference.attention import sparse_attention
from kernels.reference.index import candidate_blocks, candidate_mask, index_scores, topk_entries
from kernels.reference.norm import rms_norm
from services.engine.model.config import TextConfig


@dataclass(frozen=True)
class Site:
    """Parameters of a hyper-connection: [M * (M + 2), M * D], [M * (M + 2)], [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class Ops(Protocol):
    """What differs between the plain and the fast path; tensors are float32 and contiguous."""

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalises the rows of x [n, d]."""
        ...

    def rotate(self, x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
        """Turns adjacent pairs of the last channels. x: [n, h, d]; turns: [n, pairs] complex64."""
        ...

    def mixes(self, h: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pre [n, M], post [n, M] and comb [n, M, M]. h: [n, M, D]."""
        ...

    def collapse_norm(self, h: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
        """Returns the normed mix of the streams, [n, D]."""
        ...

    def expand(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Returns the streams after a site, [n, M, D]. y: [n, D]."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
        """Clamped SwiGLU of [p, I] each, times a weight per row."""
        ...

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        at: Tensor | None,
        sink: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends each token's window, and the entries chosen for it.

        Args:
            q: [n, H, d]; kv: [n, d]; entries: [e, d]; at: [n, K] rows of them, -1 for none.
            length: tokens of a row; windows end at its start.
        Returns: [n, H, d], and the weight on each entry, mean over heads, [n, K], no gradient.
        """
        ...

    def choose(
        self,
        queries: Tensor,
        weights: Tensor,
        keys: Tensor,
        length: int,
        ratio: int,
        candidates: Tensor | None,
        wants_candidates: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the best visible entries of each token within its row, and candidate blocks.

        Args:
            queries: [n, Hi, Di]; weights: [n, Hi]; keys: [rows * length / ratio, Di].
            candidates: [n, blocks] to choose within, -1 padded.
        Returns: [n, K] ascending, -1 padded; [n, blocks] where wanted.
        """
        ...

    def scores(self, queries: Tensor, weights: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        """Returns the index score of chosen entries, [n, K], 0 for none. at: [n, K] rows."""
        ...


class PlainOps:
    """Operations of the engine's reference, with torch's gradients."""

    def __init__(self, text: TextConfig) -> None:
        self._text = text

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._text.rms_norm_eps)

    def rotate(self, x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
        still = x.shape[-1] - 2 * turns.shape[-1]
        pairs = torch.view_as_complex(x[..., still:].unflatten(-1, (-1, 2)).contiguous())
        pairs = pairs * (turns.conj() if inverse else turns)[:, None, :]
        return torch.cat((x[..., :still], torch.view_as_real(pairs).flatten(-2)), -1)

    def mixes(self, h: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        return hyper.hc_mixes(
            h,
            site.fn,
            site.base,
            site.scale,
            iterations=self._text.hc_sinkhorn_iters,
            hc_eps=self._text.hc_eps,
            norm_eps=self._text.rms_norm_eps,
        )

    def collapse_norm(self, h: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
        return self.rms(hyper.hc_collapse(h, pre), weight)

    def expand(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return hyper.hc_expand(y, h, post, comb)

    def swiglu(self, gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
        limit = self._text.swiglu_limit
        out = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return out if weights is None else out * weights[:, None]

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        at: Tensor | None,
        sink: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor | None]:
        window = self._text.sliding_window
        token = torch.arange(len(q))
        near = torch.arange(1 - window, 1)
        present = token[:, None] % length + near >= 0
        keys = kv[(token[:, None] + near).clamp(min=0)]
        if entries is not None and at is not None:
            keys = torch.cat((keys, entries[at.clamp(min=0)]), 1)
            present = torch.cat((present, at >= 0), 1)
        o = sparse_attention(q, keys, present, sink, self._text.softmax_scale)
        if at is None:
            return o, None
        with torch.no_grad():
            logits = torch.bmm(q, keys.transpose(1, 2)) * self._text.softmax_scale
            logits = logits.masked_fill(~present[:, None, :], float("-inf"))
            column = sink[None, :, None].expand(len(q), -1, 1)
            weights = torch.cat((logits, column), -1).softmax(-1)
            return o, weights[..., window:-1].mean(1)

    def choose(
        self,
        queries: Tensor,
        weights: Tensor,
        keys: Tensor,
        length: int,
        ratio: int,
        candidates: Tensor | None,
        wants_candidates: bool,
    ) -> tuple[Tensor, Tensor | None]:
        text, entries = self._text, length // ratio
        visible = torch.arange(1, length + 1) // ratio
        found, made = [], []
        for row in range(len(queries) // length):
            part = slice(row * length, (row + 1) * length)
            own = keys[row * entries : (row + 1) * entries]
            scores = index_scores(queries[part], weights[part], own)
            allowed = None
            if candidates is not None:
                allowed = candidate_mask(candidates[part], entries, text.candidate_block_size)
            found.append(topk_entries(scores, visible, text.index_topk, allowed))
            if wants_candidates:
                made.append(
                    candidate_blocks(
                        scores, visible, text.candidate_block_size, text.candidate_topk_blocks
                    )
                )
        return torch.cat(found), torch.cat(made) if made else None

    def scores(self, queries: Tensor, weights: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        found = index_scores(queries, weights, keys[at.clamp(min=0)])
        return found.masked_fill(at < 0, 0.0)


# --- rows looked up and routed ------------------------------------------------------------------


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return table.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        out = grads[0].new_zeros(ctx.rows, grads[0].shape[1])
        return out.index_add_(0, ids, grads[0]), None


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Returns table[ids]. table: [rows, d]; ids: [k], any of them more than once."""
    return _TakeRows.apply(table, ids)  # type: ignore[no-any-return]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(x.shape[0], weight.shape[1])
        for part, rows, matrix in zip(out.split(sizes), x.split(sizes), weight, strict=True):
            torch.mm(rows, matrix.t(), out=part)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        pieces = zip(grad.split(ctx.sizes), x.split(ctx.sizes), dx.split(ctx.sizes), strict=True)
        for expert, (g, rows, into) in enumerate(pieces):
            torch.mm(g, weight[expert], out=into)
            torch.mm(g.t(), rows, out=dw[expert])
        return dx, dw, None


def grouped_linear(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Multiplies consecutive rows by one matrix each. x: [p, in]; weight: [E, out, in]."""
    return _GroupedLinear.apply(x, weight, sizes)  # type: ignore[no-any-return]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, order // places.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _sum_of_places(grads[0], places), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.each = places.shape[1]
        return _sum_of_places(y, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order // ctx.each), None, None


def _sum_of_places(y: Tensor, places: Tensor) -> Tensor:
    rows = y.index_select(0, places.flatten())
    return rows.view(*places.shape, -1).sum(1)


def dispatch(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Returns the rows of (row, choice) pairs in expert order, [n * k, D].

    order: [n * k], the pair at each place; places: [n, k], the place of each pair.
    """
    return _Dispatch.apply(x, order, places)  # type: ignore[no-any-return]


def combine(y: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Returns the sum over each row's pairs, [n, D]; the inverse way of `dispatch`."""
    return _Combine.apply(y, order, places)  # type: ignore[no-any-return]
