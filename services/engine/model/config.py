"""Published configuration of the network: parsing, validation, derived maps, small variants.

Field names are those of the published `config.json`. Unknown fields are ignored (a later snapshot
may add some); unknown values of an enumerated field are refused, since they change the numbers.
Source: model.md, sections 1 and 2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ARCHITECTURE = "DeepseekV41ForCausalLM"
SPECIAL_GROUP = 32  # channels that share one scale in every 32-wide format (model.md, section 11)


class ConfigError(ValueError):
    """A configuration that cannot be run; the text names the field and what was expected."""


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigError(text)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters; used by the layers that read compressed entries."""

    rope_type: str = "yarn"
    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True)
class TextConfig:
    """`text_config`; the defaults are the Flash values."""

    model_type: str = "deepseek_v41_text"
    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int | None = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-20
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    use_fp4_sparse_kv: bool = True

    # -- derived values (model.md, section 1.4) --------------------------------------------------

    @property
    def n_encoder(self) -> int:
        """Layers before the first one of ratio 1; also the layer that feeds the decoder half."""
        return self.compress_ratios.index(1)

    def kv_source(self, layer: int) -> int:
        """The layer whose Block KV `layer` reads. Raises: ValueError for a layer without one."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` uses. Raises: ValueError for a layer without one."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry, 0 for a layer that sees the window only."""
        return self.compress_ratios[layer]

    @property
    def nope_head_dim(self) -> int:
        return self.head_dim - self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def mix_width(self) -> int:
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def spec_backoff(self) -> int:
        return self.dspark_block_size + 1

    @property
    def ring_slots(self) -> int:
        return self.sliding_window + self.spec_backoff

    @property
    def engram_rows_per_token(self) -> int:
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def validate(self, *, native: bool = True) -> None:
        """Raises ConfigError where the network could not run. `native`: quantised storage too."""
        self._validate_sizes()
        backbone = self.compress_ratios[: self.num_hidden_layers]
        _require(
            len(self.compress_ratios) == self.num_hidden_layers + self.num_nextn_predict_layers,
            "compress_ratios: one per backbone layer, then one per DSpark layer",
        )
        _require(
            all(ratio == 0 for ratio in self.compress_ratios[self.num_hidden_layers :]),
            "compress_ratios: the DSpark layers have ratio 0",
        )
        order = {0: 0, 2: 1, 1: 2}
        _require(
            all(ratio in order for ratio in backbone)
            and [order[ratio] for ratio in backbone] == sorted(order[r] for r in backbone),
            "compress_ratios: 0 … 0 2 … 2 1 … 1 over the backbone",
        )
        _require(1 in backbone, "compress_ratios: some layer has ratio 1")
        _require(
            self.n_encoder in self.kv_source_layer_ids,
            f"kv_source_layer_ids holds layer {self.n_encoder}, the first of the decoder half",
        )
        _require(
            set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids),
            "kv_source_layer_ids are index_source_layer_ids too",
        )
        for layer, ratio in enumerate(backbone):
            if ratio == 0:
                continue
            for name, sources in (
                ("kv_source_layer_ids", self.kv_source_layer_ids),
                ("index_source_layer_ids", self.index_source_layer_ids),
            ):
                earlier = [source for source in sources if source <= layer]
                _require(
                    bool(earlier) and backbone[max(earlier)] == ratio,
                    f"{name}: layer {layer} has no source of its own ratio {ratio}",
                )
        if self.candidate_source_layer_id is not None:
            source = self.candidate_source_layer_id
            _require(
                source in self.index_source_layer_ids,
                f"candidate_source_layer_id {source} is an index source",
            )
            _require(
                all(
                    self.kv_source(later) == self.kv_source(source)
                    for later in self.index_source_layer_ids
                    if later > source
                ),
                "candidate_source_layer_id: every later index source shares its KV source",
            )
            _require(
                self.candidate_topk_blocks * self.candidate_block_size >= self.index_topk,
                "candidate_topk_blocks * candidate_block_size is at least index_topk",
            )
        _require(
            all(layer < self.n_encoder for layer in self.engram_layer_ids),
            "engram_layer_ids are encoder layers",
        )
        sides = {layer >= self.n_encoder for layer in self.dspark_target_layer_ids}
        _require(len(sides) == 1, "dspark_target_layer_ids lie on one side of the encoder's end")
        _require(
            self.num_attention_heads % self.o_groups == 0, "o_groups divides num_attention_heads"
        )
        _require(self.num_key_value_heads == 1, "num_key_value_heads is 1")
        _require(self.hidden_act == "silu", f"hidden_act {self.hidden_act!r}: silu is known")
        _require(
            self.scoring_func == "sqrtsoftplus", f"scoring_func {self.scoring_func!r} is unknown"
        )
        _require(self.topk_method == "noaux_tc", f"topk_method {self.topk_method!r} is unknown")
        _require(self.norm_topk_prob, "norm_topk_prob is true")
        _require(
            self.rope_scaling.rope_type == "yarn",
            f"rope_type {self.rope_scaling.rope_type!r}: yarn is known",
        )
        if native:
            widths = {
                "hidden_size": self.hidden_size,
                "q_lora_rank": self.q_lora_rank,
                "head_dim": self.head_dim,
                "index_head_dim": self.index_head_dim,
                "moe_intermediate_size": self.moe_intermediate_size,
                "o_lora_rank": self.o_lora_rank,
            }
            for name, width in widths.items():
                _require(
                    width % SPECIAL_GROUP == 0,
                    f"{name} is {width}; quantised storage needs a multiple of {SPECIAL_GROUP}",
                )

    def _validate_sizes(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            _require(value >= 1, f"{name} is {value}, expected at least 1")
        for name in ("num_nextn_predict_layers", "dspark_block_size", "index_topk"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} is {value}, expected at least 0")
        for name, most in (
            ("num_experts_per_tok", self.n_routed_experts),
            ("qk_rope_head_dim", min(self.head_dim, self.index_head_dim)),
            ("engram_pad_token_id", self.vocab_size - 1),
        ):
            value = getattr(self, name)
            _require(0 <= value <= most, f"{name} is {value}, expected at most {most}")
        if self.num_nextn_predict_layers:
            value, most = self.dspark_num_experts_per_tok, self.dspark_n_routed_experts
            _require(
                1 <= value <= most, f"dspark_num_experts_per_tok is {value}, expected 1 to {most}"
            )
            noise = self.dspark_noise_token_id
            _require(0 <= noise < self.vocab_size, f"dspark_noise_token_id is {noise}, no token")
        _require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim is even: pairs are turned")
        for name in (
            "kv_source_layer_ids",
            "index_source_layer_ids",
            "engram_layer_ids",
            "dspark_target_layer_ids",
        ):
            ids = getattr(self, name)
            _require(
                all(0 <= layer < self.num_hidden_layers for layer in ids),
                f"{name} is {list(ids)}, expected layers below {self.num_hidden_layers}",
            )
            _require(list(ids) == sorted(set(ids)), f"{name} is {list(ids)}, expected ascending")
        _require(
            len(self.engram_num_embeddings) == len(self.engram_layer_ids),
            "engram_num_embeddings: one for each of engram_layer_ids",
        )


# Without any of these there is no network.
_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "candidate_block_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "hc_mult",
    "hc_sinkhorn_iters",
    "engram_max_ngram_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_vocab_size",
    "engram_compressed_vocab_size",
)


