"""Parsing, validation and derived maps of the published configuration."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from services.engine.model.config import ConfigError, ModelConfig
from services.engine.model.engram_hash import EngramHash, layer_primes, multipliers, table_rows
from services.engine.model.presets import FLASH, NANO, PRESETS, TINY


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_survives_writing_and_reading(name, tmp_path):
    PRESETS[name].save(tmp_path)
    assert ModelConfig.load(tmp_path) == PRESETS[name]


def test_the_flash_values_give_the_published_sizes():
    text = FLASH.text
    FLASH.validate()
    assert (text.n_encoder, text.mix_width, text.ring_slots, text.nope_head_dim) == (
        20,
        24,
        134,
        448,
    )
    assert text.engram_rows_per_token == 24


def test_layer_table_of_the_flash_model():
    text = FLASH.text
    assert [text.kv_source(layer) for layer in (2, 7, 8, 13, 14, 19, 20, 39)] == [
        2,
        2,
        8,
        8,
        14,
        14,
        20,
        20,
    ]
    assert [text.index_source(layer) for layer in (2, 13, 19, 23, 24, 27, 31, 35, 39)] == [
        2,
        8,
        14,
        20,
        24,
        24,
        28,
        32,
        36,
    ]


def test_prime_sums_are_the_published_table_sizes():
    assert table_rows(FLASH.text) == (384006168, 384016682) == FLASH.text.engram_num_embeddings
    first, second = layer_primes(FLASH.text)
    assert (first[0], second[-1]) == (16000057, 16000889)


def test_multipliers_are_the_published_ones():
    assert multipliers(FLASH.text, 1).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert multipliers(FLASH.text, 14).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


def test_row_ids_do_not_depend_on_where_a_sequence_is_cut():
    hasher = EngramHash(NANO.text)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 256, 40)
    image = rng.random(40) < 0.1
    whole = hasher.rows(ids, image, 0)
    for cut in (1, 2, 3, 17, 39):
        start = max(0, cut - hasher.history)
        tail = hasher.rows(ids[start:], image[start:], cut - start)
        for all_rows, tail_rows in zip(whole, tail, strict=True):
            assert (all_rows[cut:] == tail_rows).all()


def test_row_ids_stay_inside_their_table():
    hasher = EngramHash(TINY.text)
    ids = np.random.default_rng(2).integers(0, 2048, 500)
    rows = hasher.rows(ids, np.zeros(500, bool), 0)
    for table, total in zip(rows, table_rows(TINY.text), strict=True):
        assert table.min() >= 0
        assert table.max() < total


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"compress_ratios": (0, 2, 2, 1, 2, 1, 1, 1, 0, 0)}, "over the backbone"),
        ({"compress_ratios": (0, 2, 2, 2, 1, 1, 1, 1, 0)}, "one per backbone layer"),
        ({"kv_source_layer_ids": (1,)}, "layer 4"),
        ({"index_source_layer_ids": (1, 3, 6)}, "index_source_layer_ids too"),
        ({"candidate_topk_blocks": 1}, "at least index_topk"),
        ({"engram_layer_ids": (1, 5)}, "encoder layers"),
        ({"dspark_target_layer_ids": (2, 5)}, "one side"),
        ({"o_groups": 3}, "o_groups"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"q_lora_rank": 48}, "multiple of 32"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_by_name(change, expected):
    with pytest.raises(ConfigError, match=expected):
        replace(TINY, text=replace(TINY.text, **change)).validate()


def test_unknown_fields_are_ignored_and_unknown_values_refused():
    document = json.loads(json.dumps(TINY.to_json()))
    document["text_config"]["a_later_field"] = 7
    assert ModelConfig.from_json(document) == TINY
    document["quantization_config"]["scale_fmt"] = "float"
    with pytest.raises(ConfigError, match="scale_fmt"):
        ModelConfig.from_json(document)
    document["architectures"] = ["Other"]
    with pytest.raises(ConfigError, match="architectures"):
        ModelConfig.from_json(document)


def test_confidence_temperatures_travel_in_the_configuration():
    fitted = replace(TINY, system=replace(TINY.system, confidence_temperatures=(0.8, 1, 1, 1.2, 1)))
    assert ModelConfig.from_json(json.loads(json.dumps(fitted.to_json()))) == fitted
    short = replace(TINY, system=replace(TINY.system, confidence_temperatures=(1.0, 1.0)))
    with pytest.raises(ConfigError, match="confidence_temperatures are 5"):
        short.validate()


@pytest.mark.parametrize(
    ("section", "field", "value", "expected"),
    [
        ("text_config", "hidden_size", "128", "hidden_size is '128', expected a whole number"),
        ("text_config", "hidden_size", 0, "hidden_size is 0, expected at least 1"),
        ("text_config", "num_attention_heads", -8, "num_attention_heads is -8"),
        ("text_config", "vocab_size", True, "vocab_size is True, expected a whole number"),
        ("text_config", "num_experts_per_tok", 999, "num_experts_per_tok is 999"),
        ("text_config", "qk_rope_head_dim", 7, "even"),
        ("text_config", "compress_ratios", "0222", "expected a list"),
        ("text_config", "compress_ratios", [0, 2, "2"], r"compress_ratios\[2\] is '2'"),
        ("text_config", "kv_source_layer_ids", [1, 400], "expected layers below 8"),
        ("text_config", "engram_num_embeddings", [], "one for each of engram_layer_ids"),
        ("text_config", "rms_norm_eps", None, "rms_norm_eps is None, expected a number"),
        ("text_config", "rms_norm_eps", float("nan"), "rms_norm_eps is nan, expected a number"),
        ("text_config", "rope_scaling", [], "rope_scaling is \\[\\], expected an object"),
        ("quantization_config", "weight_block_size", 32, "weight_block_size is 32"),
        ("vision_config", "patch_size", 1.5, "patch_size is 1.5"),
        (None, "text_config", 7, "text_config is 7, expected an object"),
        (None, "architectures", "DeepseekV41ForCausalLM", "architectures"),
        (None, "architectures", 3, "architectures is 3"),
        (None, "eos_token_id", [1, 2], "eos_token_id is"),
    ],
)
def test_values_of_another_kind_are_refused_with_their_field(section, field, value, expected):
    document = json.loads(json.dumps(TINY.to_json()))
    (document if section is None else document[section])[field] = value
    with pytest.raises(ConfigError, match=expected):
        ModelConfig.from_json(document)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"7", b"\xff\xfe{", b"{" * 100_000, b'{"architectures": {}}']
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError):
        ModelConfig.load(tmp_path)
