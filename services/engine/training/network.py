"""The network over whole rows, without caches, so that gradients pass through it.

Rows are conversations of one length; all matrices see [rows * length] tokens at once, so a step
has the same shapes at every length. What the indexer chooses passes no gradient: it is trained by
what the attention that it served then looked at.
Source: model.md, sections 3 to 8, 12 and 13; small-model.md, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.engram import engram_gate
from kernels.reference.norm import rope_frequencies, rotations
from services.engine.model.config import ModelConfig
from services.engine.model.engram_hash import EngramHash
from services.engine.training.ops import (
    Ops,
    PlainOps,
    Site,
    combine,
    dispatch,
    grouped_linear,
    take_rows,
)
from services.engine.training.parameters import EMBED, HEAD, Params


@dataclass
class Shape:
    """What depends on a batch's shape only: rotations of its rows * length tokens and entries."""

    rows: int
    length: int
    turns: dict[bool, Tensor]  # of every token; True: layers that read entries
    entry_turns: dict[int, Tensor]  # by ratio, [rows * entries, pairs]


@dataclass
class Selection:
    """Entries that rows attend, and what their layers looked at."""

    at: Tensor  # [n, k] row of the joined entries, -1 where empty
    scores: Tensor  # [n, k], with a gradient
    score: Callable[[Tensor], Tensor]  # of other entries, as `at`
    mass: list[Tensor] = field(default_factory=list)
    later: list[Selection] = field(default_factory=list)  # that chose among its candidates


@dataclass
class Hidden:
    """What the backbone leaves. x [n, D] is normed; loads [E] per layer, pairs by expert."""

    x: Tensor
    features: Tensor
    index_loss: Tensor
    loads: dict[str, list[int]]
    chosen: dict[int, Tensor]  # by index source, [n, k], -1 where empty


