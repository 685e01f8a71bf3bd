"""Every tensor of a checkpoint: its published name, shape, and how it is stored.

Source: model.md, section 18.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.model.config import ModelConfig, TextConfig

GROUP = 32


@dataclass(frozen=True)
class TensorSpec:
    """A logical tensor. `kind`: bf16, fp32, norm, fp8, fp4 or table."""

    shape: tuple[int, ...]
    kind: str
    fan_in: int = 0  # of a matrix; random weights are scaled by it


@dataclass(frozen=True)
class StoredSpec:
    """A tensor as a file holds it: shape and the types that are accepted."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]

    @property
    def described(self) -> str:
        return f"{list(self.shape)} {' or '.join(self.dtypes)}"


def tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Returns the logical tensors of a model by name, scales not counted."""
    return dict(_all(config))


def stored(name: str, spec: TensorSpec, *, quantised: bool) -> dict[str, StoredSpec]:
    """Returns what files hold for a tensor: itself, and its scale where it has one."""
    shape, kind = spec.shape, spec.kind
    if kind == "fp32":
        return {name: StoredSpec(shape, ("F32",))}
    if kind == "norm":
        return {name: StoredSpec(shape, ("BF16", "F32"))}
    if kind == "bf16" or not quantised:
        return {name: StoredSpec(shape, ("BF16",))}
    scale = scale_name(name)
    if kind == "fp8":
        tiles = tuple(-(-side // GROUP) for side in shape)
        return {
            name: StoredSpec(shape, ("F8_E4M3",)),
            scale: StoredSpec(tiles, ("F8_E8M0", "U8")),
        }
    grouped = (*shape[:-1], shape[-1] // GROUP)
    if kind == "fp4":
        return {
            name: StoredSpec((*shape[:-1], shape[-1] // 2), ("I8", "U8")),
            scale: StoredSpec(grouped, ("F8_E8M0", "U8")),
        }
    return {
        name: StoredSpec(shape, ("F8_E4M3",)),
        scale: StoredSpec(grouped, ("F8_E8M0", "U8")),
    }


def scale_name(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def is_ignored(name: str) -> bool:
    """Whether a file may hold a tensor that is not used: copies of embedding and head."""
    return name.startswith("mtp.") and name.split(".", 2)[-1] in ("embed.weight", "head.weight")


def _matrix(rows: int, columns: int, kind: str) -> TensorSpec:
    return TensorSpec((rows, columns), kind, columns)


def _all(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    text = config.text
    width = text.hidden_size
    yield "embed.weight", TensorSpec((text.vocab_size, width), "bf16", 1)
    yield "head.weight", _matrix(text.vocab_size, width, "bf16")
    yield "norm.weight", TensorSpec((width,), "norm")
    for layer in range(text.num_hidden_layers):
        yield from _block(text, f"layers.{layer}", text.n_routed_experts)
        yield from _sources(text, layer)
    for number, layer in enumerate(text.engram_layer_ids):
        yield from _engram(text, layer, text.engram_num_embeddings[number])
    for layer in range(text.num_nextn_predict_layers):
        yield from _block(text, f"mtp.{layer}", text.dspark_n_routed_experts)
    if text.num_nextn_predict_layers:
        yield from _drafter(text)
    if config.vision is not None:
        yield from _vision(config)


def _block(text: TextConfig, at: str, experts: int) -> Iterator[tuple[str, TensorSpec]]:
    width, heads, dim = text.hidden_size, text.num_attention_heads, text.head_dim
    groups, rank = text.o_groups, text.o_lora_rank
    yield f"{at}.attn_norm.weight", TensorSpec((width,), "norm")
    yield f"{at}.ffn_norm.weight", TensorSpec((width,), "norm")
    for site in ("attn", "ffn"):
        streams = text.hc_mult * width
        yield f"{at}.hc_{site}_fn", TensorSpec((text.mix_width, streams), "fp32", streams)
        yield f"{at}.hc_{site}_base", TensorSpec((text.mix_width,), "fp32")
        yield f"{at}.hc_{site}_scale", TensorSpec((3,), "fp32")
    yield f"{at}.attn.wq_a.weight", _matrix(text.q_lora_rank, width, "fp8")
    yield f"{at}.attn.q_norm.weight", TensorSpec((text.q_lora_rank,), "norm")
    yield f"{at}.attn.wq_b.weight", _matrix(heads * dim, text.q_lora_rank, "fp8")
    yield f"{at}.attn.wkv.weight", _matrix(dim, width, "fp8")
    yield f"{at}.attn.kv_norm.weight", TensorSpec((dim,), "norm")
    yield f"{at}.attn.attn_sink", TensorSpec((heads,), "fp32")
    yield f"{at}.attn.wo_a.weight", _matrix(groups * rank, heads * dim // groups, "fp8")
    yield f"{at}.attn.wo_b.weight", _matrix(width, groups * rank, "fp8")
    yield f"{at}.ffn.gate.weight", _matrix(experts, width, "bf16")
    yield f"{at}.ffn.gate.bias", TensorSpec((experts,), "fp32")
    yield f"{at}.ffn.gate.bias_vl", TensorSpec((experts,), "fp32")
    inner = text.moe_intermediate_size
    for expert in range(experts):
        yield from _mlp(f"{at}.ffn.experts.{expert}", width, inner, "fp4")
    yield from _mlp(f"{at}.ffn.shared_experts", width, inner, "fp8")


def _mlp(at: str, width: int, inner: int, kind: str) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{at}.w1.weight", _matrix(inner, width, kind)
    yield f"{at}.w3.weight", _matrix(inner, width, kind)
    yield f"{at}.w2.weight", _matrix(width, inner, kind)


def _sources(text: TextConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    at, width = f"layers.{layer}.attn", text.hidden_size
    if layer in text.kv_source_layer_ids:
        yield f"{at}.compressor.wkv.weight", _matrix(text.head_dim, width, "bf16")
        if text.ratio(layer) == 2:
            yield f"{at}.compressor.wgate.weight", _matrix(text.head_dim, width, "bf16")
        yield f"{at}.compressor.norm.weight", TensorSpec((text.head_dim,), "norm")
        yield f"{at}.indexer.wk.weight", _matrix(text.index_head_dim, text.head_dim, "bf16")
        yield f"{at}.indexer.k_norm.weight", TensorSpec((text.index_head_dim,), "norm")
    if layer in text.index_source_layer_ids:
        queries = text.index_n_heads * text.index_head_dim
        yield f"{at}.indexer.wq_b.weight", _matrix(queries, text.q_lora_rank, "fp8")
        yield f"{at}.indexer.weights_proj.weight", _matrix(text.index_n_heads, width, "bf16")


def _engram(text: TextConfig, layer: int, rows: int) -> Iterator[tuple[str, TensorSpec]]:
    at, width, streams = f"layers.{layer}.engram", text.hidden_size, text.hc_mult
    yield f"{at}.q_weight", TensorSpec((streams, width), "norm")
    yield f"{at}.k_weight", TensorSpec((streams, width), "norm")
    yield f"{at}.embed.weight", TensorSpec((rows, text.engram_head_dim), "table", 1)
    gathered = text.engram_rows_per_token * text.engram_head_dim
    yield f"{at}.wkv.weight", _matrix(width * (streams + 1), gathered, "fp8")


def _drafter(text: TextConfig) -> Iterator[tuple[str, TensorSpec]]:
    width, rank = text.hidden_size, text.dspark_markov_rank
    last = f"mtp.{text.num_nextn_predict_layers - 1}"
    features = width * len(text.dspark_target_layer_ids)
    yield "mtp.0.main_proj.weight", _matrix(width, features, "fp8")
    yield "mtp.0.main_norm.weight", TensorSpec((width,), "norm")
    yield f"{last}.norm.weight", TensorSpec((width,), "norm")
    yield f"{last}.markov_head.embed.weight", TensorSpec((text.vocab_size, rank), "bf16", 1)
    yield f"{last}.markov_head.head.weight", _matrix(text.vocab_size, rank, "bf16")
    yield f"{last}.confidence_head.proj.weight", _matrix(1, width + rank, "bf16")


def _vision(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    vision = config.vision
    assert vision is not None
    width, inner, text_width = vision.hidden_size, vision.intermediate_size, config.text.hidden_size
    for name in ("image_start", "image_end", "image_newline"):
        yield name, TensorSpec((text_width,), "norm", 1)
    yield "vision.patch_embed.proj.weight", _matrix(width, 3 * vision.patch_size**2, "bf16")
    yield "vision.patch_embed.proj.bias", TensorSpec((width,), "bf16")
    for layer in range(vision.num_hidden_layers):
        at = f"vision.blocks.{layer}"
        yield f"{at}.norm1.weight", TensorSpec((width,), "norm")
        yield f"{at}.norm2.weight", TensorSpec((width,), "norm")
        yield f"{at}.attn.wqkv.weight", _matrix(3 * width, width, "bf16")
        yield f"{at}.attn.wqkv.bias", TensorSpec((3 * width,), "bf16")
        yield f"{at}.attn.wo.weight", _matrix(width, width, "bf16")
        yield f"{at}.attn.wo.bias", TensorSpec((width,), "bf16")
        yield f"{at}.mlp.w1.weight", _matrix(2 * inner, width, "bf16")
        yield f"{at}.mlp.w2.weight", _matrix(width, inner, "bf16")
    yield "vision.norm.weight", TensorSpec((width,), "norm")
    cell = width * vision.downsample_ratio**2
    yield "aligner.w1.weight", _matrix(text_width, cell, "bf16")
    yield "aligner.w1.bias", TensorSpec((text_width,), "bf16")
    yield "aligner.w2.weight", _matrix(text_width, text_width, "bf16")
    yield "aligner.w2.bias", TensorSpec((text_width,), "bf16")
