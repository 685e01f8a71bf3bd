"""Configurations by name: FLASH as published, and the small ones that run on a laptop's CPU.

Source: model.md, section 2. `engram_num_embeddings` of the small ones is the sum of their primes
(section 13.2) and is filled in here, so that nobody keeps two copies of that number.
"""

from __future__ import annotations

from dataclasses import replace

from services.engine.model.config import (
    ModelConfig,
    RopeScaling,
    SystemConfig,
    TextConfig,
    VisionConfig,
)
from services.engine.model.engram_hash import table_rows

FLASH = ModelConfig()

_TINY_TEXT = TextConfig(
    vocab_size=2048,
    hidden_size=128,
    num_hidden_layers=8,
    num_attention_heads=8,
    head_dim=64,
    qk_rope_head_dim=32,
    q_lora_rank=96,
    o_groups=4,
    o_lora_rank=32,
    sliding_window=16,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 0, 0),
    kv_source_layer_ids=(1, 4),
    index_source_layer_ids=(1, 3, 4, 6),
    index_n_heads=8,
    index_head_dim=32,
    index_topk=16,
    candidate_source_layer_id=4,
    candidate_topk_blocks=8,
    candidate_block_size=4,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=256),
    max_position_embeddings=8192,
    moe_intermediate_size=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    engram_layer_ids=(1, 2),
    engram_n_heads=2,
    engram_head_dim=32,
    engram_vocab_size=500,
    engram_compressed_vocab_size=2048,
    num_nextn_predict_layers=2,
    dspark_noise_token_id=2040,
    dspark_target_layer_ids=(5, 6, 7),
    dspark_markov_rank=32,
    dspark_n_routed_experts=8,
    dspark_num_experts_per_tok=2,
)
_TINY_VISION = VisionConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=128,
    max_image_tokens=64,
    min_pixels=7056,
)


def _with_tables(text: TextConfig) -> TextConfig:
    return replace(text, engram_num_embeddings=table_rows(text))


TINY = ModelConfig(
    text=_with_tables(_TINY_TEXT),
    vision=_TINY_VISION,
    system=SystemConfig(block_tokens=16, keep_tokens=24),
    image_token_id=2041,
)

# Numeric fixtures: its q_lora_rank is no multiple of 32, so it has no quantised form.
NANO = ModelConfig(
    text=_with_tables(
        replace(
            _TINY_TEXT,
            vocab_size=256,
            hidden_size=64,
            num_attention_heads=4,
            head_dim=32,
            qk_rope_head_dim=16,
            q_lora_rank=48,
            o_groups=2,
            o_lora_rank=16,
            sliding_window=8,
            index_topk=8,
            candidate_topk_blocks=4,
            moe_intermediate_size=32,
            swiglu_limit=1.5,  # low, so that the clamps are exercised
            engram_vocab_size=64,
            engram_compressed_vocab_size=256,
            dspark_noise_token_id=251,
            dspark_markov_rank=16,
        )
    ),
    vision=_TINY_VISION,
    quantization=None,
    system=SystemConfig(block_tokens=8, keep_tokens=16),
    image_token_id=250,
)

# The real tokenizer and the real token map at a size that a CPU runs.
TINY_FULLVOCAB = ModelConfig(
    text=_with_tables(
        replace(
            _TINY_TEXT,
            vocab_size=129280,
            hidden_size=64,
            engram_compressed_vocab_size=99092,
            dspark_noise_token_id=128799,
        )
    ),
    vision=_TINY_VISION,
    system=SystemConfig(block_tokens=16, keep_tokens=24),
    image_token_id=129264,
)

PRESETS = {
    "flash": FLASH,
    "tiny": TINY,
    "nano": NANO,
    "tiny-fullvocab": TINY_FULLVOCAB,
}