@dataclass(frozen=True)
class VisionConfig:
    """`vision_config`; the defaults are the Flash values."""

    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    downsample_ratio: int = 3
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class QuantizationConfig:
    """`quantization_config`; the only scheme the published checkpoint uses."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, int] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"

    def validate(self) -> None:
        for name, value, known in (
            ("quant_method", self.quant_method, "fp8"),
            ("activation_scheme", self.activation_scheme, "dynamic"),
            ("scale_fmt", self.scale_fmt, "ue8m0"),
            ("expert_dtype", self.expert_dtype, "fp4"),
            ("weight_block_size", tuple(self.weight_block_size), (32, 32)),
        ):
            _require(value == known, f"quantization_config.{name} is {value!r}; {known!r} is known")


@dataclass(frozen=True)
class SystemConfig:
    """What the services choose, not the checkpoint (model.md, sections 1.4 and 2)."""

    block_tokens: int = 128
    keep_tokens: int = 140
    # Of the draft head, one per position, fitted after training (section 15); none: all 1.
    confidence_temperatures: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A whole model: text, vision, storage format and the system constants that go with it."""

    text: TextConfig = field(default_factory=TextConfig)
    vision: VisionConfig | None = field(default_factory=VisionConfig)
    quantization: QuantizationConfig | None = field(default_factory=QuantizationConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    dtype: str = "bfloat16"
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264

    def validate(self) -> None:
        """Raises ConfigError where the model could not run as stored."""
        self.text.validate(native=self.quantization is not None)
        if self.quantization is not None:
            self.quantization.validate()
        ratios = [ratio for ratio in self.text.compress_ratios if ratio]
        unit = self.text.candidate_block_size * max(ratios)
        # Candidate blocks must not straddle a block of KV.
        _require(
            self.system.block_tokens >= 1
            and self.system.block_tokens % 2 == 0
            and (
                self.text.candidate_source_layer_id is None
                or self.system.block_tokens % unit == 0
                or unit % self.system.block_tokens == 0
            ),
            f"block_tokens {self.system.block_tokens} is even and fits candidate blocks of {unit}",
        )
        _require(
            self.system.keep_tokens >= self.text.ring_slots,
            f"keep_tokens {self.system.keep_tokens} is at least ring_slots {self.text.ring_slots}",
        )
        fitted = self.system.confidence_temperatures
        _require(
            not fitted
            or (len(fitted) == self.text.dspark_block_size and all(value > 0 for value in fitted)),
            f"confidence_temperatures are {self.text.dspark_block_size} positive numbers, or none",
        )

    def to_json(self) -> dict[str, Any]:
        """The nested form of `config.json`."""
        document: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "deepseek_v41",
            "dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "image_token_id": self.image_token_id,
            "text_config": asdict(self.text),
        }
        if self.vision is not None:
            document["vision_config"] = asdict(self.vision)
        if self.quantization is not None:
            document["quantization_config"] = asdict(self.quantization)
        # Ours: readers of the published format ignore it.
        document["pelagos"] = asdict(self.system)
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ModelConfig:
        """Parses a published document. Raises: ConfigError naming the field."""
        _require(isinstance(document, Mapping), "a configuration is an object of named fields")
        architectures = document.get("architectures")
        _require(
            architectures == [ARCHITECTURE],
            f"architectures is {architectures}; exactly [{ARCHITECTURE!r}] is known",
        )
        _require("text_config" in document, "text_config is missing")
        text = _parse(TextConfig, document["text_config"], "text_config")
        vision = document.get("vision_config")
        quantization = document.get("quantization_config")
        config = ModelConfig(
            text=text,
            vision=None if vision is None else _parse(VisionConfig, vision, "vision_config"),
            quantization=(
                None
                if quantization is None
                else _parse(QuantizationConfig, quantization, "quantization_config")
            ),
            system=_parse(SystemConfig, document.get("pelagos") or {}, "pelagos"),
            dtype=str(document.get("dtype", "bfloat16")),
            **{
                name: _typed(document[name], "int", name)
                for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
                if name in document
            },
        )
        config.validate()
        return config

    @staticmethod
    def load(directory: Path) -> ModelConfig:
        """Reads `config.json` of a model directory. Raises: ConfigError, OSError."""
        path = directory / "config.json"
        try:
            document = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:  # bytes that are no text among them
            raise ConfigError(f"{path.name} is no JSON: {error}") from error
        return ModelConfig.from_json(document)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.to_json(), indent=2) + "\n")


