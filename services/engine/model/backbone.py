"""The backbone: encoder half for every row, decoder half for the rows that need it.

Between the two stands the first decoder layer's source: its entries come from every row, through
two small matrices; what follows runs on the end of a prompt only.
Source: model.md, sections 3, 8 and 9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.cache import BlockPool, StatePool
from services.engine.model.device import Device
from services.engine.model.engram_hash import EngramHash
from services.engine.model.engram_store import EngramStore
from services.engine.model.lanes import LaneRows
from services.engine.model.layers import Blocks, Step
from services.engine.model.numerics import Numerics
from services.engine.model.parallel import ExpertGroup
from services.engine.model.rows import Rows
from services.engine.model.weights import Model

TRUNCATIONS = ("compact", "mask", "off")  # "off" keeps every computed row (Span.keep_from)


@dataclass(frozen=True)
class Hidden:
    """What the decoder half leaves: final hidden rows and the drafter's features.

    `at` [n]: row of the step that each row was; None when all rows came through.
    """

    step: Step
    x: Tensor  # [k, D], normed
    features: Tensor  # [k, D * targets]
    at: Tensor | None


class Backbone:
    """Runs packed rows through all layers, reading and writing the caches."""

    def __init__(
        self,
        model: Model,
        numerics: Numerics,
        experts: ExpertGroup,
        engram: EngramStore,
        hasher: EngramHash,
        pool: BlockPool,
        states: StatePool,
        *,
        truncation: str = "compact",
        device: Device,
    ) -> None:
        if truncation not in TRUNCATIONS:
            raise ValueError(f"truncation is one of {', '.join(TRUNCATIONS)}, not {truncation!r}")
        self.model = model
        self.text = model.config.text
        self.numerics = numerics
        self.states = states
        self.device, self.kind = device.torch, device.kind
        self.blocks = Blocks(self.text, numerics, experts, pool, states, device)
        self._engram = engram
        self.hasher = hasher
        self._truncation = truncation

    def forward(
        self, rows: Rows | LaneRows, memory: dict[int, Tensor] | None = None
    ) -> Hidden | None:
        """Runs a step; None when no row reached the decoder half.

        memory: n-gram rows per layer, [n, rows * width] float32, where they are known already.
        """
        text, blocks, layers = self.text, self.blocks, self.model.layers
        step = blocks.step(rows, rows.valid_starts)
        if memory is None:
            assert isinstance(rows, Rows), "rows of the device come with their memory"
            memory = self._memory(rows)
        h, pre, x = self._embed(rows), None, None
        features: list[Tensor] = []
        for number in range(text.n_encoder):
            layer = layers[number]
            if layer.engram is not None:
                h = blocks.engram(layer, h, memory[number], rows.image)
            if number in text.dspark_target_layer_ids:
                features.append(self._feature(h))
            attend = self._attend(number, step)
            h, pre, x = blocks.run(layer, h, pre, attend, rows.image, x, self._after(number))
        source = layers[text.n_encoder]
        assert x is not None, "the first decoder layer has no memory before it"
        blocks.compress(source, x, step)
        later, at = self._decoder_step(rows, step)
        if later is None:
            return None
        step = later
        if at is not None:
            h, x, pre = h[at], x[at], pre[at] if pre is not None else None
            features = [feature[at] for feature in features]
        for number in range(text.n_encoder, text.num_hidden_layers):
            if number in text.dspark_target_layer_ids:
                features.append(self._feature(h))
            attend = self._attend(number, step, compressed=number == text.n_encoder)
            after = self._after(number)
            h, pre, x = blocks.run(layers[number], h, pre, attend, step.rows.image, x, after)
        assert x is not None
        return Hidden(step, x, torch.cat(features, 1) if features else x[:, :0], at)

    def _after(self, number: int) -> Tensor | None:
        """Returns the norm that follows a layer, None where the n-gram memory comes first."""
        if number + 1 == self.text.num_hidden_layers:
            return self.model.norm
        layer = self.model.layers[number + 1]
        return layer.attn_norm if layer.engram is None else None

    def _attend(
        self, number: int, step: Step, compressed: bool = False
    ) -> Callable[[Tensor], Tensor]:
        layer, ring, blocks = self.model.layers[number], self.states.rings[number], self.blocks

        def attend(x: Tensor) -> Tensor:
            if layer.compressor is not None and not compressed:
                blocks.compress(layer, x, step)
            return blocks.attention(layer, x, step, ring)

        return attend

    def logits(self, x: Tensor) -> Tensor:
        """Returns logits of final hidden rows, [k, V] float32."""
        return self.numerics.project(x.float(), self.model.head.data)

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Returns token embeddings in the activation type, [n, D]."""
        return self.model.embed[ids].to(self.numerics.dtype)

    def _embed(self, rows: Rows | LaneRows) -> Tensor:
        x = self.embed_ids(rows.ids)
        for first, piece in rows.embeddings():
            x[first : first + len(piece)] = piece.to(x.dtype)
        return x[:, None, :].expand(-1, self.text.hc_mult, -1).contiguous()

    def _feature(self, h: Tensor) -> Tensor:
        return h.float().mean(1).to(self.numerics.dtype)

    def _memory(self, rows: Rows) -> dict[int, Tensor]:
        """Looks up the n-gram rows of every memory layer, [n, rows * width] float32."""
        text = self.text
        if not text.engram_layer_ids:
            return {}
        found = self.hasher.rows_of_shifted(rows.shifted_ids(text.engram_max_ngram_size))
        return {
            layer: self._engram.lookup(layer, torch.from_numpy(ids)).flatten(1).to(self.device)
            for layer, ids in zip(text.engram_layer_ids, found, strict=True)
        }

    def engram_rows(self, layer: int, ids: Tensor) -> Tensor:
        """Returns rows of a layer's n-gram table, joined per token. ids: [n, rows]."""
        return self._engram.lookup(layer, ids).flatten(1)

    def _decoder_step(self, rows: Rows | LaneRows, step: Step) -> tuple[Step | None, Tensor | None]:
        """Returns the decoder half's step, and which rows it takes (None: all)."""
        blocks = self.blocks
        if isinstance(rows, LaneRows) or rows.writes_first:
            return step, None
        lows = [max(span.keep_from, span.valid_start) for span in rows.spans]
        if self._truncation == "mask" or all(s.keep_from <= s.start for s in rows.spans):
            return blocks.relook(step, lows), None
        kept, at = rows.kept(self.numerics.invariant)
        if kept.num_real == 0:
            return None, None
        lows = [max(span.keep_from, span.valid_start) for span in kept.spans]
        return blocks.step(kept, lows), at
