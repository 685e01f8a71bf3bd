"""Storage formats of the network: E2M1, E4M3, E8M0, and the groups that share a scale.

The semantics of every quantised tensor live here; device kernels are tested against these. All
functions are pure and work on any device; values enter and leave as float32 or bfloat16.
Source: model.md, section 11.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
E2M1_MAX = 6.0
GROUP = 32  # channels per E8M0 scale
KV_GROUP = 16  # channels per E4M3 scale of a main KV entry

_E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FLOOR_E4M3 = 1e-4
_FLOOR_E2M1 = 6.0 * 2.0**-126


def _e8m0(amax: Tensor, inverse_max: float, floor: float) -> Tensor:
    """Biased exponent of the smallest power of two that brings amax into range. uint8."""
    scaled = torch.clamp(amax.float(), min=floor) * inverse_max
    bits = scaled.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.clamp(0, 254).to(torch.uint8)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """Returns 2^(b - 127) as float32; byte 0 is the subnormal 2^-127."""
    bits = scale.to(torch.int32) << 23
    return bits.view(torch.float32).masked_fill(scale == 0, 2.0**-127)


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quant_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises rows to E4M3 with one E8M0 scale per 32 channels.

    Args:
        x: [..., k], k a multiple of 32, float.
    Returns: values [..., k] float8_e4m3fn and scales [..., k / 32] uint8.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = _e8m0(groups.abs().amax(-1), 1.0 / E4M3_MAX, _FLOOR_E4M3)
    values = _to_e4m3(groups / e8m0_to_float(scale).unsqueeze(-1))
    return values.flatten(-2), scale


def dequant_fp8_rows(values: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 [..., k] of what `quant_fp8_rows` gave."""
    groups = values.float().unflatten(-1, (-1, GROUP))
    return (groups * e8m0_to_float(scale).unsqueeze(-1)).flatten(-2)


def quant_fp8_tiles(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a weight to E4M3 with one E8M0 scale per 32 x 32 tile.

    Args:
        w: [out, in], float; sides that are no multiple of 32 end in a smaller tile.
    Returns: values [out, in] float8_e4m3fn, scales [ceil(out / 32), ceil(in / 32)] uint8.
    """
    tiles = _tiles(w.float())
    scale = _e8m0(tiles.abs().amax((1, 3)), 1.0 / E4M3_MAX, _FLOOR_E4M3)
    values = _to_e4m3(tiles / e8m0_to_float(scale)[:, None, :, None])
    return values.reshape(tiles.shape[0] * GROUP, -1)[: w.shape[0], : w.shape[1]].contiguous(), (
        scale
    )


def dequant_fp8_tiles(values: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 [out, in] of what `quant_fp8_tiles` gave."""
    tiles = _tiles(values.float())
    full = tiles * e8m0_to_float(scale)[:, None, :, None]
    return full.reshape(tiles.shape[0] * GROUP, -1)[: values.shape[0], : values.shape[1]]


def _tiles(w: Tensor) -> Tensor:
    """[out, in] -> [out / 32, 32, in / 32, 32], padded with zeros."""
    rows, columns = (-(-side // GROUP) * GROUP for side in w.shape)
    padded = torch.zeros(rows, columns, dtype=w.dtype, device=w.device)
    padded[: w.shape[0], : w.shape[1]] = w
    return padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))


def e2m1_codes(x: Tensor) -> Tensor:
    """Rounds to E2M1, ties to the even code, clamped to 6. uint8 codes 0..15 (sign in bit 3)."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    # Upper edge of each code's range, and whether the edge itself still belongs to it (even code).
    above = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for code, edge in enumerate(_E2M1_EDGES):
        stays_on_tie = code % 2 == 0
        above += ((magnitude > edge) if stays_on_tie else (magnitude >= edge)).to(torch.uint8)
    sign = (torch.signbit(x) & (above > 0)).to(torch.uint8)
    return above | (sign << 3)


def e2m1_to_float(codes: Tensor) -> Tensor:
    """Returns the values of codes 0..15 as float32."""
    return signed_values(codes.device)[codes.long()]


@lru_cache(maxsize=16)
def signed_values(device: torch.device) -> Tensor:
    """Returns the value of every code, made once: a table per call would be a copy per call."""
    with torch.inference_mode(False):
        values = [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
        return torch.tensor(values, dtype=torch.float32, device=device)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., k] codes -> [..., k / 2] bytes; channel 2i in the low nibble of byte i."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., k / 2] bytes -> [..., k] codes."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quant_fp4_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises to E2M1 with one E8M0 scale per 32 channels (indexer keys and queries, experts).

    Returns: packed [..., k / 2] uint8 and scales [..., k / 32] uint8.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = _e8m0(groups.abs().amax(-1), 1.0 / E2M1_MAX, _FLOOR_E2M1)
    codes = e2m1_codes(groups / e8m0_to_float(scale).unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), scale


def dequant_fp4_index(packed: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 [..., k] of what `quant_fp4_index` gave."""
    groups = e2m1_to_float(unpack_nibbles(packed)).unflatten(-1, (-1, GROUP))
    return (groups * e8m0_to_float(scale).unsqueeze(-1)).flatten(-2)


def quant_fp4_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a main KV entry to E2M1 with one E4M3 scale per 16 channels.

    Returns: packed [..., k / 2] uint8 and scales [..., k / 16] float8_e4m3fn.
    """
    groups = x.float().unflatten(-1, (-1, KV_GROUP))
    # The scalar is rounded to float32 before it is multiplied.
    wanted = (groups.abs().amax(-1) * (1.0 / 6.0)).clamp(2.0**-9, E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn)
    codes = e2m1_codes(groups / scale.float().unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), scale


def dequant_fp4_kv(packed: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 [..., k] of what `quant_fp4_kv` gave."""
    groups = e2m1_to_float(unpack_nibbles(packed)).unflatten(-1, (-1, KV_GROUP))
    return (groups * scale.float().unsqueeze(-1)).flatten(-2)
