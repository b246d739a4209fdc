"""Rows of float32 as int8, in blocks of 32 with a scale each.

A block of a quantized row takes `BLOCK_BYTES`: 32 int8, their scale as float32, their sum as
float32 (the scale included), which a weight's minimum is multiplied with, and the sum of each
half as int16, for weights that are unsigned bytes less an offset. All of it lies together, so
that a kernel needs one address for each row, not four: with four rows at once, twelve of them
did not fit the registers.
"""

from __future__ import annotations

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    abs_bits,
    add_i32,
    hmax_bits,
    hsum_i32,
    load_f32x8,
    max_i32,
    mul,
    round_to_i32,
    splat_f32,
    store_f32,
    store_i8x8,
    store_i16,
    to_scalar_f32,
)

BLOCK, BLOCK_BYTES = 32, 44
SCALE, TOTAL, HALVES = 32, 36, 40
"""Where in a block its scale, its sum and the sums of its halves are."""


@inline
def quantized_bytes(k: int) -> int:
    """Bytes of a quantized row."""
    return k // BLOCK * BLOCK_BYTES


@inline
def quantize_block(x: int, q: int) -> None:
    """Quantize 32 float32 at `x` to `q`; a block with a NaN or an infinity gets a scale like it."""
    v0 = load_f32x8(x)
    v1 = load_f32x8(x + 32)
    v2 = load_f32x8(x + 64)
    v3 = load_f32x8(x + 96)
    largest = hmax_bits(
        max_i32(max_i32(abs_bits(v0), abs_bits(v1)), max_i32(abs_bits(v2), abs_bits(v3)))
    )
    step = largest / to_scalar_f32(127)
    inverse = to_scalar_f32(127) / largest if largest > 0 else to_scalar_f32(0)
    factor = splat_f32(inverse)
    q0 = round_to_i32(mul(v0, factor))
    q1 = round_to_i32(mul(v1, factor))
    q2 = round_to_i32(mul(v2, factor))
    q3 = round_to_i32(mul(v3, factor))
    store_i8x8(q, q0)
    store_i8x8(q + 8, q1)
    store_i8x8(q + 16, q2)
    store_i8x8(q + 24, q3)
    store_f32(q + SCALE, step)
    first, second = hsum_i32(add_i32(q0, q1)), hsum_i32(add_i32(q2, q3))
    store_f32(q + TOTAL, step * to_scalar_f32(first + second))
    store_i16(q + HALVES, first)
    store_i16(q + HALVES + 2, second)


@jit
def quantize_row(x: int, k: int, q: int) -> None:
    """Quantize one row of `k` float32 at `x` to `q`."""
    for block in range(k // BLOCK):
        quantize_block(x + 4 * BLOCK * block, q + BLOCK_BYTES * block)