class TrainingNetwork:
    """Computes over `params`, which the caller owns and may change between calls."""

    def __init__(self, config: ModelConfig, params: Params, ops: Ops | None = None) -> None:
        self.config, self.text, self.params = config, config.text, params
        self.ops = ops or PlainOps(config.text)
        self._hash = EngramHash(config.text)
        self._shapes: dict[tuple[int, int], Shape] = {}
        text, scaling = config.text, config.text.rope_scaling
        dim = text.qk_rope_head_dim
        self.frequencies = {
            False: rope_frequencies(text.rope_theta, dim),
            True: rope_frequencies(
                text.compress_rope_theta,
                dim,
                factor=scaling.factor,
                original_len=scaling.original_max_position_embeddings,
                beta_fast=scaling.beta_fast,
                beta_slow=scaling.beta_slow,
            ),
        }
        self.loads: dict[str, list[int]] = {}  # pairs by expert of the layers that ran last

    # --- the stack ------------------------------------------------------------------------------

    def forward(
        self,
        ids: Tensor,
        image: Tensor | None = None,
        pictures: Tensor | None = None,
        *,
        free: bool = False,
    ) -> Hidden:
        """Runs rows.

        Args:
            ids: [rows, length] int64, length even.
            free: later sources choose among all entries instead of the candidates, while the
                candidate source still learns what they look for.
            image: [rows, length] bool, positions of image spans; pictures: [p, D], their
                embeddings in order.
        """
        text, params = self.text, self.params
        shape = self._shape(*ids.shape)
        flat = ids.flatten()
        shown = None if image is None else image.flatten()
        x = take_rows(params[EMBED], flat)
        if shown is not None and pictures is not None:
            x = x.masked_scatter(shown[:, None], pictures)
        h = x[:, None, :].expand(-1, text.hc_mult, -1).contiguous()
        pre = first_stream(h)
        memory = self._memory(ids, image)
        self.loads = {}
        features, chosen = [], {}
        entries: tuple[Tensor, Tensor] | None = None
        blocks: list[Tensor] = []
        selections: list[Selection] = []
        for layer in range(text.num_hidden_layers):
            at = f"layers.{layer}"
            if layer in text.engram_layer_ids:
                h = self._engram(at, h, memory[layer], shown)
            if layer in text.dspark_target_layer_ids:
                features.append(h.mean(1))

            def attend(x: Tensor, layer: int = layer, at: str = at) -> Tensor:
                nonlocal entries
                turns = shape.turns[text.ratio(layer) > 0]
                qr, q, kv = self.project_in(f"{at}.attn", x, turns)
                if layer in text.kv_source_layer_ids:
                    entries = self._compress(layer, x, shape)
                if layer in text.index_source_layer_ids:
                    assert entries is not None
                    selection, chosen[layer] = self._select(
                        layer, x.detach(), qr.detach(), entries[1], shape, blocks, free
                    )
                    selections.append(selection)
                sink = params[f"{at}.attn.attn_sink"]
                if entries is None:
                    o, _ = self.ops.attention(q, kv, None, None, sink, shape.length)
                else:
                    chosen_at = selections[-1].at
                    o, mass = self.ops.attention(q, kv, entries[0], chosen_at, sink, shape.length)
                    assert mass is not None
                    selections[-1].mass.append(mass)
                return self.project_out(f"{at}.attn", o, turns)

            h, pre = self.block(at, h, pre, attend, text.num_experts_per_tok, shown)
        source = text.candidate_source_layer_id
        if source is not None:
            first = text.index_source_layer_ids.index(source)
            selections[first].later += selections[first + 1 :]
        index_loss = torch.stack([_index_loss(selection) for selection in selections]).sum()
        x = self.ops.collapse_norm(h, pre, params["norm.weight"])
        return Hidden(x, torch.cat(features, 1), index_loss, self.loads, chosen)

    def logits(self, x: Tensor) -> Tensor:
        """Returns logits of final rows, [k, V]."""
        return F.linear(x, self.params[HEAD if HEAD in self.params else EMBED])

    def block(
        self,
        at: str,
        h: Tensor,
        pre: Tensor,
        attend: Callable[[Tensor], Tensor],
        top_k: int,
        image: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs one block; returns the streams [n, M, D] and the mix for the next site [n, M]."""
        for site, norm, run in (
            ("hc_attn", "attn_norm", attend),
            ("hc_ffn", "ffn_norm", lambda x: self._experts(at, x, top_k, image)),
        ):
            following, post, comb = self._mixes(f"{at}.{site}", h)
            x = self.ops.collapse_norm(h, pre, self.params[f"{at}.{norm}.weight"])
            h = self.ops.expand(run(x), h, post, comb)
            pre = following
        return h, pre

    def norm(self, x: Tensor, weight: str) -> Tensor:
        return self.ops.rms(x, self.params[weight])

    def linear(self, x: Tensor, weight: str) -> Tensor:
        return F.linear(x, self.params[weight])

    def _mixes(self, at: str, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        params = self.params
        site = Site(params[f"{at}_fn"], params[f"{at}_base"], params[f"{at}_scale"])
        return self.ops.mixes(h, site)

    def _shape(self, rows: int, length: int) -> Shape:
        key = (rows, length)
        if key not in self._shapes:
            position = torch.arange(length)
            self._shapes[key] = Shape(
                rows,
                length,
                {
                    kind: rotations(position, f).repeat(rows, 1)
                    for kind, f in self.frequencies.items()
                },
                {
                    ratio: rotations(
                        torch.arange(length // ratio) * ratio, self.frequencies[True]
                    ).repeat(rows, 1)
                    for ratio in (1, 2)
                },
            )
        return self._shapes[key]

    # --- attention ------------------------------------------------------------------------------

    def project_in(self, at: str, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (queries' low rank [n, Rq], queries [n, H, Dh], window keys [n, Dh])."""
        qr = self.norm(self.linear(x, f"{at}.wq_a.weight"), f"{at}.q_norm.weight")
        q = self.linear(qr, f"{at}.wq_b.weight").unflatten(1, (self.text.num_attention_heads, -1))
        return qr, self.ops.rotate(q, turns), self.window_keys(at, x, turns)

    def window_keys(self, at: str, x: Tensor, turns: Tensor) -> Tensor:
        kv = self.norm(self.linear(x, f"{at}.wkv.weight"), f"{at}.kv_norm.weight")
        return self.ops.rotate(kv[:, None, :], turns)[:, 0]

    def project_out(self, at: str, o: Tensor, turns: Tensor) -> Tensor:
        """Turns heads back and projects them. o: [n, H, Dh]."""
        groups = self.text.o_groups
        grouped = self.ops.rotate(o, turns, inverse=True).view(len(o), groups, -1)
        wo_a = self.params[f"{at}.wo_a.weight"].view(groups, self.text.o_lora_rank, -1)
        low = torch.bmm(grouped.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1)
        return self.linear(low.flatten(1), f"{at}.wo_b.weight")

    def _compress(self, layer: int, x: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """Returns the entries of all rows and their index keys, [rows * entries, ...]."""
        at, ratio = f"layers.{layer}.attn", self.text.ratio(layer)
        value = self.linear(x, f"{at}.compressor.wkv.weight")
        if ratio > 1:
            score = self.linear(x, f"{at}.compressor.wgate.weight")
            weights = score.view(-1, ratio, score.shape[1]).softmax(1)
            value = (weights * value.view(weights.shape)).sum(1)
        latent = self.norm(value, f"{at}.compressor.norm.weight")
        key = self.linear(latent.detach(), f"{at}.indexer.wk.weight")
        key = self.norm(key, f"{at}.indexer.k_norm.weight")
        turns = shape.entry_turns[ratio]
        return (
            self.ops.rotate(latent[:, None, :], turns)[:, 0],
            self.ops.rotate(key[:, None, :], turns)[:, 0],
        )

    def _select(
        self,
        layer: int,
        x: Tensor,
        qr: Tensor,
        keys: Tensor,
        shape: Shape,
        blocks: list[Tensor],
        free: bool,
    ) -> tuple[Selection, Tensor]:
        """Chooses entries for each row; `blocks` holds the candidate source's, once it has run."""
        text, at = self.text, f"layers.{layer}.attn.indexer"
        ratio = text.ratio(layer)
        queries = self.linear(qr, f"{at}.wq_b.weight").unflatten(1, (text.index_n_heads, -1))
        queries = self.ops.rotate(queries, shape.turns[True])
        scale = text.index_head_dim**-0.5 * text.index_n_heads**-0.5
        weights = self.linear(x, f"{at}.weights_proj.weight") * scale
        source = text.candidate_source_layer_id
        limited = None if free or source is None or layer <= source else blocks[0]
        with torch.no_grad():
            ids, made = self.ops.choose(
                queries, weights, keys, shape.length, ratio, limited, layer == source
            )
        if made is not None:
            blocks[:] = [made]
        owner = torch.arange(shape.rows).repeat_interleave(shape.length)[:, None]
        at_rows = torch.where(ids < 0, -1, ids + owner * (shape.length // ratio))

        def score(other: Tensor) -> Tensor:
            return self.ops.scores(queries, weights, keys, other)

        return Selection(at_rows, score(at_rows), score), ids

    # --- experts and memory ---------------------------------------------------------------------

    def _experts(self, at: str, x: Tensor, top_k: int, image: Tensor | None) -> Tensor:
        text, params, at = self.text, self.params, f"{at}.ffn"
        scores = F.softplus(self.linear(x, f"{at}.gate.weight")).sqrt()
        bias = params[f"{at}.gate.bias"]
        if image is not None and f"{at}.gate.bias_vl" in params:
            bias = torch.where(image[:, None], params[f"{at}.gate.bias_vl"], bias)
        ids = (scores.detach() + bias).topk(top_k, dim=1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * text.routed_scaling_factor
        experts = ids.flatten()
        order = experts.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        places = places.view(ids.shape)
        sizes = experts.bincount(minlength=scores.shape[1]).tolist()
        self.loads[at] = sizes
        rows = dispatch(x, order, places)
        gate = grouped_linear(rows, params[f"{at}.experts.w1"], sizes)
        up = grouped_linear(rows, params[f"{at}.experts.w3"], sizes)
        middle = self.ops.swiglu(gate, up, weights.flatten()[order])
        routed = grouped_linear(middle, params[f"{at}.experts.w2"], sizes)
        gate = self.linear(x, f"{at}.shared_experts.w1.weight")
        up = self.linear(x, f"{at}.shared_experts.w3.weight")
        middle = self.ops.swiglu(gate, up, None)
        shared = self.linear(middle, f"{at}.shared_experts.w2.weight")
        return combine(routed, order, places) + shared

    def _memory(self, ids: Tensor, image: Tensor | None) -> dict[int, Tensor]:
        """Returns the n-gram rows of each memory layer, flat, [n * rows per token]."""
        text, order = self.text, self.text.engram_max_ngram_size
        plain = ids.numpy() if image is None else np.where(image.numpy(), -1, ids.numpy())
        shifted = np.full((order, *plain.shape), -1, np.int64)
        for back in range(order):
            shifted[back, :, back:] = plain[:, : plain.shape[1] - back]
        found = self._hash.rows_of_shifted(shifted.reshape(order, -1))
        return {
            layer: torch.from_numpy(rows).flatten()
            for layer, rows in zip(text.engram_layer_ids, found, strict=True)
        }

    def _engram(self, at: str, h: Tensor, rows: Tensor, image: Tensor | None) -> Tensor:
        params = self.params
        gathered = take_rows(params[f"{at}.engram.embed.weight"], rows).view(len(h), -1)
        kv = self.linear(gathered, f"{at}.engram.wkv.weight")
        weight = params[f"{at}.engram.q_weight"] * params[f"{at}.engram.k_weight"]
        key, value = kv.split((weight.numel(), h.shape[2]), 1)
        key = key.unflatten(1, weight.shape)
        return engram_gate(h, key, value, weight, self.text.rms_norm_eps, image)


def first_stream(h: Tensor) -> Tensor:
    """Returns the mix with which a stack starts: the first stream alone, [n, M]."""
    pre = h.new_zeros(h.shape[:2])
    pre[:, 0] = 1.0
    return pre


def _index_loss(selection: Selection) -> Tensor:
    """Divergence of the indexer's scores from what its layers looked at, mean over rows.

    The attention mass is not normalised, so that rows which do not look far weigh little. A
    candidate source answers for the later sources' mass too, over the entries of all of them.
    """
    target, logits = torch.stack(selection.mass).sum(0), _logits(selection.scores, selection.at)
    targets, scores = [target], [logits]
    for other in selection.later:
        mass = torch.stack(other.mass).sum(0)
        same = other.at[:, :, None] == selection.at[:, None, :]
        same &= other.at[:, :, None] >= 0
        targets[0] = targets[0] + torch.bmm(mass[:, None, :], same.float())[:, 0]
        new = other.at.masked_fill(same.any(2), -1)
        targets.append(mass * (new >= 0))
        scores.append(_logits(selection.score(new), new))
    target, logits = torch.cat(targets, 1), torch.cat(scores, 1)
    share = target / target.sum(1, keepdim=True).clamp(min=1e-20)
    divergence = target * (share.clamp(min=1e-20).log() - logits.log_softmax(1))
    return divergence.sum(1).mean()


def _logits(scores: Tensor, at: Tensor) -> Tensor:
    return scores.masked_fill(at < 0, -1e9)
