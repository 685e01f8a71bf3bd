"""Memory of an engine: paged Block KV, window rings, pooling state; and their bytes outside.

On the device every source layer has a table of records, addressed by slot. The stored form of a
block and of a state is the exact byte layout that engines exchange.
Source: model.md, section 10; engine.md, sections 0 and 1.8.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.reference import formats, stores
from services.engine.layout import Geometry, KvLayout, Region, Section
from services.engine.model.config import ModelConfig, TextConfig
from services.engine.model.numerics import Numerics

_PAGE = 4096
_ALIGN = 32
_CURSOR_WORDS = 4  # num_cached, valid_start, decoder_from, 0


@dataclass(frozen=True)
class RecordFormat:
    """How a row of `dim` channels is kept: raw float32, window FP8, main FP4 or index FP4."""

    kind: str
    dim: int

    @property
    def value_bytes(self) -> int:
        return {"raw": 4 * self.dim, "fp8": self.dim}.get(self.kind, self.dim // 2)

    @property
    def scale_bytes(self) -> int:
        return {"raw": 0, "fp4kv": self.dim // formats.KV_GROUP}.get(
            self.kind, self.dim // formats.GROUP
        )

    @property
    def record_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes

    def table(self, slots: int, device: torch.device) -> Tensor:
        """Returns zeroed records, [slots, dim] float32 or [slots, record_bytes] uint8."""
        if self.kind == "raw":
            return torch.zeros(slots, self.dim, device=device)
        return torch.zeros(slots, self.record_bytes, dtype=torch.uint8, device=device)

    def encode(self, x: Tensor) -> Tensor:
        """Returns the records of rows [n, dim]."""
        if self.kind == "raw":
            return x.float()
        if self.kind == "fp8":
            return stores.window_bytes(x)
        if self.kind == "fp4kv":
            return stores.entry_bytes(x)
        return torch.cat(formats.quant_fp4_index(x), -1)

    def decode(self, records: Tensor) -> Tensor:
        """Returns what records stand for, [..., dim] float32."""
        if self.kind == "raw":
            return records
        if self.kind == "fp8":
            return stores.window_values(records)
        if self.kind == "fp4kv":
            return stores.entry_values(records)
        half = self.value_bytes
        return formats.dequant_fp4_index(records[..., :half], records[..., half:])

    def round_trip(self, x: Tensor) -> Tensor:
        """Returns x as a reader of the cache sees it, float32."""
        return self.decode(self.encode(x))


class Table:
    """Records by slot; slot numbers come from whoever owns the pool."""

    def __init__(self, record: RecordFormat, slots: int, device: torch.device) -> None:
        self.format = record
        self.data = record.table(slots, device)

    def store(self, slots: Tensor, records: Tensor) -> None:
        """Writes encoded records; slots hold no -1."""
        self.data.index_copy_(0, slots, records)

    def gather(self, slots: Tensor) -> Tensor:
        """Returns the values of slots of any shape, [*shape, dim] float32."""
        flat = self.data.index_select(0, slots.reshape(-1))
        return self.format.decode(flat).view(*slots.shape, self.format.dim)

    def grow(self, slots: int) -> None:
        extra = self.format.table(slots - self.data.shape[0], self.data.device)
        self.data = torch.cat((self.data, extra))

    def bytes_of(self, first: int, last: int) -> np.ndarray:
        """Returns a view of the records [first, last), [n, record_bytes] uint8."""
        rows = self.data[first:last].cpu()
        return rows.view(torch.uint8).numpy().reshape(last - first, self.format.record_bytes)

    def take_bytes(self, first: int, records: np.ndarray) -> None:
        rows = torch.from_numpy(np.array(records))
        self.data[first : first + len(records)] = rows.view(self.data.dtype).to(self.data.device)


@dataclass(frozen=True)
class SourceLayout:
    """Where one source layer's parts lie inside a stored block."""

    layer: int
    ratio: int
    entries: int
    index_at: int
    scales_at: int
    main_at: int
    end: int


@dataclass(frozen=True)
class CacheFormats:
    """The record formats of a model under given numerics."""

    main: RecordFormat
    index: RecordFormat
    window: RecordFormat

    @staticmethod
    def of(text: TextConfig, numerics: Numerics) -> CacheFormats:
        if not numerics.quantised_kv:
            return CacheFormats(
                RecordFormat("raw", text.head_dim),
                RecordFormat("raw", text.index_head_dim),
                RecordFormat("raw", text.head_dim),
            )
        return CacheFormats(
            RecordFormat("fp4kv" if text.use_fp4_sparse_kv else "fp8", text.head_dim),
            RecordFormat("fp4ix", text.index_head_dim),
            RecordFormat("fp8", text.head_dim),
        )


