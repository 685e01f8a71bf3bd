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
from kernels.reference import sampling
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


class DraftHead:
    def __init__(self, backbone: Backbone, states: StatePool, drafter: Drafter) -> None:
        self._backbone = backbone
        self._states = states
        self._drafter = drafter
        self._text = backbone.text
        self._numerics = backbone.numerics
        self._attention = kernels.get("sparse_attention", backbone.device.type)
        rank = self._text.q_lora_rank
        self._kv = [Weight(layer.q_kv.data[rank:], layer.q_kv.fp8) for layer in drafter.layers]
        self.temperatures = np.ones(self._text.dspark_block_size, np.float32)

    def feed(self, hidden: Hidden) -> None:
        """Writes the draft rings of rows that went through the decoder half."""
        blocks, step = self._backbone.blocks, hidden.step
        drafter, numerics = self._drafter, self._numerics
        main = blocks.norm(numerics.linear(hidden.features, drafter.main), drafter.main_norm)
        for number, layer in enumerate(drafter.layers):
            kv = blocks.norm(numerics.linear(main, self._kv[number]), layer.kv_norm)
            kv = blocks._rope(kv[:, None, :], step.turns[False])[:, 0]
            ring = self._states.draft_ring(number)
            records = ring.format.encode(kv)
            if step.ring_rows is not None:
                records = records[step.ring_rows]
            ring.store(step.ring_slots, records)

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
        text, backbone, blocks = self._text, self._backbone, self._backbone.blocks
        device, width = backbone.device, text.dspark_block_size
        batch = len(golden)
        ids = np.full((batch, width), text.dspark_noise_token_id, np.int64)
        ids[:, 0] = golden
        positions = (last[:, None] + 1 + np.arange(width)).reshape(-1)
        # Whole tiles of requests, so that a request's bits do not depend on how many there are.
        spare = -batch % ROW_TILE if self._numerics.invariant else 0
        flat = np.pad(ids.reshape(-1), (0, spare * width))
        positions = np.pad(positions, (0, spare * width))
        window = np.pad(last, (0, spare))[:, None] + np.arange(1 - text.sliding_window, 1)
        ring_slots = self._states.ring_slots
        at = np.pad(slots, (0, spare))[:, None] * ring_slots + np.maximum(window, 0) % ring_slots
        near = torch.from_numpy(at).to(device)
        present = torch.from_numpy(window >= 0).to(device)
        turns = rotations(torch.from_numpy(positions).to(device), blocks._frequencies[False])
        h = backbone.embed_ids(torch.from_numpy(flat).to(device))
        h = h[:, None, :].expand(-1, text.hc_mult, -1).contiguous()
        pre: Tensor | None = None
        for number, layer in enumerate(self._drafter.layers):
            attend = self._attend(layer, number, turns, near, present)
            h, pre = blocks.run(layer, h, pre, attend)
        x = blocks.collapse(h, pre)[: batch * width]
        base = backbone.logits(blocks.norm(x, self._drafter.norm))
        return self._say(
            x.view(batch, width, -1),
            base.view(batch, width, -1),
            golden,
            last,
            params,
            coupled,
            stopped,
        )

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
        drafter, numerics = self._drafter, self._numerics
        batch, width = x.shape[:2]
        split = x.shape[2]
        ids = np.zeros((batch, width), np.int64)
        raw = np.zeros((batch, width), np.float32)
        keep = not coupled and not params.all_greedy
        proposals = []
        previous = golden
        stream = sampling.TARGET if coupled else sampling.DRAFT
        for i in range(width):
            embedded = drafter.markov_embed[torch.from_numpy(previous).to(x.device)]
            logits = base[:, i] + numerics.project(embedded, drafter.markov_head.data)
            score = (x[:, i].float() * drafter.confidence[:split]).sum(1)
            score = score + (embedded * drafter.confidence[split:]).sum(1)
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