def _parse(kind: type, document: Mapping[str, Any], where: str) -> Any:
    """Builds a section out of the known fields of a document; the others are ignored."""
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where} is {document!r}, expected an object of named fields")
    values: dict[str, Any] = {}
    for known in fields(kind):
        if known.name not in document:
            continue
        value = document[known.name]
        if known.name == "rope_scaling":
            value = _parse(RopeScaling, value, f"{where}.rope_scaling")
        elif known.name == "candidate_source_layer_id" and value == -1:
            value = None
        else:
            value = _typed(value, str(known.type), f"{where}.{known.name}")
        values[known.name] = value
    return kind(**values)


_NAMED = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}


def _typed(value: Any, kind: str, where: str) -> Any:
    """Returns a value of a document as a field of an annotation holds it. Raises: ConfigError."""
    if kind.endswith(" | None"):
        return None if value is None else _typed(value, kind.removesuffix(" | None"), where)
    if kind.startswith("tuple["):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} is {value!r}, expected a list")
        inner = kind.removeprefix("tuple[").split(",")[0]
        return tuple(_typed(item, inner, f"{where}[{at}]") for at, item in enumerate(value))
    fits = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value),
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
    }[kind]
    if not fits:
        raise ConfigError(f"{where} is {value!r}, expected {_NAMED[kind]}")
    return value
