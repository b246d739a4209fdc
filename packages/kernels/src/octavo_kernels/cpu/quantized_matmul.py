"""``x @ weight.T`` over packed weights, with x as int8 in blocks of 32.

A weight lies in groups of 8 rows (see `octavo_kernels.packed_weight`): lane r of a vector
belongs to row r of the group, so nothing is summed across lanes. For each block of 32
inputs the integer dot product is exact, and

    c = fma(minimum, sum of x, fma(dot product, scale of w * scale of x, c))

goes on from block to block. That order is the same in every tile, so a row of the result
does not depend on how many rows there are.
"""

from __future__ import annotations

from typing import Any

from octavo_kernels.cpu.activations import quantize_row, quantized_bytes
from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    add,
    and_i32,
    dot_bytes,
    dot_fives,
    dot_nibbles,
    dot_sixes,
    fma,
    load_f16x8,
    load_f32,
    load_f32x8,
    load_first,
    load_u8x8_i32,
    mul,
    or_i32,
    prefetch,
    shl_i32,
    shr_i32,
    splat_f32,
    splat_i32,
    store_f32x8,
    store_first,
    to_f32,
    to_scalar_f32,
    zero_f32x8,
)
from octavo_kernels.cpu.team import barrier, next_chunk, num_threads, rank

ROWS_OF_CHUNK = 64  # rows of x that pass over a group of weights while it is in the L1
CHUNK_BYTES = 1 << 16  # weights of a chunk: about 3 us at 20 GB/s
PRIVATE_ROWS = 4  # up to here every thread quantizes x for itself, which saves a barrier


# ---- one block of 32 inputs for 8 rows: what a kind of weight is ---------------------------


@inline
def step_q4_0(c: Any, w: int, b: int, a: int, scale: float, total: float) -> Any:
    """``d * (q - 8)``: 8 d times the sum of x is taken off."""
    p = w + b * 144
    d = load_f16x8(p)
    c = fma(to_f32(dot_nibbles(p + 16, a)), mul(d, splat_f32(scale)), c)
    return fma(d, splat_f32(to_scalar_f32(-8) * total), c)


@inline
def step_q4_1(c: Any, w: int, b: int, a: int, scale: float, total: float) -> Any:
    """``d * q + m``."""
    p = w + b * 160
    c = fma(to_f32(dot_nibbles(p + 32, a)), mul(load_f16x8(p), splat_f32(scale)), c)
    return fma(load_f16x8(p + 16), splat_f32(total), c)


@inline
def step_u4z(c: Any, w: int, b: int, a: int, scale: float, total: float) -> Any:
    """``d * (q - z)``."""
    p = w + b * 160
    d = load_f16x8(p)
    c = fma(to_f32(dot_nibbles(p + 32, a)), mul(d, splat_f32(scale)), c)
    return fma(mul(d, load_f16x8(p + 16)), splat_f32(-total), c)


@inline
def step_q8_0(c: Any, w: int, b: int, a: int, scale: float, total: float) -> Any:
    """``d * q``."""
    p = w + b * 272
    return fma(to_f32(dot_bytes(p + 16, a)), mul(load_f16x8(p), splat_f32(scale)), c)


@inline
def step_w8a8(c: Any, w: int, b: int, a: int, scale: float, total: float) -> Any:
    """``q``; the scale of a row is applied at the end."""
    return fma(to_f32(dot_bytes(w + b * 256, a)), splat_f32(scale), c)


@inline
def _sub_scale(p: int, s: int) -> Any:
    """``d * scale`` of a sub-block of Q4_K or Q5_K."""
    low = and_i32(load_u8x8_i32(p + 32 + 8 * s), splat_i32(15))
    high = shr_i32(load_u8x8_i32(p + 96 + 8 * (s >> 1)), 4 * (s & 1))
    six = or_i32(low, shl_i32(and_i32(high, splat_i32(3)), 4))
    return mul(load_f16x8(p), to_f32(six))


