"""Rows of float32 as int8, in blocks of 32 with a scale each.

A quantized row of ``k`` numbers takes ``k + k / 4`` bytes: the ``k`` int8, then the
``k / 32`` float32 scales, then as many float32 sums of each block (its scale included),
which a weight's minimum is multiplied with.
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
    to_scalar_f32,
)

BLOCK = 32


@inline
def quantized_bytes(k: int) -> int:
    """Bytes of a quantized row."""
    return k + k // 4


@inline
def quantize_block(x: int, q: int, scale: int, total: int) -> None:
    """Quantize 32 float32 at `x`; a block with a NaN or an infinity gets a scale like it."""
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
    store_f32(scale, step)
    whole = hsum_i32(add_i32(add_i32(q0, q1), add_i32(q2, q3)))
    store_f32(total, step * to_scalar_f32(whole))


@jit
def quantize_row(x: int, k: int, q: int) -> None:
    """Quantize one row of `k` float32 at `x` to `q`."""
    scales = q + k
    totals = scales + k // 8
    for block in range(k // BLOCK):
        quantize_block(
            x + 4 * BLOCK * block, q + BLOCK * block, scales + 4 * block, totals + 4 * block
        )
