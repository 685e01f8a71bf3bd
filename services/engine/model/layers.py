"""One block of the network over packed rows: hyper-connections, attention, experts, memory.

What layers hand on within a step (the selection of entries, gathered keys) lives in `Step`.
Source: model.md, sections 3, 5, 6, 7, 12 and 13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import kernels
from kernels.reference.attention import tile_attention
from kernels.reference.experts import fake_quant, swiglu
from kernels.reference.index import candidate_mask
from kernels.reference.norm import rope_frequencies, rotations
from kernels.registry import device_ops
from services.engine.model.cache import BlockPool, StatePool, Table
from services.engine.model.config import TextConfig
from services.engine.model.device import Device
from services.engine.model.lanes import LaneRows
from services.engine.model.numerics import ENTRY_TILE, Numerics
from services.engine.model.parallel import ExpertGroup
from services.engine.model.rows import Rows, WindowView
from services.engine.model.weights import HyperSite, Layer

# A prefill row tile attends all entries of its request under a mask while they are at most so
# many times what it selects; beyond, each row gathers its own.
_DENSE_FACTOR = 8
_GATHER_BYTES = 64 << 20  # keys gathered at once
_KEEP_BYTES = 256 << 20  # gathered keys that layers of one source share


@dataclass
class Selection:
    """Entries that rows attend. `ids` [n, k] ascending, -1 padded; None: every visible one."""

    source: int
    per_block: int
    visible: Tensor
    most: int  # the largest visible count
    ids: Tensor | None = None
    slots: Tensor | None = None
    present: Tensor | None = None
    keys: Tensor | None = None


@dataclass
class Step:
    """One pass of some rows through some layers."""

    rows: Rows | LaneRows
    view: WindowView
    turns: dict[bool, Tensor]  # rotation of every row; True: layers that read entries
    dense: bool
    ring_rows: Tensor | None
    ring_slots: Tensor
    history: Tensor | None
    selection: Selection | None = None
    candidates: Tensor | None = None  # [n, blocks] of the candidate source
    entry_keys: dict[int, list[Tensor]] = field(default_factory=dict)  # dense: per span

    @property
    def num(self) -> int:
        return len(self.rows)


class Blocks:
    """Computes blocks; holds no state of its own beside constants."""

    def __init__(
        self,
        text: TextConfig,
        numerics: Numerics,
        experts: ExpertGroup,
        pool: BlockPool,
        states: StatePool,
        device: Device,
    ) -> None:
        self.text = text
        self.numerics = numerics
        self.pool = pool
        self.states = states
        self._experts = experts
        self._eps = text.rms_norm_eps
        kind = device.kind
        self._rms_norm = kernels.get("rms_norm", kind)
        self._rope = kernels.get("rope_", kind)
        self._mixes = kernels.get("hc_mixes", kind)
        self._collapse = kernels.get("hc_collapse", kind)
        self._expand = kernels.get("hc_expand", kind)
        self._close = kernels.get("hc_expand_collapse_norm", kind)
        # Quantised and written in one pass, where a device has that.
        self._stores = {
            form: kernels.get(name, kind)
            for form, name in (("fp8", "store_window"), ("fp4kv", "store_block_kv"))
            if name in device_ops(kind)
        }
        self._attention = kernels.get("sparse_attention", kind)
        self._pages = device.is_resident
        self._paged_attention = kernels.get("paged_attention", kind)
        self._paged_scores = kernels.get("paged_scores", kind)
        self._grouped_out = kernels.get("grouped_out", kind)
        self._scores = kernels.get("index_scores", kind)
        self._topk = kernels.get("topk_entries", kind)
        self._candidates = kernels.get("candidate_blocks", kind)
        self._gate = kernels.get("gate_topk", kind)
        self._pool_c2 = kernels.get("pool_c2", kind)
        self._engram_gate = kernels.get("engram_gate", kind)
        scaling = text.rope_scaling
        dim = text.qk_rope_head_dim
        self._frequencies = {
            False: device.place(rope_frequencies(text.rope_theta, dim)),
            True: device.place(
                rope_frequencies(
                    text.compress_rope_theta,
                    dim,
                    factor=scaling.factor,
                    original_len=scaling.original_max_position_embeddings,
                    beta_fast=scaling.beta_fast,
                    beta_slow=scaling.beta_slow,
                )
            ),
        }
        self._index_scale = text.index_head_dim**-0.5 * text.index_n_heads**-0.5

    # --- steps ----------------------------------------------------------------------------------

    def step(self, rows: Rows | LaneRows, lows: list[int]) -> Step:
        """Returns what layers share for these rows; `lows`: smallest visible position per span."""
        dense = not (rows.writes_first or self.numerics.invariant)
        dense = dense and rows.longest <= _DENSE_FACTOR * max(self.text.index_topk, 1)
        ring_rows, ring_slots = rows.ring_writes()
        return Step(
            rows,
            rows.window_view(lows),
            {kind: rotations(rows.pos, f) for kind, f in self._frequencies.items()},
            dense,
            ring_rows,
            ring_slots,
            None if rows.writes_first else rows.history_slots(),
        )

    def relook(self, step: Step, lows: list[int]) -> Step:
        """Returns a step over the same rows with other windows, without a selection."""
        return Step(
            step.rows,
            step.rows.window_view(lows),
            step.turns,
            step.dense,
            step.ring_rows,
            step.ring_slots,
            step.history,
        )

    # --- norms and hyper-connections ------------------------------------------------------------

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._rms_norm(x, weight, self._eps)

    def mixes(self, h: Tensor, site: HyperSite) -> tuple[Tensor, Tensor, Tensor]:
        return self._mixes(
            h,
            site.fn,
            site.base,
            site.scale,
            iterations=self.text.hc_sinkhorn_iters,
            hc_eps=self.text.hc_eps,
            norm_eps=self._eps,
            project=self.numerics.project,
        )

    def collapse(self, h: Tensor, pre: Tensor | None) -> Tensor:
        """`pre` None: the first stream, as at the first site of a stack."""
        return h[:, 0] if pre is None else self._collapse(h, pre)

    def run(
        self,
        layer: Layer,
        h: Tensor,
        pre: Tensor | None,
        attend: Callable[[Tensor], Tensor],
        image: Tensor | None = None,
        x: Tensor | None = None,
        after: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Runs one block; returns the streams, the mix for the next site and its normed input.

        attend: from the normed input [n, D] to the attention output; x: that input, where it is
        known already; after: the norm of the next site, None where something comes in between.
        """
        a_pre, a_post, a_comb = self.mixes(h, layer.hc_attn)
        if x is None:
            x = self.norm(self.collapse(h, pre), layer.attn_norm)
        h, x = self._close(attend(x), h, a_post, a_comb, a_pre, layer.ffn_norm, self._eps)
        f_pre, f_post, f_comb = self.mixes(h, layer.hc_ffn)
        y = self.moe(layer, x, image)
        if after is None:
            return self._expand(y, h, f_post, f_comb), f_pre, None
        h, x = self._close(y, h, f_post, f_comb, f_pre, after, self._eps)
        return h, f_pre, x

    # --- attention ------------------------------------------------------------------------------

    def attention(self, layer: Layer, x: Tensor, step: Step, ring: Table) -> Tensor:
        """Returns the attention output, [n, D] in the activation type. x: [n, D], normed."""
        turns = step.turns[layer.ratio > 0]
        qr, q, kv = self.project_in(layer, x, turns)
        if layer.ratio:
            self._select(layer, x, qr, turns, step)
        if step.dense:
            o = self._attend_dense(layer, q, ring.format.encode(kv), step, ring)
        else:
            o = self._attend_gather(layer, q, kv, step, ring)
        return self.project_out(layer, o, turns)

    def project_in(self, layer: Layer, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (queries' low rank [n, Rq], queries [n, H, Dh] float32, window KV [n, Dh])."""
        text = self.text
        both = self.numerics.linear(x, layer.q_kv)
        qr = self.norm(both[:, : text.q_lora_rank], layer.q_norm)
        kv = self.norm(both[:, text.q_lora_rank :], layer.kv_norm)
        q = self.numerics.linear(qr, layer.wq_b).view(-1, text.num_attention_heads, text.head_dim)
        q = self._rope(q, turns)
        kv = self._rope(kv[:, None, :], turns)[:, 0]
        return qr, q.float(), kv

    def project_out(self, layer: Layer, o: Tensor, turns: Tensor) -> Tensor:
        """Turns heads back and projects them. o: [n, H, Dh] float32."""
        numerics, groups = self.numerics, self.text.o_groups
        o = self._rope(o.to(numerics.dtype), turns, inverse=True)
        grouped = o.reshape(o.shape[0], groups, -1).float()
        if numerics.invariant:
            parts = [numerics.project(grouped[:, g], layer.wo_a.data[g]) for g in range(groups)]
            low = torch.cat(parts, 1)
        else:
            low = self._grouped_out(grouped, layer.wo_a.data)
        return numerics.linear(low.to(numerics.dtype), layer.wo_b)

    def write(self, table: Table, slots: Tensor, values: Tensor) -> None:
        """Writes values [n, d] in the form of a table; slots hold no -1."""
        store = self._stores.get(table.format.kind)
        if store is None:
            table.store(slots, table.format.encode(values))
        else:
            store(values, table.data, slots)

    def _store_ring(self, records: Tensor, step: Step, ring: Table) -> None:
        kept = records if step.ring_rows is None else records[step.ring_rows]
        ring.store(step.ring_slots, kept)

    def _attend_dense(
        self, layer: Layer, q: Tensor, records: Tensor, step: Step, ring: Table
    ) -> Tensor:
        """Row tiles of one request attend [their windows | all its entries] under a mask."""
        rows, window = step.rows, self.text.sliding_window
        assert step.history is not None
        assert isinstance(rows, Rows), "only the host's rows are dense"
        history = ring.gather(step.history)
        own = ring.format.decode(records)
        out = torch.empty_like(q)
        at = torch.arange(2 * window, device=q.device)
        for i, (span, first) in enumerate(zip(rows.spans, rows.first_rows, strict=True)):
            num = len(span.ids)
            keys = torch.cat((history[i], own[first : first + num]))
            entries = None
            if layer.ratio and step.selection is not None:
                entries = step.entry_keys[step.selection.source][i]
            for begin in range(0, num, window):
                end = min(num, begin + window)
                part = slice(first + begin, first + end)
                near = keys[begin : end + window - 1]
                offset = at[: end - begin, None]
                column = at[None, : len(near)]
                band = (column >= offset) & (column < offset + window)
                lows = step.view.present[part]
                # Column c of the band is key c - offset of the row's window.
                inside = (column - offset).clamp(0, window - 1)
                present = band & lows.gather(1, inside)
                if entries is not None:
                    seen, chosen = self._entries_for(step, part, entries)
                    near = torch.cat((near, seen))
                    present = torch.cat((present, chosen), 1)
                out[part] = tile_attention(
                    q[part], near, present, layer.sink, self.text.softmax_scale
                )
        self._store_ring(records, step, ring)
        return out

    def _entries_for(self, step: Step, part: slice, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the entries that any row of a tile sees, and who sees which."""
        chosen = step.selection
        assert chosen is not None
        visible = chosen.visible[part]
        most = int(visible[-1])
        if chosen.ids is None:
            return entries[:most], torch.arange(most, device=visible.device) < visible[:, None]
        ids = chosen.ids[part]
        mask = torch.zeros(len(ids), most + 1, dtype=torch.bool, device=ids.device)
        mask.scatter_(1, torch.where(ids < 0, most, ids), True)
        return entries[:most], mask[:, :most]

    def _attend_gather(
        self, layer: Layer, q: Tensor, kv: Tensor, step: Step, ring: Table
    ) -> Tensor:
        """Every row gathers its own keys."""
        source: Table | Tensor
        records = None
        if step.rows.writes_first:
            kept = kv if step.ring_rows is None else kv[step.ring_rows]
            self.write(ring, step.ring_slots, kept)
            if self._pages:
                return self._attend_pages(layer, q, step, ring)
            source = ring
        else:
            assert step.history is not None
            history = ring.gather(step.history).flatten(0, 1)
            records = ring.format.encode(kv)
            source = torch.cat((history, ring.format.decode(records)))
        view, chosen = step.view, step.selection if layer.ratio else None
        keys_per_row = view.at.shape[1]
        if chosen is not None:
            assert chosen.slots is not None
            keys_per_row += chosen.slots.shape[1]
        tile = max(1, _GATHER_BYTES // (4 * keys_per_row * q.shape[2]))
        parts = []
        for begin in range(0, step.num, tile):
            part = slice(begin, begin + tile)
            if isinstance(source, Table):
                near = source.gather(view.at[part])
            else:
                near = source[view.at[part]]
            present = view.present[part]
            if chosen is not None and chosen.present is not None:
                near = torch.cat((near, self._gathered(chosen, part)), 1)
                present = torch.cat((present, chosen.present[part]), 1)
            parts.append(
                self._attention(q[part], near, present, layer.sink, self.text.softmax_scale)
            )
        if records is not None:
            self._store_ring(records, step, ring)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_pages(self, layer: Layer, q: Tensor, step: Step, ring: Table) -> Tensor:
        """Every row reads its keys where they are stored."""
        view, chosen = step.view, step.selection if layer.ratio else None
        main = None if chosen is None else self.pool.main[chosen.source]
        out: Tensor = self._paged_attention(
            q.to(self.numerics.dtype),  # of native numbers it was one before
            ring.data,
            view.at,
            view.present,
            None if main is None else main.data,
            None if chosen is None else chosen.slots,
            None if chosen is None else chosen.present,
            layer.sink,
            self.text.softmax_scale,
            (ring.format.kind, ring.format.kind if main is None else main.format.kind),
        )
        return out

    def _gathered(self, chosen: Selection, part: slice) -> Tensor:
        table = self.pool.main[chosen.source]
        assert chosen.slots is not None
        if chosen.keys is None and 4 * chosen.slots.numel() * table.format.dim <= _KEEP_BYTES:
            chosen.keys = table.gather(chosen.slots)
        if chosen.keys is not None:
            return chosen.keys[part]
        return table.gather(chosen.slots[part])

    # --- Block KV -------------------------------------------------------------------------------

    def compress(self, layer: Layer, x: Tensor, step: Step) -> None:
        """Writes the entries that these rows complete at a source layer. x: [n, D], normed."""
        weights, numerics, rows = layer.compressor, self.numerics, step.rows
        assert weights is not None
        number = int(layer.name.split(".")[1])
        ratio, per_block = layer.ratio, self.pool.sources[number].entries
        done, partner, partner_slots, entries = rows.groups(ratio)
        if weights.gate is None:
            latent = numerics.linear(x, weights.kv)[done]
        else:
            wide = x.float()
            value = numerics.project(wide, weights.kv.data)
            score = numerics.project(wide, weights.gate.data)
            kept, slots = rows.pool_writes()
            latent = self._pool_c2(
                score,
                value,
                self.states.pools[number],
                slots,
                partner,
                partner_slots,
                done,
                kept,
            ).to(numerics.dtype)
        if len(done) == 0:
            return
        latent = self.norm(latent, weights.norm)
        turns = rotations(entries * ratio, self._frequencies[True])
        keys = self.norm(numerics.linear(latent, weights.index_k), weights.index_k_norm)
        keys = self._rope(keys[:, None, :], turns)[:, 0]
        main = self._rope(latent[:, None, :].clone(), turns)[:, 0]
        stored, slots = rows.entry_writes(ratio, per_block)
        for table, values in ((self.pool.main[number], main), (self.pool.index[number], keys)):
            values = values if stored is None else values[stored]
            self.write(table, slots, values)

    def _select(self, layer: Layer, x: Tensor, qr: Tensor, turns: Tensor, step: Step) -> None:
        """Brings the step's selection up to what this layer reads."""
        number = int(layer.name.split(".")[1])
        text = self.text
        source = text.kv_source(number)
        if layer.indexer is None:
            assert step.selection is not None
            assert step.selection.source == source
            return
        per_block = self.pool.sources[source].entries
        visible = (step.rows.pos + 1) // layer.ratio
        most = step.rows.longest // layer.ratio
        chosen = Selection(source, per_block, visible, most)
        step.selection = chosen
        is_candidate_source = number == text.candidate_source_layer_id
        if is_candidate_source:
            step.candidates = None
        if most > text.index_topk:
            queries = self._index_queries(layer, qr, turns)
            weights = self.numerics.linear(x, layer.indexer.weights).float() * self._index_scale
            self._score(layer, queries, weights, step, is_candidate_source)
        if step.dense and source not in step.entry_keys:
            assert isinstance(step.rows, Rows), "only the host's rows are dense"
            main = self.pool.main[source]
            step.entry_keys[source] = self._span_entries(step.rows, main, layer.ratio)
        if not step.dense:
            self._place(step)

    def _index_queries(self, layer: Layer, qr: Tensor, turns: Tensor) -> Tensor:
        """Returns the indexer's queries as the stored keys are compared with them, float32."""
        text = self.text
        assert layer.indexer is not None
        queries = self.numerics.linear(qr, layer.indexer.query)
        queries = self._rope(queries.view(-1, text.index_n_heads, text.index_head_dim), turns)
        if not self.numerics.quantised_kv:
            return queries.float()
        return self.pool.index[text.kv_source_layer_ids[0]].format.round_trip(queries)

    def _score(
        self, layer: Layer, queries: Tensor, weights: Tensor, step: Step, makes_candidates: bool
    ) -> None:
        text, chosen = self.text, step.selection
        assert chosen is not None
        table = self.pool.index[chosen.source]
        number = int(layer.name.split(".")[1])
        limited = text.candidate_source_layer_id
        restricted = limited is not None and number > limited
        ids: list[Tensor] = []
        blocks: list[Tensor] = []
        if self._pages and step.rows.writes_first:
            scores = self._paged_scores(
                queries,
                weights,
                table.data,
                step.rows.req,
                step.rows.tables,
                chosen.visible,
                chosen.per_block,
                table.format.kind,
                ENTRY_TILE if self.numerics.invariant else 0,
            )
            self._choose(scores, slice(None), step, restricted, makes_candidates, ids, blocks)
        elif not step.dense:
            entries = torch.arange(chosen.most, device=queries.device)
            req = step.rows.req[:, None]
            tile = max(1, _GATHER_BYTES // (4 * max(1, chosen.most) * table.format.dim))
            for begin in range(0, step.num, tile):
                part = slice(begin, begin + tile)
                slots = step.rows.entry_slots(req[part], entries[None, :], chosen.per_block)
                scores = self._scores(
                    queries[part],
                    weights[part],
                    table.gather(slots),
                    ENTRY_TILE if self.numerics.invariant else 0,
                )
                self._choose(scores, part, step, restricted, makes_candidates, ids, blocks)
        else:
            rows = step.rows
            assert isinstance(rows, Rows), "only the host's rows are dense"
            keys = self._span_entries(rows, table, layer.ratio)
            for span, first, own in zip(rows.spans, rows.first_rows, keys, strict=True):
                tile = max(1, _GATHER_BYTES // (4 * max(1, len(own)) * text.index_n_heads))
                for begin in range(0, len(span.ids), tile):
                    part = slice(first + begin, first + min(len(span.ids), begin + tile))
                    scores = self._scores(queries[part], weights[part], own)
                    self._choose(scores, part, step, restricted, makes_candidates, ids, blocks)
        chosen.ids = torch.cat(ids)
        if makes_candidates:
            step.candidates = torch.cat(blocks)

    def _choose(
        self,
        scores: Tensor,
        part: slice,
        step: Step,
        restricted: bool,
        makes_candidates: bool,
        ids: list[Tensor],
        blocks: list[Tensor],
    ) -> None:
        text, chosen = self.text, step.selection
        assert chosen is not None
        visible = chosen.visible[part]
        allowed = None
        if restricted and step.candidates is not None:
            allowed = candidate_mask(
                step.candidates[part], scores.shape[1], text.candidate_block_size
            )
        ids.append(self._topk(scores, visible, text.index_topk, allowed))
        if makes_candidates:
            blocks.append(
                self._candidates(
                    scores, visible, text.candidate_block_size, text.candidate_topk_blocks
                )
            )

    def _span_entries(self, rows: Rows, table: Table, ratio: int) -> list[Tensor]:
        """Returns all entries of each span, [E, d] float32."""
        found = []
        per_block = self._per_block(table)
        for i, span in enumerate(rows.spans):
            entries = torch.arange(span.end // ratio, device=rows.device)
            found.append(table.gather(rows.entry_slots(i, entries, per_block)))
        return found

    def _per_block(self, table: Table) -> int:
        return table.data.shape[0] // self.pool.num_blocks

    def _place(self, step: Step) -> None:
        """Turns chosen entries into pool slots, padded to one width where bits must not depend."""
        chosen, text = step.selection, self.text
        assert chosen is not None
        if chosen.ids is None:
            width = (
                text.index_topk if self.numerics.invariant else min(chosen.most, text.index_topk)
            )
            at = torch.arange(width, device=step.rows.device)
            ids = torch.where(at < chosen.visible[:, None], at, -1)
        else:
            ids = chosen.ids
        chosen.present = ids >= 0
        safe = ids.clamp(min=0)
        chosen.slots = step.rows.entry_slots(step.rows.req[:, None], safe, chosen.per_block)

    # --- experts and memory ---------------------------------------------------------------------

    def moe(self, layer: Layer, x: Tensor, image: Tensor | None) -> Tensor:
        """Returns routed and shared experts, [n, D]. x: [n, D], normed."""
        moe, numerics, text = layer.moe, self.numerics, self.text
        ids, weights = self._gate(
            x,
            moe.gate,
            moe.bias,
            moe.bias_image,
            image,
            moe.top_k,
            text.routed_scaling_factor,
            numerics.project,
        )
        taken = fake_quant(x) if numerics.native else x
        routed = self._experts.routed(layer.name, taken, ids, weights)
        gate_up = numerics.project(taken if moe.shared13.fp8 else x.float(), moe.shared13.data)
        middle = swiglu(gate_up.to(numerics.dtype), None, text.swiglu_limit)
        shared = numerics.linear(middle.to(numerics.dtype), moe.shared2)
        return (routed + shared.float()).to(numerics.dtype)

    def engram(self, layer: Layer, h: Tensor, gathered: Tensor, image: Tensor | None) -> Tensor:
        """Adds the n-gram memory to the streams. gathered: [n, rows * width] float32."""
        assert layer.engram is not None
        streams, width = h.shape[1:]
        kv = self.numerics.linear(gathered.to(self.numerics.dtype), layer.engram.kv)
        key, value = kv.split((streams * width, width), 1)
        return self._engram_gate(
            h,
            key.unflatten(1, (streams, width)),
            value,
            layer.engram.gate,
            self._eps,
            image,
        )