@inline
def _sub_minimum(p: int, s: int) -> Any:
    """``dmin * minimum`` of a sub-block of Q4_K or Q5_K."""
    low = shr_i32(load_u8x8_i32(p + 32 + 8 * s), 4)
    high = shr_i32(load_u8x8_i32(p + 96 + 8 * (s >> 1)), 4 * (s & 1) + 2)
    six = or_i32(low, shl_i32(and_i32(high, splat_i32(3)), 4))
    return mul(load_f16x8(p + 16), to_f32(six))


@inline
def step_q4_k(c: Any, w: int, b: int, a: int, scale: float, total: float) -> Any:
    """``d * scale * q - dmin * minimum``."""
    p, s = w + (b >> 3) * 1152, b & 7
    d = _sub_scale(p, s)
    c = fma(to_f32(dot_nibbles(p + 128 + 128 * s, a)), mul(d, splat_f32(scale)), c)
    return fma(_sub_minimum(p, s), splat_f32(-total), c)


@inline
def step_q5_k(c: Any, w: int, b: int, a: int, scale: float, total: float) -> Any:
    """Like Q4_K, with a fifth bit."""
    p, s = w + (b >> 3) * 1408, b & 7
    d = _sub_scale(p, s)
    c = fma(to_f32(dot_fives(p + 128 + 160 * s, a)), mul(d, splat_f32(scale)), c)
    return fma(_sub_minimum(p, s), splat_f32(-total), c)


@inline
def step_q6_k(c: Any, w: int, b: int, a: int, scale: float, total: float) -> Any:
    """``d * scale * (q - 32)``, with a scale for each 16."""
    p, s = w + (b >> 3) * 1680, b & 7
    dot = dot_sixes(p + 144 + 192 * s, p + 16 + 16 * s, a)
    return fma(to_f32(dot), mul(load_f16x8(p), splat_f32(scale)), c)


# ---- tiles, and the whole product ----------------------------------------------------------


@inline
def finish(out: int, c: Any, n: int, bias: int, scales: int, accumulate: int, count: int) -> None:
    """Apply a row's scale and bias, add what is there if so asked, and store `count` lanes."""
    if scales:
        c = mul(c, load_f32x8(scales + 4 * n))
    if bias:
        c = add(c, load_f32x8(bias + 4 * n))
    if count == 8:
        if accumulate:
            c = add(load_f32x8(out), c)
        store_f32x8(out, c)
    else:
        if accumulate:
            c = add(load_first(out, count), c)
        store_first(out, c, count)


