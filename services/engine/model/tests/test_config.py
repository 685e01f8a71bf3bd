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