def source_layouts(
    text: TextConfig, block_tokens: int, formats_: CacheFormats
) -> tuple[SourceLayout, ...]:
    """Returns the byte table of a block: per source index values, index scales, main entries."""
    at, found = 0, []
    for layer in text.kv_source_layer_ids:
        entries = block_tokens // text.ratio(layer)
        scales_at = _aligned(at + entries * formats_.index.value_bytes)
        main_at = _aligned(scales_at + entries * formats_.index.scale_bytes)
        end = _aligned(main_at + entries * formats_.main.record_bytes)
        found.append(SourceLayout(layer, text.ratio(layer), entries, at, scales_at, main_at, end))
        at = end
    return tuple(found)


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN


def geometry(config: ModelConfig) -> Geometry:
    """Returns the token counts the schedulers work with."""
    text, system = config.text, config.system
    return Geometry(
        system.block_tokens, text.sliding_window, text.dspark_block_size, system.keep_tokens
    )


def kv_layout(
    config: ModelConfig, numerics: Numerics, *, model_id: str, weights_id: str
) -> KvLayout:
    """Returns what two engines must share to exchange bytes of this model."""
    text = config.text
    records = CacheFormats.of(text, numerics)
    sources = source_layouts(text, config.system.block_tokens, records)
    named = "float32" if records.main.kind == "raw" else f"{records.main.kind}+{records.index.kind}"
    ring = geometry(config).ring
    window_bytes = records.window.record_bytes
    regions = [
        Region(f"window.{layer}", ring, window_bytes, storable=layer < text.n_encoder)
        for layer in range(text.num_hidden_layers)
    ]
    regions += [
        Region(f"draft.{layer}", ring, window_bytes, storable=False)
        for layer in range(text.num_nextn_predict_layers)
    ]
    regions += [
        Region(f"pool.{layer}", pool_slots(text), 8 * text.head_dim, storable=False)
        for layer in c2_sources(text)
    ]
    regions.append(Region("cursor", _CURSOR_WORDS, 4, storable=False))
    return KvLayout(
        geometry(config),
        -(-sources[-1].end // _PAGE) * _PAGE,
        tuple(Section(s.layer, s.index_at, s.end - s.index_at, named, s.ratio) for s in sources),
        tuple(regions),
        model_id,
        weights_id,
    )


def c2_sources(text: TextConfig) -> tuple[int, ...]:
    return tuple(layer for layer in text.kv_source_layer_ids if text.ratio(layer) == 2)


def pool_slots(text: TextConfig) -> int:
    """Slots of a pooling ring: one step's rows and the open half before them."""
    return 2 + text.spec_backoff - 1


def config_digest(config: ModelConfig) -> str:
    """Returns a name for weights that are not told apart otherwise."""
    text = json.dumps(asdict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class BlockPool:
    """Block KV of one rank: per source layer an index table and a main table."""

    def __init__(
        self, config: ModelConfig, numerics: Numerics, num_blocks: int, device: torch.device
    ) -> None:
        records = CacheFormats.of(config.text, numerics)
        self.num_blocks = num_blocks
        self.sources = {
            s.layer: s for s in source_layouts(config.text, config.system.block_tokens, records)
        }
        self.block_bytes = -(-max(s.end for s in self.sources.values()) // _PAGE) * _PAGE
        self.main = {
            layer: Table(records.main, num_blocks * s.entries, device)
            for layer, s in self.sources.items()
        }
        self.index = {
            layer: Table(records.index, num_blocks * s.entries, device)
            for layer, s in self.sources.items()
        }

    def read(self, block: int) -> bytes:
        """Returns a block in the stored form."""
        out = np.zeros(self.block_bytes, np.uint8)
        for layer, s in self.sources.items():
            first = block * s.entries
            index = self.index[layer].bytes_of(first, first + s.entries)
            half = self.index[layer].format.value_bytes
            _put(out, s.index_at, index[:, :half])
            _put(out, s.scales_at, index[:, half:])
            _put(out, s.main_at, self.main[layer].bytes_of(first, first + s.entries))
        return out.tobytes()

    def write(self, block: int, data: bytes) -> None:
        """Loads a block. Raises: ValueError for a wrong length."""
        if len(data) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        raw = np.frombuffer(data, np.uint8)
        for layer, s in self.sources.items():
            index, main = self.index[layer], self.main[layer]
            parts = (
                _cut(raw, s.index_at, s.entries, index.format.value_bytes),
                _cut(raw, s.scales_at, s.entries, index.format.scale_bytes),
            )
            index.take_bytes(block * s.entries, np.concatenate(parts, 1))
            main.take_bytes(
                block * s.entries, _cut(raw, s.main_at, s.entries, main.format.record_bytes)
            )


def _put(out: np.ndarray, at: int, rows: np.ndarray) -> None:
    flat = rows.reshape(-1)
    out[at : at + len(flat)] = flat


def _cut(raw: np.ndarray, at: int, rows: int, width: int) -> np.ndarray:
    return raw[at : at + rows * width].reshape(rows, width)


class StatePool:
    """Rings and pooling state of every sequence, by state slot. Slot 0 takes padding rows."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        ring_slots: int,
        device: torch.device,
        capacity: int = 16,
    ) -> None:
        text = config.text
        record = CacheFormats.of(text, numerics).window
        self.ring_slots = ring_slots
        self.capacity = capacity
        self.n_encoder = text.n_encoder
        self.num_backbone = text.num_hidden_layers
        self.layout_ring = geometry(config).ring
        self.rings = [
            Table(record, capacity * ring_slots, device)
            for _ in range(text.num_hidden_layers + text.num_nextn_predict_layers)
        ]
        self.pool_slots = pool_slots(text)
        self.pools = {
            layer: torch.zeros(capacity * self.pool_slots, 2, text.head_dim, device=device)
            for layer in c2_sources(text)
        }

    def draft_ring(self, layer: int) -> Table:
        return self.rings[self.num_backbone + layer]

    def reserve(self, slot: int) -> None:
        """Makes room for a slot number. Nothing may be computing meanwhile."""
        if slot < self.capacity:
            return
        self.capacity = max(2 * self.capacity, slot + 1)
        for ring in self.rings:
            ring.grow(self.capacity * self.ring_slots)
        for layer, pool in self.pools.items():
            grown = pool.new_zeros(self.capacity * self.pool_slots, *pool.shape[1:])
            grown[: len(pool)] = pool
            self.pools[layer] = grown

    def clear(self, slot: int) -> None:
        """Zeroes a slot."""
        for ring in self.rings:
            ring.data[slot * self.ring_slots : (slot + 1) * self.ring_slots] = 0
        for pool in self.pools.values():
            pool[slot * self.pool_slots : (slot + 1) * self.pool_slots] = 0

    def ring_bytes(self, ring: int, slot: int) -> np.ndarray:
        """Returns the records of one ring of a slot, a copy, [ring_slots, record] uint8."""
        first = slot * self.ring_slots
        return self.rings[ring].bytes_of(first, first + self.ring_slots).copy()

    def ring_rows(self, ring: int, slot: int) -> Tensor:
        """Returns the records of one ring of a slot where they lie, a copy."""
        first = slot * self.ring_slots
        return self.rings[ring].data[first : first + self.ring_slots].clone()

    def as_bytes(self, ring: int, rows: Tensor) -> np.ndarray:
        """Returns what `ring_rows` gave as `ring_bytes` does."""
        width = self.rings[ring].format.record_bytes
        return rows.cpu().view(torch.uint8).numpy().reshape(len(rows), width)

    def relaid(self, records: np.ndarray, low: int, high: int) -> bytes:
        """Returns positions [low, high) of a ring in one of the layout's size; the rest is zero."""
        out = np.zeros((self.layout_ring, records.shape[1]), np.uint8)
        positions = np.arange(max(low, high - self.layout_ring, 0), high)
        out[positions % self.layout_ring] = records[positions % self.ring_slots]
        return out.tobytes()

    def take_ring(self, ring: int, slot: int, data: bytes, high: int) -> None:
        """Loads a ring of the layout's size whose newest position is high - 1."""
        given = np.frombuffer(data, np.uint8).reshape(self.layout_ring, -1)
        own = np.zeros((self.ring_slots, given.shape[1]), np.uint8)
        positions = np.arange(max(0, high - self.layout_ring), high)
        own[positions % self.ring_slots] = given[positions % self.layout_ring]
        self.rings[ring].take_bytes(slot * self.ring_slots, own)

    def pool_bytes(self, slot: int, num_cached: int) -> bytes:
        """Returns the pooling rings with the open half of a group, if there is one."""
        parts = []
        for pool in self.pools.values():
            out = torch.zeros(self.pool_slots, *pool.shape[1:])
            if num_cached % 2:
                at = (num_cached - 1) % self.pool_slots
                out[at] = pool[slot * self.pool_slots + at].cpu()
            parts.append(out.numpy().tobytes())
        return b"".join(parts)

    def take_pools(self, slot: int, data: bytes) -> None:
        values = np.frombuffer(data, np.float32)
        at = 0
        for pool in self.pools.values():
            part = pool[slot * self.pool_slots : (slot + 1) * self.pool_slots]
            count = part.numel()
            part.copy_(torch.from_numpy(values[at : at + count].copy()).view_as(part))
            at += count