def make_multiply(step: Any, block_bytes: int) -> Any:
    """Make the product over one kind of weight.

    Args:
        step: Adds a block of 32 inputs to 8 sums.
        block_bytes: Bytes of 32 inputs of 8 rows, on average.
    """

    @jit
    def tile_4(w: int, blocks: int, a: int, k: int, row: int) -> Any:
        c0 = zero_f32x8()
        c1 = zero_f32x8()
        c2 = zero_f32x8()
        c3 = zero_f32x8()
        for b in range(blocks):
            q = a + 32 * b
            s = a + k + 4 * b
            t = s + 4 * blocks
            c0 = step(c0, w, b, q, load_f32(s), load_f32(t))
            c1 = step(c1, w, b, q + row, load_f32(s + row), load_f32(t + row))
            c2 = step(c2, w, b, q + 2 * row, load_f32(s + 2 * row), load_f32(t + 2 * row))
            c3 = step(c3, w, b, q + 3 * row, load_f32(s + 3 * row), load_f32(t + 3 * row))
        return c0, c1, c2, c3

    @jit
    def tile_1(w: int, blocks: int, a: int, k: int) -> Any:
        c = zero_f32x8()
        for b in range(blocks):
            s = a + k + 4 * b
            prefetch(w + b * block_bytes + 1024)
            prefetch(w + b * block_bytes + 1088)
            c = step(c, w, b, a + 32 * b, load_f32(s), load_f32(s + 4 * blocks))
        return c

    @jit
    def multiply(
        thread: int,
        a: int,
        m: int,
        n: int,
        k: int,
        weight: int,
        bias: int,
        scales: int,
        out: int,
        out_row: int,
        accumulate: int,
    ) -> None:
        """Multiply `m` quantized rows at `a`; ends without a barrier.

        `out_row` is the distance of rows of the result in bytes.
        """
        blocks = k // 32
        row = quantized_bytes(k)
        group_bytes = blocks * block_bytes
        groups = (n + 7) // 8
        share = groups // (8 * num_threads(thread))
        group_step = max(1, min(share, CHUNK_BYTES // group_bytes))
        row_chunks = (m + ROWS_OF_CHUNK - 1) // ROWS_OF_CHUNK
        chunks = (groups + group_step - 1) // group_step * row_chunks
        chunk = next_chunk(thread)
        while chunk < chunks:
            first = chunk // row_chunks * group_step
            start = chunk % row_chunks * ROWS_OF_CHUNK
            end = min(m, start + ROWS_OF_CHUNK)
            for group in range(first, min(groups, first + group_step)):
                w = weight + group * group_bytes
                at = 8 * group
                count = min(8, n - at)
                i = start
                while i + 4 <= end:
                    c0, c1, c2, c3 = tile_4(w, blocks, a + i * row, k, row)
                    o = out + i * out_row + 4 * at
                    finish(o, c0, at, bias, scales, accumulate, count)
                    finish(o + out_row, c1, at, bias, scales, accumulate, count)
                    finish(o + 2 * out_row, c2, at, bias, scales, accumulate, count)
                    finish(o + 3 * out_row, c3, at, bias, scales, accumulate, count)
                    i += 4
                while i < end:
                    c0 = tile_1(w, blocks, a + i * row, k)
                    o = out + i * out_row + 4 * at
                    finish(o, c0, at, bias, scales, accumulate, count)
                    i += 1
            chunk = next_chunk(thread)

    return multiply


def make_matmul(multiply: Any) -> Any:
    """Make the kernel that quantizes x and multiplies."""

    @jit
    def matmul(
        thread: int,
        x: int,
        x_row: int,
        m: int,
        n: int,
        k: int,
        weight: int,
        bias: int,
        scales: int,
        out: int,
        scratch: int,
    ) -> None:
        """Compute ``out[m, n]`` float32 from ``x[m, k]``, rows `x_row` bytes apart.

        `scratch` takes ``m`` quantized rows, and as many for each thread if `m` is at most
        `PRIVATE_ROWS`.
        """
        a = quantize_rows(thread, x, x_row, m, k, scratch)
        multiply(thread, a, m, n, k, weight, bias, scales, out, 4 * n, 0)

    return matmul


@jit
def quantize_rows(thread: int, x: int, x_row: int, m: int, k: int, scratch: int) -> int:
    """Quantize `m` rows for the team, and return where this thread finds them."""
    row = quantized_bytes(k)
    if m <= PRIVATE_ROWS:
        a = scratch + rank(thread) * m * row
        for i in range(m):
            quantize_row(x + i * x_row, k, a + i * row)
        return a
    i = next_chunk(thread)
    while i < m:
        quantize_row(x + i * x_row, k, scratch + i * row)
        i = next_chunk(thread)
    barrier(thread)
    return scratch


multiply_q4_0 = make_multiply(step_q4_0, 144)
multiply_q4_1 = make_multiply(step_q4_1, 160)
multiply_u4z = make_multiply(step_u4z, 160)
multiply_q8_0 = make_multiply(step_q8_0, 272)
multiply_w8a8 = make_multiply(step_w8a8, 256)
multiply_q4_k = make_multiply(step_q4_k, 144)
multiply_q5_k = make_multiply(step_q5_k, 176)
multiply_q6_k = make_multiply(step_q6_k, 210)

q4_0 = make_matmul(multiply_q4_0)
q4_1 = make_matmul(multiply_q4_1)
u4z = make_matmul(multiply_u4z)
q8_0 = make_matmul(multiply_q8_0)
w8a8 = make_matmul(multiply_w8a8)
q4_k = make_matmul(multiply_q4_k)
q5_k = make_matmul(multiply_q5_k)
q6_k = make_matmul(multiply_q6_k)
