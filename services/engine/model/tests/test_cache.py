"""Byte tables of blocks and states. Source: model.md, section 10; cases of the Flash layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.engine.model.cache import (
    BlockPool,
    CacheFormats,
    StatePool,
    geometry,
    kv_layout,
    source_layouts,
)
from services.engine.model.numerics import Numerics
from services.engine.model.presets import FLASH, NANO, TINY

pytestmark = pytest.mark.engine

QUANTISED = Numerics(quantised_kv=True)
CPU = torch.device("cpu")


def test_byte_table_of_a_flash_block():
    sources = source_layouts(FLASH.text, 128, CacheFormats.of(FLASH.text, QUANTISED))
    assert [(s.layer, s.index_at, s.scales_at, s.main_at, s.end) for s in sources] == [
        (2, 0, 4096, 4352, 22784),
        (8, 22784, 26880, 27136, 45568),
        (14, 45568, 49664, 49920, 68352),
        (20, 68352, 76544, 77056, 113920),
    ]
    assert sources[-1].end == 113_920 == 890 * 128
    layout = kv_layout(FLASH, QUANTISED, model_id="m", weights_id="w")
    assert layout.block_bytes == 114_688


def test_state_bytes_of_the_flash_model():
    layout = kv_layout(FLASH, QUANTISED, model_id="m", weights_id="w")
    sizes = {region.name: region.length_bytes for region in layout.regions}
    assert sizes["window.0"] == 70_752
    assert sum(size for name, size in sizes.items() if name.startswith("window.")) == 2_830_080
    assert sum(size for name, size in sizes.items() if name.startswith("draft.")) == 212_256
    assert sum(size for name, size in sizes.items() if name.startswith("pool.")) == 86_016
    assert layout.window_bytes == 1_415_040


def test_general_formula_on_the_small_model():
    text = TINY.text
    sources = source_layouts(text, 16, CacheFormats.of(text, QUANTISED))
    # Ratio 2: 8 entries of 16 + 1 index bytes and 32 + 4 main bytes; ratio 1: 16 of them.
    assert [(s.layer, s.entries) for s in sources] == [(1, 8), (4, 16)]
    assert [s.end - s.index_at for s in sources] == [128 + 32 + 288, 256 + 32 + 576]


def test_the_alternative_entry_format_has_its_own_layout():
    text = replace(FLASH.text, use_fp4_sparse_kv=False)
    config = replace(FLASH, text=text)
    sources = source_layouts(text, 128, CacheFormats.of(text, QUANTISED))
    assert sources[0].end - sources[0].main_at == 64 * 528
    one, other = (
        kv_layout(c, QUANTISED, model_id="m", weights_id="w").signature for c in (FLASH, config)
    )
    assert one != other


@pytest.mark.parametrize("numerics", [Numerics(), QUANTISED], ids=["float32", "quantised"])
def test_a_block_goes_out_and_comes_back_byte_for_byte(numerics):
    pool = BlockPool(TINY, numerics, 4, CPU)
    rng = np.random.default_rng(1)
    for tables in (pool.main, pool.index):
        for table in tables.values():
            values = torch.from_numpy(
                rng.standard_normal((len(table.data), table.format.dim), np.float32)
            )
            table.store(torch.arange(len(values)), table.format.encode(values))
    data = pool.read(2)
    assert len(data) == pool.block_bytes
    assert data != pool.read(3)
    other = BlockPool(TINY, numerics, 4, CPU)
    other.write(1, data)
    assert other.read(1) == data
    for layer, table in pool.main.items():
        e = pool.sources[layer].entries
        assert torch.equal(
            table.gather(torch.arange(2 * e, 3 * e)),
            other.main[layer].gather(torch.arange(e, 2 * e)),
        )
    with pytest.raises(ValueError, match="not 5"):
        other.write(1, b"12345")


def test_index_values_come_before_all_index_scales():
    pool = BlockPool(TINY, QUANTISED, 2, CPU)
    s = pool.sources[1]
    keys = torch.zeros(s.entries, 32)
    keys[3, 0], keys[3, 1] = 6.0, -0.5
    pool.index[1].store(torch.arange(s.entries), pool.index[1].format.encode(keys))
    data = pool.read(0)
    # Entry 3: channel 0 in the low nibble (6.0 is code 7), channel 1 in the high one (-0.5: 9).
    assert data[s.index_at + 3 * 16] == 0x97
    assert data[s.scales_at + 3] == 127
    assert data[s.end :][:16] == bytes(16)


def test_a_larger_ring_is_laid_out_anew():
    prefill = StatePool(NANO, Numerics(), geometry(NANO).prefill_ring, CPU)
    decode = StatePool(NANO, Numerics(), geometry(NANO).ring, CPU)
    dim = NANO.text.head_dim
    for position in range(40):
        slot = 2 * prefill.ring_slots + position % prefill.ring_slots
        prefill.rings[0].data[slot] = torch.full((dim,), float(position))
    data = prefill.relaid(prefill.ring_bytes(0, 2), 40 - 8, 40)
    decode.take_ring(0, 3, data, 40)
    for position in range(32, 40):
        slot = 3 * decode.ring_slots + position % decode.ring_slots
        assert decode.rings[0].data[slot, 0] == position


def test_growing_keeps_what_is_there():
    pool = StatePool(NANO, Numerics(), 14, CPU, capacity=4)
    pool.rings[2].data[3 * 14] = 7.0
    pool.pools[1][3 * pool.pool_slots] = 5.0
    pool.reserve(9)
    assert pool.capacity >= 10
    assert pool.rings[2].data[3 * 14, 0] == 7.0
    assert pool.pools[1][3 * pool.pool_slots, 0, 0] == 5.0
