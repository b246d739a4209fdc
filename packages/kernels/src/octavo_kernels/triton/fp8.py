"""float8_e4m3fn in integers, for devices that can't convert it, and the kinds of KV cache."""

import triton
import triton.language as tl

# What the numbers of a cache are, as kernels are told.
PLAIN = tl.constexpr(0)  # a type that the device converts
FP8_BITS = tl.constexpr(1)  # float8_e4m3fn, as uint8
INT8 = tl.constexpr(2)

# Of float8_e4m3fn: the largest number, the smallest normal one, and the bits of NaN.
E4M3_MAX = tl.constexpr(448.0)
E4M3_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
E4M3_NAN = tl.constexpr(0x7F)

# 2**14: a float32 in [2**14, 2**15) has steps of 2**-9, those of a subnormal e4m3.
_SUBNORMAL_BASE = tl.constexpr(16384.0)


@triton.jit
def decode_e4m3(bits):
    """Turn uint8 bits into float32. A float16 with the exponent shifted by 8 is the number."""
    magnitude = (bits & 0x7F).to(tl.uint16)
    half = (magnitude << 7) | ((bits & 0x80).to(tl.uint16) << 8)
    number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == E4M3_NAN, float("nan"), number)


@triton.jit
def encode_e4m3(x):
    """Turn float32 into uint8 bits: to nearest even, saturating, NaN kept."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = magnitude.to(tl.uint32, bitcast=True)
    # 20 of 23 bits of the fraction go; the exponent's bias falls from 127 to 7.
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    base = (magnitude * 0.0 + _SUBNORMAL_BASE).to(tl.uint32, bitcast=True)
    subnormal = (magnitude + _SUBNORMAL_BASE).to(tl.uint32, bitcast=True) - base
    code = tl.where(magnitude < E4M3_SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(x != x, E4M3_NAN, code)
    return (code | sign).to(tl.uint8)
