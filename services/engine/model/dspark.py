"""The draft head: a few tokens ahead of every verify step, each with a confidence.

Its rings are fed from the backbone's features; drafting adds no state that outlives a step.
Source: model.md, section 15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import kernels
from kernels.reference import draws, sampling
from kernels.reference.norm import rotations
from services.engine.model.backbone import Backbone, Hidden
from services.engine.model.cache import StatePool
from services.engine.model.numerics import ROW_TILE, Weight
from services.engine.model.sampling import Int, SampleParams
from services.engine.model.weights import Drafter, Layer


@dataclass(frozen=True)
class Drafts:
    """Proposals for the positions after the newest token.

    ids [B, G]; confidences [B, G] float32; proposals [B, G, V] log-probabilities the ids were
    drawn from, None where no request needs them.
    """

    ids: Int
    confidences: np.ndarray
    proposals: Tensor | None


@dataclass(frozen=True)
class LaneDrafts:
    """As `Drafts`, on the device."""

    ids: Tensor
    confidences: Tensor
    proposals: Tensor | None


class DraftHead:
    def __init__(self, backbone: Backbone, states: StatePool, drafter: Drafter) -> None:
        self._backbone = backbone
        self._states = states
        self._drafter = drafter
        self._text = backbone.text
        self._numerics = backbone.numerics
        self._attention = kernels.get("sparse_attention", backbone.kind)
        rank = self._text.q_lora_rank
        self._kv = [Weight(layer.q_kv.data[rank:], layer.q_kv.fp8) for layer in drafter.layers]
        fitted = backbone.model.config.system.confidence_temperatures
        self.temperatures = np.array(fitted or (1.0,) * self._text.dspark_block_size, np.float32)

    def feed(self, hidden: Hidden) -> None:
        """Writes the draft rings of rows that went through the decoder half."""
        blocks, step = self._backbone.blocks, hidden.step
        drafter, numerics = self._drafter, self._numerics
        main = blocks.norm(numerics.linear(hidden.features, drafter.main), drafter.main_norm)
        for number, layer in enumerate(drafter.layers):
            kv = blocks.norm(numerics.linear(main, self._kv[number]), layer.kv_norm)
            kv = blocks._rope(kv[:, None, :], step.turns[False])[:, 0]
            ring = self._states.draft_ring(number)
            kept = kv if step.ring_rows is None else kv[step.ring_rows]
            blocks.write(ring, step.ring_slots, kept)

    def draft(
        self,
        golden: Int,
        last: Int,
        slots: Int,
        params: SampleParams,
        *,
        coupled: bool,
        stopped: np.ndarray,
    ) -> Drafts:
        """Drafts for requests whose newest token `golden` [B] follows position `last` [B].

        slots: state slots [B]; stopped [B] bool, requests whose drafts are worth nothing.
        """
        batch = len(golden)
        # Whole tiles of requests, so that a request's bits do not depend on how many there are.
        spare = -batch % ROW_TILE if self._numerics.invariant else 0
        device = self._backbone.device
        given = [torch.from_numpy(np.pad(v, (0, spare))).to(device) for v in (golden, last, slots)]
        x, base = self._block(given[0], given[1], given[2])
        return self._say(x[:batch], base[:batch], golden, last, params, coupled, stopped)

    def draft_lanes(
        self,
        golden: Tensor,
        last: Tensor,
        slots: Tensor,
        params: draws.Draws,
        kind: str,
        *,
        coupled: bool,
        stopped: Tensor,
    ) -> LaneDrafts:
        """As `draft`, without a host: all are tensors [B], and shapes depend on no value.

        kind: as of `draws.target_logprobs`.
        """
        x, base = self._block(golden, last, slots)
        stream = sampling.TARGET if coupled else sampling.DRAFT
        ids, raw, proposals = [], [], []
        previous = golden
        for i in range(x.shape[1]):
            logits, score = self._next(x[:, i], base[:, i], previous)
            raw.append(score / float(self.temperatures[i]))
            if kind == "greedy":
                previous = logits.argmax(1)
            else:
                logprobs = draws.target_logprobs(logits, params, kind)
                noise = draws.uniforms(params.seeds, last + 2 + i, stream)
                previous = draws.draw(logprobs.exp(), noise)
                proposals.append(logprobs)
            ids.append(previous)
        confidences = torch.stack(raw, 1).sigmoid()
        confidences = confidences.masked_fill(stopped[:, None], 0.0)
        keep = not coupled and kind != "greedy"
        return LaneDrafts(
            torch.stack(ids, 1), confidences, torch.stack(proposals, 1) if keep else None
        )

    def _block(self, golden: Tensor, last: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the draft layers; returns rows before the norm [B, G, D], and their logits."""
        text, backbone, blocks = self._text, self._backbone, self._backbone.blocks
        width, batch = text.dspark_block_size, golden.shape[0]
        noise = golden.new_full((batch, width - 1), text.dspark_noise_token_id)
        ids = torch.cat((golden[:, None], noise), 1).reshape(-1)
        ahead = torch.arange(1, width + 1, device=golden.device)
        positions = (last[:, None] + ahead).reshape(-1)
        window = last[:, None] + torch.arange(1 - text.sliding_window, 1, device=golden.device)
        ring_slots = self._states.ring_slots
        near = slots[:, None] * ring_slots + window.clamp(min=0) % ring_slots
        turns = rotations(positions, blocks._frequencies[False])
        h = backbone.embed_ids(ids)[:, None, :].expand(-1, text.hc_mult, -1).contiguous()
        pre: Tensor | None = None
        x: Tensor | None = None
        norms = [layer.attn_norm for layer in self._drafter.layers[1:]]
        for number, layer in enumerate(self._drafter.layers):
            attend = self._attend(layer, number, turns, near, window >= 0)
            after = norms[number] if number < len(norms) else None
            h, pre, x = blocks.run(layer, h, pre, attend, x=x, after=after)
        x = blocks.collapse(h, pre)
        base = backbone.logits(blocks.norm(x, self._drafter.norm))
        return x.view(batch, width, -1), base.view(batch, width, -1)

    def _next(self, x: Tensor, base: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Returns one position's logits after `previous`, and the raw confidence."""
        drafter, split = self._drafter, x.shape[1]
        embedded = drafter.markov_embed[previous]
        logits = base + self._numerics.project(embedded, drafter.markov_head.data)
        score = (x.float() * drafter.confidence[:split]).sum(1)
        return logits, score + (embedded * drafter.confidence[split:]).sum(1)

    def _attend(
        self, layer: Layer, number: int, turns: Tensor, near: Tensor, present: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Attention over the ring before the block, and the whole block itself."""
        text, blocks = self._text, self._backbone.blocks
        ring = self._states.draft_ring(number)
        width = text.dspark_block_size

        def attend(x: Tensor) -> Tensor:
            _, q, kv = blocks.project_in(layer, x, turns)
            own = ring.format.round_trip(kv).view(-1, width, text.head_dim)
            keys = torch.cat((ring.gather(near), own), 1)
            there = torch.cat((present, present.new_ones(len(present), width)), 1)
            o = self._attention(
                q.view(len(keys), -1, text.head_dim),
                keys,
                there,
                layer.sink.repeat(width),
                text.softmax_scale,
            )
            return blocks.project_out(layer, o.reshape(q.shape), turns)

        return attend

    def _say(
        self,
        x: Tensor,
        base: Tensor,
        golden: Int,
        last: Int,
        params: SampleParams,
        coupled: bool,
        stopped: np.ndarray,
    ) -> Drafts:
        """Draws the drafts left to right; each shifts the next one's logits."""
        batch, width = x.shape[:2]
        ids = np.zeros((batch, width), np.int64)
        raw = np.zeros((batch, width), np.float32)
        keep = not coupled and not params.all_greedy
        proposals = []
        previous = golden
        stream = sampling.TARGET if coupled else sampling.DRAFT
        for i in range(width):
            known = torch.from_numpy(previous).to(x.device)
            logits, score = self._next(x[:, i], base[:, i], known)
            raw[:, i] = score.cpu().numpy()
            if params.all_greedy:
                ids[:, i] = logits.argmax(1).cpu().numpy()
            else:
                logprobs = sampling.target_logprobs(logits, params.kernel)
                ids[:, i] = sampling.sample_rows(
                    logprobs, params.kernel.seeds, last + 2 + i, stream
                )
                if keep:
                    proposals.append(logprobs)
            previous = ids[:, i]
        confidences = 1.0 / (1.0 + np.exp(-raw / self.temperatures))
        confidences[stopped] = 0.0
        return Drafts(ids, confidences, torch.stack(proposals, 1) if proposals else None)
