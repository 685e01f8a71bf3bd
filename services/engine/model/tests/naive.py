"""The network once more, slow and obvious: one sequence, no caches, one row at a time, float64.

Written from the specification alone, to be compared with the fast one. It shares with it the
configuration, the names of the weights and the n-gram row ids.
Source: model.md, sections 3 to 9 and 11 to 15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.engine.model.checkpoint import TensorSource
from services.engine.model.config import ModelConfig
from services.engine.model.engram_hash import EngramHash


def rms(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    y = x / torch.sqrt((x * x).mean() + eps)
    return y if w is None else y * w


def turn(x: Tensor, position: int, freqs: list[float], sign: int = 1) -> Tensor:
    """Rotates the last 2 * len(freqs) channels of a vector, pair by pair."""
    y = x.clone()
    base = len(x) - 2 * len(freqs)
    for i, f in enumerate(freqs):
        c, s = math.cos(position * f), sign * math.sin(position * f)
        a, b = x[base + 2 * i], x[base + 2 * i + 1]
        y[base + 2 * i] = a * c - b * s
        y[base + 2 * i + 1] = a * s + b * c
    return y


@dataclass
class Trace:
    """What a run leaves: logits per kept position, entries per source, and the drafter's input."""

    logits: dict[int, Tensor] = field(default_factory=dict)
    main: dict[int, list[Tensor]] = field(default_factory=dict)
    features: dict[int, Tensor] = field(default_factory=dict)


