"""Weights of a model, placed for computing: expanded to float32, some matrices joined.

Source: model.md, sections 6, 7, 12, 13, 15 and 18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.model.checkpoint import TensorSource
from services.engine.model.config import ModelConfig, TextConfig
from services.engine.model.device import Device
from services.engine.model.numerics import Numerics, Weight

# Matrices of some routed experts, each [k, ...]: gate and up [2 * I, D], down [D, I]; or, packed,
# E2M1 values and scales of the former, then of the latter.
Experts = tuple[Tensor, ...]


@dataclass(frozen=True)
class HyperSite:
    """Coefficients of one site: [M * (M + 2), M * D], [M * (M + 2)], [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Compressor:
    """Makes Block KV at a source layer; `gate` only where two tokens share an entry."""

    kv: Weight
    gate: Weight | None
    norm: Tensor
    index_k: Weight
    index_k_norm: Tensor


@dataclass(frozen=True)
class IndexerQuery:
    query: Weight
    weights: Weight


@dataclass(frozen=True)
class Engram:
    """`gate`: [M, D], the product of the query's and the key's weights."""

    gate: Tensor
    kv: Weight


@dataclass(frozen=True)
class Moe:
    gate: Tensor
    bias: Tensor
    bias_image: Tensor | None
    top_k: int
    shared13: Weight
    shared2: Weight


@dataclass(frozen=True)
class Layer:
    """One block. `name` is also the key of its routed experts."""

    name: str
    ratio: int
    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperSite
    hc_ffn: HyperSite
    q_kv: Weight  # [q_lora_rank + head_dim, D]: queries' first matrix, then the window KV's
    q_norm: Tensor
    wq_b: Weight
    kv_norm: Tensor
    sink: Tensor
    wo_a: Weight  # [G, Ro, w]
    wo_b: Weight
    moe: Moe
    compressor: Compressor | None = None
    indexer: IndexerQuery | None = None
    engram: Engram | None = None


@dataclass(frozen=True)
class Drafter:
    """What DSpark has beside its layers."""

    main: Weight
    main_norm: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    markov_embed: Tensor
    markov_head: Weight
    confidence: Tensor  # [D + rank]


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    device: Device
    embed: Tensor
    head: Weight
    norm: Tensor
    layers: tuple[Layer, ...]
    drafter: Drafter | None
    # By layer name: number of logical experts, and how to load some of them.
    experts: dict[str, tuple[int, Callable[[Sequence[int]], Experts]]] = field(repr=False)


def load_model(
    config: ModelConfig, source: TensorSource, device: Device, numerics: Numerics
) -> Model:
    """Loads everything but routed experts, n-gram tables and the vision tower.

    Routed experts are loaded by whoever places them: `experts[layer](ids)` gives their matrices.
    """
    load = _Loader(config, source, device, numerics)
    text = config.text
    layers = tuple(
        load.layer(f"layers.{layer}", layer, text.num_experts_per_tok)
        for layer in range(text.num_hidden_layers)
    )
    drafter = load.drafter() if text.num_nextn_predict_layers else None
    experts = {layer.name: (text.n_routed_experts, load.experts_of(layer.name)) for layer in layers}
    for layer in drafter.layers if drafter else ():
        experts[layer.name] = (text.dspark_n_routed_experts, load.experts_of(layer.name))
    return Model(
        config,
        device,
        load.weight("embed.weight").data,
        load.weight("head.weight"),
        load.tensor("norm.weight"),
        layers,
        drafter,
        experts,
    )


def held_as(device: Device, numerics: Numerics) -> torch.dtype:
    """Returns the type that matrices are held in.

    A GPU multiplies bfloat16 with float32 sums. E4M3 and E2M1 with scales that are powers of two
    are bfloat16 values, as are activations in native mode: the product is that of the stored forms.
    """
    return torch.bfloat16 if numerics.native and device.kind != "cpu" else torch.float32


def packs_experts(config: ModelConfig, device: Device, numerics: Numerics) -> bool:
    """Returns whether routed experts stay E2M1 in memory, and are expanded by what multiplies.

    Activations are E4M3 then, so that the tensor cores' bfloat16 holds both sides of a product.
    """
    return numerics.native and device.kind != "cpu" and config.quantization is not None


class _Loader:
    def __init__(
        self, config: ModelConfig, source: TensorSource, device: Device, numerics: Numerics
    ) -> None:
        self._text: TextConfig = config.text
        self._source = source
        self._device = device
        self._held = held_as(device, numerics)
        self._packs = packs_experts(config, device, numerics)
        # Without a quantised form no operand is quantised, whatever the activations are.
        self._quantised = config.quantization is not None

    def tensor(self, name: str) -> Tensor:
        return self._device.place(self._source.matrix(name))

    def weight(self, *names: str, fp8: bool = False) -> Weight:
        """Joins matrices that read the same input, one below the other."""
        parts = [self._source.matrix(name) for name in names]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        held = self._device.place(joined.to(self._held).contiguous())
        return Weight(held, fp8 and self._quantised)

    def layer(self, name: str, number: int | None, top_k: int) -> Layer:
        text, at = self._text, f"{name}.attn"
        is_backbone = number is not None
        groups = text.o_groups
        wo_a = self.weight(f"{at}.wo_a.weight", fp8=True)
        return Layer(
            name=name,
            ratio=text.ratio(number) if number is not None else 0,
            attn_norm=self.tensor(f"{name}.attn_norm.weight"),
            ffn_norm=self.tensor(f"{name}.ffn_norm.weight"),
            hc_attn=self._site(f"{name}.hc_attn"),
            hc_ffn=self._site(f"{name}.hc_ffn"),
            q_kv=self.weight(f"{at}.wq_a.weight", f"{at}.wkv.weight", fp8=True),
            q_norm=self.tensor(f"{at}.q_norm.weight"),
            wq_b=self.weight(f"{at}.wq_b.weight", fp8=True),
            kv_norm=self.tensor(f"{at}.kv_norm.weight"),
            sink=self.tensor(f"{at}.attn_sink"),
            wo_a=Weight(wo_a.data.view(groups, text.o_lora_rank, -1), wo_a.fp8),
            wo_b=self.weight(f"{at}.wo_b.weight", fp8=True),
            moe=Moe(
                self.tensor(f"{name}.ffn.gate.weight"),
                self.tensor(f"{name}.ffn.gate.bias"),
                self.tensor(f"{name}.ffn.gate.bias_vl") if is_backbone else None,
                top_k,
                self.weight(
                    f"{name}.ffn.shared_experts.w1.weight",
                    f"{name}.ffn.shared_experts.w3.weight",
                    fp8=True,
                ),
                self.weight(f"{name}.ffn.shared_experts.w2.weight", fp8=True),
            ),
            compressor=self._compressor(number) if number in text.kv_source_layer_ids else None,
            indexer=(
                IndexerQuery(
                    self.weight(f"{at}.indexer.wq_b.weight", fp8=True),
                    self.weight(f"{at}.indexer.weights_proj.weight"),
                )
                if number in text.index_source_layer_ids
                else None
            ),
            engram=(
                Engram(
                    self.tensor(f"{name}.engram.q_weight") * self.tensor(f"{name}.engram.k_weight"),
                    self.weight(f"{name}.engram.wkv.weight", fp8=True),
                )
                if number in text.engram_layer_ids
                else None
            ),
        )

    def _site(self, name: str) -> HyperSite:
        return HyperSite(
            self.tensor(f"{name}_fn"), self.tensor(f"{name}_base"), self.tensor(f"{name}_scale")
        )

    def _compressor(self, layer: int | None) -> Compressor:
        assert layer is not None
        at = f"layers.{layer}.attn"
        gated = self._text.ratio(layer) == 2
        return Compressor(
            self.weight(f"{at}.compressor.wkv.weight"),
            self.weight(f"{at}.compressor.wgate.weight") if gated else None,
            self.tensor(f"{at}.compressor.norm.weight"),
            self.weight(f"{at}.indexer.wk.weight"),
            self.tensor(f"{at}.indexer.k_norm.weight"),
        )

    def drafter(self) -> Drafter:
        text = self._text
        last = f"mtp.{text.num_nextn_predict_layers - 1}"
        return Drafter(
            self.weight("mtp.0.main_proj.weight", fp8=True),
            self.tensor("mtp.0.main_norm.weight"),
            tuple(
                self.layer(f"mtp.{layer}", None, text.dspark_num_experts_per_tok)
                for layer in range(text.num_nextn_predict_layers)
            ),
            self.tensor(f"{last}.norm.weight"),
            self.weight(f"{last}.markov_head.embed.weight").data.float(),
            self.weight(f"{last}.markov_head.head.weight"),
            self.tensor(f"{last}.confidence_head.proj.weight")[0],
        )

    def experts_of(self, name: str) -> Callable[[Sequence[int]], Experts]:
        read = self._packed_expert if self._packs else self._expert

        def load(ids: Sequence[int]) -> Experts:
            parts = [read(f"{name}.ffn.experts.{expert}") for expert in ids]
            stacked = (torch.stack(part) for part in zip(*parts, strict=True))
            return tuple(self._device.place(part) for part in stacked)

        return load

    def _expert(self, at: str) -> Experts:
        w1, w2, w3 = (self._source.matrix(f"{at}.{part}.weight") for part in ("w1", "w2", "w3"))
        return torch.cat((w1, w3)).to(self._held), w2.to(self._held)

    def _packed_expert(self, at: str) -> Experts:
        found = [self._source.packed(f"{at}.{part}.weight") for part in ("w1", "w2", "w3")]
        w1, w2, w3 = (part for part in found if part is not None)
        up = [torch.cat(halves) for halves in zip(w1, w3, strict=True)]
        return (*up, *w2)
