"""Round trips of the storage formats, ties and edges included. Source: model.md, section 11."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import formats as f

pytestmark = pytest.mark.engine


def test_e2m1_rounds_to_the_nearest_and_ties_to_the_even_code():
    given = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.26, 0.74, 4.9, 5.1, 6.0, 99.0])
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.5, 0.5, 4.0, 6.0, 6.0, 6.0]
    assert f.e2m1_to_float(f.e2m1_codes(given)).tolist() == wanted
    assert f.e2m1_to_float(f.e2m1_codes(-given)).tolist() == [-v if v else 0.0 for v in wanted]


def test_every_code_survives_a_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    again = f.e2m1_codes(f.e2m1_to_float(codes))
    assert again[codes != 8].tolist() == codes[codes != 8].tolist()  # 8 is minus zero
    assert torch.equal(f.unpack_nibbles(f.pack_nibbles(codes)), codes)
    assert f.pack_nibbles(torch.tensor([7, 9], dtype=torch.uint8)).tolist() == [0x97]


def test_e8m0_is_the_smallest_power_of_two_that_brings_the_group_into_range():
    for amax, exponent in ((448.0, 0), (449.0, 1), (896.0, 1), (447.0, 0), (224.0, -1), (1.0, -8)):
        x = torch.zeros(1, 32)
        x[0, 5] = amax
        assert int(f.quant_fp8_rows(x)[1]) - 127 == exponent, amax
    for byte in (0, 1, 127, 254):
        scale = torch.tensor([byte], dtype=torch.uint8)
        assert float(f.e8m0_to_float(scale)) == 2.0 ** (byte - 127)


@pytest.mark.parametrize(
    ("quant", "dequant", "relative"),
    [
        (f.quant_fp8_rows, f.dequant_fp8_rows, 2**-4),
        (f.quant_fp4_index, f.dequant_fp4_index, 0.26),
        (f.quant_fp4_kv, f.dequant_fp4_kv, 0.26),
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 127, 129])
def test_round_trips_are_near_and_idempotent(quant, dequant, relative, rows):
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)) * 3
    once = dequant(*quant(x))
    assert once.shape == x.shape
    bound = relative * x.unflatten(-1, (-1, 16 if quant is f.quant_fp4_kv else 32)).abs().amax(-1)
    error = (once - x).abs().unflatten(-1, (bound.shape[-1], -1)).amax(-1) if rows else bound
    assert bool((error <= bound).all())
    assert torch.equal(dequant(*quant(once)), once)


@pytest.mark.parametrize(
    ("quant", "dequant"),
    [
        (f.quant_fp8_rows, f.dequant_fp8_rows),
        (f.quant_fp4_index, f.dequant_fp4_index),
        (f.quant_fp4_kv, f.dequant_fp4_kv),
    ],
)
def test_a_group_of_zeros_stays_zero(quant, dequant):
    x = torch.zeros(2, 64)
    x[0, 32:] = 5.0
    back = dequant(*quant(x))
    assert back[0, :32].abs().max() == 0
    assert back[1].abs().max() == 0
    assert back[0, 32:].min() == 5.0 or abs(float(back[0, 40]) - 5) < 1.3


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (48, 32), (33, 65)])
def test_tiles_share_a_scale_and_odd_sides_end_in_smaller_tiles(shape):
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    values, scale = f.quant_fp8_tiles(w)
    assert values.shape == shape
    assert scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    back = f.dequant_fp8_tiles(values, scale)
    assert (back - w).abs().max() <= 2**-4 * w.abs().max()
    first = w[:32, :32].abs().max()
    assert float(f.e8m0_to_float(scale)[0, 0]) * 448 >= float(first)


def test_experts_fit_into_e4m3_after_dequantisation():
    # E2M1 times a power of two: exact in E4M3 over a limited range of exponents.
    for code in range(16):
        for exponent in range(-6, 7):
            value = f.e2m1_to_float(torch.tensor([code], dtype=torch.uint8)) * 2.0**exponent
            assert torch.equal(value.to(torch.float8_e4m3fn).float(), value)