class Naive:
    def __init__(self, config: ModelConfig, source: TensorSource) -> None:
        self.config, self.text = config, config.text
        self._source = source
        self._cache: dict[str, Tensor] = {}
        text = config.text
        dim = text.qk_rope_head_dim
        self.plain = [text.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
        scaling = text.rope_scaling
        original = scaling.original_max_position_embeddings

        def pair(turns: float) -> float:
            return (
                dim
                * math.log(original / (turns * 2 * math.pi))
                / (2 * math.log(text.compress_rope_theta))
            )

        low = max(math.floor(pair(scaling.beta_fast)), 0)
        high = min(math.ceil(pair(scaling.beta_slow)), dim - 1)
        self.stretched = []
        for i in range(dim // 2):
            f = text.compress_rope_theta ** (-2 * i / dim)
            ramp = min(1.0, max(0.0, (i - low) / max(high - low, 0.001)))
            self.stretched.append(f / scaling.factor * ramp + f * (1 - ramp))

    def w(self, name: str) -> Tensor:
        if name not in self._cache:
            self._cache[name] = self._source.matrix(name).double()
        return self._cache[name]

    def mixes(self, h: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
        text, m = self.text, self.text.hc_mult
        v = h.reshape(-1)
        z = (self.w(f"{at}_fn") @ v) / torch.sqrt((v * v).mean() + text.rms_norm_eps)
        base, scale = self.w(f"{at}_base"), self.w(f"{at}_scale")
        pre = torch.sigmoid(z[:m] * scale[0] + base[:m]) + text.hc_eps
        post = 2 * torch.sigmoid(z[m : 2 * m] * scale[1] + base[m : 2 * m])
        c = torch.softmax((z[2 * m :] * scale[2] + base[2 * m :]).view(m, m), 1) + text.hc_eps
        c = c / (c.sum(0, keepdim=True) + text.hc_eps)
        for _ in range(text.hc_sinkhorn_iters - 1):
            c = c / (c.sum(1, keepdim=True) + text.hc_eps)
            c = c / (c.sum(0, keepdim=True) + text.hc_eps)
        return pre, post, c

    def expand(self, y: Tensor, h: Tensor, post: Tensor, c: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for j in range(len(h)):
            out[j] = post[j] * y
            for i in range(len(h)):
                out[j] += c[i, j] * h[i]
        return out

    def mlp(self, x: Tensor, at: str, weight: float) -> Tensor:
        limit = self.text.swiglu_limit
        g, u = self.w(f"{at}.w1.weight") @ x, self.w(f"{at}.w3.weight") @ x
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return self.w(f"{at}.w2.weight") @ (weight * g * torch.sigmoid(g) * u)

    def moe(self, x: Tensor, at: str, top_k: int, image: bool) -> Tensor:
        s = torch.sqrt(torch.log1p(torch.exp(self.w(f"{at}.gate.weight") @ x)))
        bias = self.w(f"{at}.gate.bias_vl" if image else f"{at}.gate.bias")
        order = sorted(range(len(s)), key=lambda e: (-float(s[e] + bias[e]), e))[:top_k]
        total = sum(float(s[e]) for e in order) + 1e-20
        y = self.mlp(x, f"{at}.shared_experts", 1.0)
        for e in order:
            weight = float(s[e]) / total * self.text.routed_scaling_factor
            y = y + self.mlp(x, f"{at}.experts.{e}", weight)
        return y

    def attend(
        self, at: str, q: Tensor, keys: list[Tensor], position: int, freqs: list[float]
    ) -> Tensor:
        """q [H, Dh] rotated; returns the attention output [D]."""
        text = self.text
        sink = self.w(f"{at}.attn_sink")
        heads = []
        for h in range(text.num_attention_heads):
            o = torch.zeros(text.head_dim, dtype=torch.float64)
            if keys:
                k = torch.stack(keys)
                e = torch.exp(k @ q[h] * text.head_dim**-0.5)
                o = (e[:, None] * k).sum(0) / (e.sum() + torch.exp(sink[h]))
            heads.append(turn(o, position, freqs, -1))
        flat, groups = torch.cat(heads), text.o_groups
        size = len(flat) // groups
        wo_a = self.w(f"{at}.wo_a.weight").view(groups, text.o_lora_rank, size)
        low = [wo_a[g] @ flat[g * size : (g + 1) * size] for g in range(groups)]
        return self.w(f"{at}.wo_b.weight") @ torch.cat(low)

    def query_and_kv(
        self, at: str, x: Tensor, position: int, freqs: list[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        text, eps = self.text, self.text.rms_norm_eps
        qr = rms(self.w(f"{at}.wq_a.weight") @ x, self.w(f"{at}.q_norm.weight"), eps)
        q = (self.w(f"{at}.wq_b.weight") @ qr).view(text.num_attention_heads, text.head_dim)
        q = torch.stack([turn(head, position, freqs) for head in q])
        kv = rms(self.w(f"{at}.wkv.weight") @ x, self.w(f"{at}.kv_norm.weight"), eps)
        return qr, q, turn(kv, position, freqs)

    def run(
        self,
        ids: list[int],
        *,
        keep_from: int = 0,
        image: list[bool] | None = None,
        embeddings: dict[int, Tensor] | None = None,
    ) -> Trace:
        """Runs a whole sequence; the decoder half from `keep_from` on."""
        text, trace = self.text, Trace()
        n, eps = len(ids), text.rms_norm_eps
        image = image or [False] * n
        h, pre = [], [None] * n
        for t in range(n):
            x = self.w("embed.weight")[ids[t]]
            x = (embeddings or {}).get(t, x).double()
            h.append(x.repeat(text.hc_mult, 1))
        rows = EngramHash(text).rows(np.array(ids), np.array(image), 0)
        topk: dict[int, list[int]] = {}
        blocks: dict[int, set[int]] = {}
        index_keys: dict[int, list[Tensor]] = {}
        for layer in range(text.num_hidden_layers):
            at, ratio = f"layers.{layer}", text.ratio(layer)
            freqs = self.stretched if ratio else self.plain
            low = keep_from if layer >= text.n_encoder else 0
            live = range(low, n)
            if layer in text.engram_layer_ids:
                for t in live:
                    found = rows[text.engram_layer_ids.index(layer)][t]
                    h[t] = self.memory(at, h[t], found, image[t])
            if layer in text.dspark_target_layer_ids:
                for t in live:
                    piece = h[t].mean(0)
                    held = trace.features.get(t)
                    trace.features[t] = piece if held is None else torch.cat((held, piece))
            everyone = range(n) if layer in text.kv_source_layer_ids else live
            mixes = {t: self.mixes(h[t], f"{at}.hc_attn") for t in live}
            xs = {}
            for t in everyone:
                x = h[t][0] if pre[t] is None else (pre[t][:, None] * h[t]).sum(0)
                xs[t] = rms(x, self.w(f"{at}.attn_norm.weight"), eps)
            if layer in text.kv_source_layer_ids:
                self.compress(layer, xs, trace.main, index_keys, n)
            made = {t: self.query_and_kv(f"{at}.attn", xs[t], t, freqs) for t in live}
            for t in live:
                qr, q, _ = made[t]
                keys = [made[p][2] for p in range(max(low, t - text.sliding_window + 1), t + 1)]
                if ratio:
                    source = text.kv_source(layer)
                    if layer in text.index_source_layer_ids:
                        topk[t] = self.select(layer, xs[t], qr, t, index_keys[source], blocks)
                    keys += [trace.main[source][j] for j in topk[t]]
                y = self.attend(f"{at}.attn", q, keys, t, freqs)
                a_pre, a_post, a_comb = mixes[t]
                h[t] = self.expand(y, h[t], a_post, a_comb)
                f_pre, f_post, f_comb = self.mixes(h[t], f"{at}.hc_ffn")
                x = rms((a_pre[:, None] * h[t]).sum(0), self.w(f"{at}.ffn_norm.weight"), eps)
                y = self.moe(x, f"{at}.ffn", text.num_experts_per_tok, image[t])
                h[t] = self.expand(y, h[t], f_post, f_comb)
                pre[t] = f_pre
        for t in range(keep_from, n):
            x = rms((pre[t][:, None] * h[t]).sum(0), self.w("norm.weight"), eps)
            trace.logits[t] = self.w("head.weight") @ x
        return trace

    def compress(
        self,
        layer: int,
        xs: dict[int, Tensor],
        main: dict[int, list[Tensor]],
        index_keys: dict[int, list[Tensor]],
        n: int,
    ) -> None:
        text, eps, at = self.text, self.text.rms_norm_eps, f"layers.{layer}.attn"
        main[layer], index_keys[layer] = [], []
        ratio = text.ratio(layer)
        for j in range(n // ratio):
            group = [xs[t] for t in range(j * ratio, (j + 1) * ratio)]
            values = torch.stack([self.w(f"{at}.compressor.wkv.weight") @ x for x in group])
            if ratio == 2:
                scores = torch.stack([self.w(f"{at}.compressor.wgate.weight") @ x for x in group])
                latent = (torch.softmax(scores, 0) * values).sum(0)
            else:
                latent = values[0]
            latent = rms(latent, self.w(f"{at}.compressor.norm.weight"), eps)
            key = self.w(f"{at}.indexer.wk.weight") @ latent
            key = rms(key, self.w(f"{at}.indexer.k_norm.weight"), eps)
            main[layer].append(turn(latent, j * ratio, self.stretched))
            index_keys[layer].append(turn(key, j * ratio, self.stretched))

    def select(
        self,
        layer: int,
        x: Tensor,
        qr: Tensor,
        t: int,
        keys: list[Tensor],
        blocks: dict[int, set[int]],
    ) -> list[int]:
        text, at = self.text, f"layers.{layer}.attn.indexer"
        visible = (t + 1) // text.ratio(layer)
        queries = (self.w(f"{at}.wq_b.weight") @ qr).view(text.index_n_heads, -1)
        queries = [turn(q, t, self.stretched) for q in queries]
        scale = text.index_head_dim**-0.5 * text.index_n_heads**-0.5
        weights = self.w(f"{at}.weights_proj.weight") @ x * scale
        scores = [
            sum(float(torch.relu(q @ keys[j]) * w) for q, w in zip(queries, weights, strict=True))
            for j in range(visible)
        ]
        size, source = text.candidate_block_size, text.candidate_source_layer_id
        if layer == source:
            best: dict[int, float] = {}
            for j, score in enumerate(scores):
                best[j // size] = max(best.get(j // size, -math.inf), score)
            if visible:
                best[(visible - 1) // size] = math.inf
            order = sorted(best, key=lambda b: (-best[b], b))
            blocks[t] = set(order[: text.candidate_topk_blocks])
        allowed = range(visible)
        if source is not None and layer > source:
            allowed = [j for j in allowed if j // size in blocks[t]]
        return sorted(sorted(allowed, key=lambda j: (-scores[j], j))[: text.index_topk])

    def memory(self, at: str, h: Tensor, rows: np.ndarray, image: bool) -> Tensor:
        text, eps = self.text, self.text.rms_norm_eps
        if image:
            return h
        gathered = torch.cat([self.w(f"{at}.engram.embed.weight")[int(r)] for r in rows])
        kv = self.w(f"{at}.engram.wkv.weight") @ gathered
        width = text.hidden_size
        value, out = kv[text.hc_mult * width :], h.clone()
        for m in range(text.hc_mult):
            key = kv[m * width : (m + 1) * width]
            query = rms(h[m], self.w(f"{at}.engram.q_weight")[m], eps)
            dot = float((query * rms(key, self.w(f"{at}.engram.k_weight")[m], eps)).sum())
            dot *= width**-0.5
            signed = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot) if dot else 0.0
            out[m] = h[m] + value / (1 + math.exp(-signed))
        return out

    def draft(
        self, features: dict[int, Tensor], last: int, golden: int
    ) -> tuple[list[int], list[float]]:
        """Greedy drafts after the rows up to `last`, and the logits of their confidences."""
        text, eps = self.text, self.text.rms_norm_eps
        width = text.dspark_block_size
        final = f"mtp.{text.num_nextn_predict_layers - 1}"
        main = {
            p: rms(self.w("mtp.0.main_proj.weight") @ f, self.w("mtp.0.main_norm.weight"), eps)
            for p, f in features.items()
        }
        ids = [golden] + [text.dspark_noise_token_id] * (width - 1)
        h = [self.w("embed.weight")[i].repeat(text.hc_mult, 1) for i in ids]
        pre: list[Tensor | None] = [None] * width
        for layer in range(text.num_nextn_predict_layers):
            at = f"mtp.{layer}"
            ring = {}
            for p, m in main.items():
                kv = rms(
                    self.w(f"{at}.attn.wkv.weight") @ m, self.w(f"{at}.attn.kv_norm.weight"), eps
                )
                ring[p] = turn(kv, p, self.plain)
            xs = []
            for i in range(width):
                x = h[i][0] if pre[i] is None else (pre[i][:, None] * h[i]).sum(0)
                xs.append(rms(x, self.w(f"{at}.attn_norm.weight"), eps))
            made = [
                self.query_and_kv(f"{at}.attn", x, last + 1 + i, self.plain)
                for i, x in enumerate(xs)
            ]
            near = [ring[p] for p in range(max(0, last - text.sliding_window + 1), last + 1)]
            keys = near + [kv for _, _, kv in made]
            for i in range(width):
                a_pre, a_post, a_comb = self.mixes(h[i], f"{at}.hc_attn")
                y = self.attend(f"{at}.attn", made[i][1], keys, last + 1 + i, self.plain)
                h[i] = self.expand(y, h[i], a_post, a_comb)
                pre[i], f_post, f_comb = self.mixes(h[i], f"{at}.hc_ffn")
                x = rms((a_pre[:, None] * h[i]).sum(0), self.w(f"{at}.ffn_norm.weight"), eps)
                y = self.moe(x, f"{at}.ffn", text.dspark_num_experts_per_tok, False)
                h[i] = self.expand(y, h[i], f_post, f_comb)
        said, confidences, previous = [], [], golden
        for i in range(width):
            x = (pre[i][:, None] * h[i]).sum(0)
            e = self.w(f"{final}.markov_head.embed.weight")[previous]
            logits = self.w("head.weight") @ rms(x, self.w(f"{final}.norm.weight"), eps)
            logits = logits + self.w(f"{final}.markov_head.head.weight") @ e
            raw = self.w(f"{final}.confidence_head.proj.weight")[0] @ torch.cat((x, e))
            confidences.append(float(torch.sigmoid(raw)))
            previous = int(logits.argmax())
            said.append(previous)
        return said, confidences
