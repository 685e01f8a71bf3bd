"""E4M3, E2M1 and E8M0 inside kernels, by bits: the same on every architecture.

Conversions of the compiler to E4M3 need sm_89; cards before it have none, and the interpreter has
others. Bits are exact everywhere. Source: model.md, section 11.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_to_float(byte):
    """Returns float32 of E4M3 bytes. A half of the same bits, moved, is 2^-8 of the value."""
    wide = byte.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def float_to_e4m3(x):
    """Returns E4M3 bytes of float32, to nearest, ties to even, clamped to 448; NaN stays one."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    raw = magnitude.to(tl.uint32, bitcast=True)
    # Three bits of mantissa: half of the last kept one is added, less one where it is even.
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 values are multiples of 2^-9: adding 2^23 rounds to an integer, ties to even.
    small = (magnitude * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def e2m1_to_float(code):
    """Returns float32 of E2M1 codes 0..15."""
    index = (code & 7).to(tl.int32)
    exponent, mantissa = index >> 1, (index & 1).to(tl.float32)
    # 0, 0.5; then (1 + m / 2) * 2^(e - 1)
    power = ((exponent + 126) << 23).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * power)
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def float_to_e2m1(x):
    """Returns E2M1 codes of float32, to nearest, ties to the even code, clamped to 6."""
    m = tl.abs(x)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32)
    code += (m >= 1.75).to(tl.int32) + (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32)
    code += (m > 5.0).to(tl.int32)
    negative = (x.to(tl.uint32, bitcast=True) >> 31) != 0
    return tl.where(negative & (code > 0), code | 8, code).to(tl.uint8)


@triton.jit
def e8m0_of(amax, inverse_max, floor):
    """Returns the biased exponent of the least power of two that brings amax into range."""
    scaled = tl.maximum(amax, floor) * inverse_max
    bits = scaled.to(tl.uint32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)
    return tl.minimum(exponent, 254)


@triton.jit
def e8m0_to_float(scale):
    """Returns 2^(b - 127). Byte 0 is 2^-127, which is written as a subnormal."""
    byte = scale.to(tl.uint32)
    return tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)
