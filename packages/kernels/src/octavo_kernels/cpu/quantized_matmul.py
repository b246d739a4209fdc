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

from octavo_kernels.cpu.activations import BLOCK_BYTES, SCALE, TOTAL
from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    add,
    and_i32,
    broadcast_f32,
    dot_bytes,
    dot_bytes_4,
    dot_fives,
    dot_fives_2x4,
    dot_nibbles,
    dot_nibbles_2x4,
    dot_sixes,
    dot_sixes_4,
    fma,
    load_f16x8,
    load_f32x8,
    load_first,
    load_u8x8_i32,
    mul,
    negative,
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
from octavo_kernels.cpu.team import next_chunk, num_threads

ROWS_OF_CHUNK = 32  # rows of x that pass over a group of weights: 23 KB at 576 inputs, in the L1
CHUNK_BYTES = 1 << 16  # weights of a chunk: about 3 us at 20 GB/s
LINE, AHEAD = 64, 3072
"""Bytes of a cache line, and how far ahead weights are asked for. One row of x against Q8_0
read 19.9 GB/s with 3 KiB, 16.7 without, and 13.7 with 1 KiB and every other line: a stream
with gaps misleads the CPU's own prefetcher."""


# ---- what a kind of weight is: for a block b of 32 inputs of the 8 rows at w, its dot
# products with one row of x, with four rows of x (where weights are unsigned: those of the 8
# rows `group` bytes on as well), the factor of a dot product, and what the sum of x is
# multiplied with


@inline
def dot_q4_0(w: int, b: int, a: int) -> Any:
    return dot_nibbles(w + b * 144 + 16, a)


@inline
def dots_q4_0(w: int, group: int, b: int, a: int, row: int) -> Any:
    return dot_nibbles_2x4(w + b * 144 + 16, group, a, row)


@inline
def factor_q4_0(w: int, b: int) -> Any:
    return load_f16x8(w + b * 144)


@inline
def offset_q4_0(w: int, b: int) -> Any:
    """Weights are ``d * (q - 8)``."""
    return mul(load_f16x8(w + b * 144), splat_f32(to_scalar_f32(-8)))


@inline
def dot_q4_1(w: int, b: int, a: int) -> Any:
    return dot_nibbles(w + b * 160 + 32, a)


@inline
def dots_q4_1(w: int, group: int, b: int, a: int, row: int) -> Any:
    return dot_nibbles_2x4(w + b * 160 + 32, group, a, row)


@inline
def factor_q4_1(w: int, b: int) -> Any:
    return load_f16x8(w + b * 160)


@inline
def offset_q4_1(w: int, b: int) -> Any:
    """Weights are ``d * q + m``."""
    return load_f16x8(w + b * 160 + 16)


@inline
def offset_u4z(w: int, b: int) -> Any:
    """Weights are ``d * (q - z)``."""
    return negative(mul(load_f16x8(w + b * 160), load_f16x8(w + b * 160 + 16)))


@inline
def dot_q8_0(w: int, b: int, a: int) -> Any:
    return dot_bytes(w + b * 272 + 16, a)


@inline
def dots_q8_0(w: int, b: int, a: int, row: int) -> Any:
    return dot_bytes_4(w + b * 272 + 16, a, row)


@inline
def factor_q8_0(w: int, b: int) -> Any:
    return load_f16x8(w + b * 272)


@inline
def dot_w8a8(w: int, b: int, a: int) -> Any:
    return dot_bytes(w + b * 256, a)


@inline
def dots_w8a8(w: int, b: int, a: int, row: int) -> Any:
    return dot_bytes_4(w + b * 256, a, row)


@inline
def factor_w8a8(w: int, b: int) -> Any:
    """A row's scale is applied at the end."""
    return splat_f32(to_scalar_f32(1))


@inline
def sub_scale(p: int, s: int) -> Any:
    """``d * scale`` of sub-block s of the super-block of Q4_K or Q5_K at p."""
    low = and_i32(load_u8x8_i32(p + 32 + 8 * s), splat_i32(15))
    high = shr_i32(load_u8x8_i32(p + 96 + 8 * (s >> 1)), 4 * (s & 1))
    six = or_i32(low, shl_i32(and_i32(high, splat_i32(3)), 4))
    return mul(load_f16x8(p), to_f32(six))


@inline
def sub_minimum(p: int, s: int) -> Any:
    """``-dmin * minimum`` of a sub-block of Q4_K or Q5_K."""
    low = shr_i32(load_u8x8_i32(p + 32 + 8 * s), 4)
    high = shr_i32(load_u8x8_i32(p + 96 + 8 * (s >> 1)), 4 * (s & 1) + 2)
    six = or_i32(low, shl_i32(and_i32(high, splat_i32(3)), 4))
    return negative(mul(load_f16x8(p + 16), to_f32(six)))


@inline
def dot_q4_k(w: int, b: int, a: int) -> Any:
    return dot_nibbles(w + (b >> 3) * 1152 + 128 + 128 * (b & 7), a)


@inline
def dots_q4_k(w: int, group: int, b: int, a: int, row: int) -> Any:
    return dot_nibbles_2x4(w + (b >> 3) * 1152 + 128 + 128 * (b & 7), group, a, row)


@inline
def factor_q4_k(w: int, b: int) -> Any:
    return sub_scale(w + (b >> 3) * 1152, b & 7)


@inline
def offset_q4_k(w: int, b: int) -> Any:
    return sub_minimum(w + (b >> 3) * 1152, b & 7)


@inline
def dot_q5_k(w: int, b: int, a: int) -> Any:
    return dot_fives(w + (b >> 3) * 1408 + 128 + 160 * (b & 7), a)


@inline
def dots_q5_k(w: int, group: int, b: int, a: int, row: int) -> Any:
    return dot_fives_2x4(w + (b >> 3) * 1408 + 128 + 160 * (b & 7), group, a, row)


@inline
def factor_q5_k(w: int, b: int) -> Any:
    return sub_scale(w + (b >> 3) * 1408, b & 7)


@inline
def offset_q5_k(w: int, b: int) -> Any:
    return sub_minimum(w + (b >> 3) * 1408, b & 7)


@inline
def dot_q6_k(w: int, b: int, a: int) -> Any:
    """The int8 scales of 16 inputs are part of the dot product."""
    p = w + (b >> 3) * 1680
    return dot_sixes(p + 144 + 192 * (b & 7), p + 16 + 16 * (b & 7), a)


@inline
def dots_q6_k(w: int, b: int, a: int, row: int) -> Any:
    p = w + (b >> 3) * 1680
    return dot_sixes_4(p + 144 + 192 * (b & 7), p + 16 + 16 * (b & 7), a, row)


@inline
def factor_q6_k(w: int, b: int) -> Any:
    return load_f16x8(w + (b >> 3) * 1680)


@inline
def no_offset(w: int, b: int) -> Any:
    return zero_f32x8()


JOINT_DOTS = (dots_q4_0, dots_q4_1, dots_q4_k, dots_q5_k)
"""Of two groups at once."""


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


@inline
def put_pair(
    out: int,
    c: Any,
    d: Any,
    n: int,
    bias: int,
    scales: int,
    accumulate: int,
    low: int,
    high: int,
    to_next: int,
) -> None:
    """Finish 8 outputs, and the 8 after them if there are any."""
    finish(out, c, n, bias, scales, accumulate, low)
    if to_next:
        finish(out + 32, d, n + 8, bias, scales, accumulate, high)


def make_multiply(dot: Any, dots: Any, factor: Any, offset: Any, block_bytes: int) -> Any:
    """Make the product over one kind of weight, from what the kind is.

    `block_bytes` are the bytes of 32 inputs of 8 rows, on average.
    """
    has_offset = offset is not no_offset
    is_joint = dots in JOINT_DOTS

    @inline
    def add_block(c: Any, product: Any, d: Any, o: Any, a: int) -> Any:
        """Add a block's dot product with the block of activations at `a`."""
        c = fma(to_f32(product), mul(d, broadcast_f32(a + SCALE)), c)
        if has_offset:
            c = fma(o, broadcast_f32(a + TOTAL), c)
        return c

    @inline
    def fetch_ahead(where: int) -> None:
        """Ask for every line of a block that comes later."""
        for line in range(0, block_bytes, LINE):
            prefetch(where + AHEAD + line)

    @jit
    def joint_tile(w: int, group: int, blocks: int, a: int, row: int) -> Any:
        """Two groups of weights and four rows of x."""
        c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = zero_f32x8()
        for b in range(blocks):
            # Two streams, which lie one behind the other: as much as is read is asked for.
            fetch_ahead(w + 2 * b * block_bytes)
            fetch_ahead(w + (2 * b + 1) * block_bytes)
            p0, p1, p2, p3, p4, p5, p6, p7 = dots(w, group, b, a, row)
            d, o = factor(w, b), offset(w, b)
            c0 = add_block(c0, p0, d, o, a)
            c1 = add_block(c1, p1, d, o, a + row)
            c2 = add_block(c2, p2, d, o, a + 2 * row)
            c3 = add_block(c3, p3, d, o, a + 3 * row)
            d, o = factor(w + group, b), offset(w + group, b)
            c4 = add_block(c4, p4, d, o, a)
            c5 = add_block(c5, p5, d, o, a + row)
            c6 = add_block(c6, p6, d, o, a + 2 * row)
            c7 = add_block(c7, p7, d, o, a + 3 * row)
            a += BLOCK_BYTES
        return c0, c1, c2, c3, c4, c5, c6, c7

    @jit
    def tile_1x4(w: int, blocks: int, a: int, row: int) -> Any:
        c0 = c1 = c2 = c3 = zero_f32x8()
        for b in range(blocks):
            fetch_ahead(w + b * block_bytes)
            p0, p1, p2, p3 = dots(w, b, a, row)
            d, o = factor(w, b), offset(w, b)
            c0 = add_block(c0, p0, d, o, a)
            c1 = add_block(c1, p1, d, o, a + row)
            c2 = add_block(c2, p2, d, o, a + 2 * row)
            c3 = add_block(c3, p3, d, o, a + 3 * row)
            a += BLOCK_BYTES
        return c0, c1, c2, c3

    @jit
    def separate_tiles(w: int, group: int, blocks: int, a: int, row: int) -> Any:
        c0, c1, c2, c3 = tile_1x4(w, blocks, a, row)
        c4, c5, c6, c7 = tile_1x4(w + group, blocks, a, row)
        return c0, c1, c2, c3, c4, c5, c6, c7

    # Which of them: the other one is never called, and so never compiled.
    tile_2x4 = joint_tile if is_joint else separate_tiles

    @jit
    def tile_1(w: int, blocks: int, a: int) -> Any:
        c = zero_f32x8()
        for b in range(blocks):
            fetch_ahead(w + b * block_bytes)
            product = dot(w, b, a)
            c = add_block(c, product, factor(w, b), offset(w, b), a)
            a += BLOCK_BYTES
        return c

    @jit
    def multiply(
        thread: int,
        a: int,
        row: int,
        m: int,
        n: int,
        k: int,
        weight: int,
        bias: int,
        scales: int,
        _scale_block: int,
        out: int,
        out_row: int,
        accumulate: int,
    ) -> None:
        """Multiply `m` quantized rows at `a`; ends without a barrier.

        `row` and `out_row` are the distances of rows of x and of the result in bytes. With
        `accumulate`, the result is added to what is in `out`.
        """
        blocks = k // 32
        group_bytes = blocks * block_bytes
        groups = (n + 7) // 8
        # What is fetched ahead beyond a chunk's end is another thread's: few rows wait for memory,
        # and take larger chunks (a step of one row takes 0.95 times as long).
        share = groups // ((4 if m <= 4 else 8) * num_threads(thread))
        # Pairs of groups fill whole cache lines of the result.
        group_step = max(1, min(share, CHUNK_BYTES // group_bytes) // 2 * 2)
        row_chunks = (m + ROWS_OF_CHUNK - 1) // ROWS_OF_CHUNK
        chunks = (groups + group_step - 1) // group_step * row_chunks
        chunk = next_chunk(thread)
        while chunk < chunks:
            first = chunk // row_chunks * group_step
            last = min(groups, first + group_step)
            start = chunk % row_chunks * ROWS_OF_CHUNK
            end = min(m, start + ROWS_OF_CHUNK)
            for group in range(first, last, 2):
                w = weight + group * group_bytes
                at = 8 * group
                # The last group may have no second one: then it is taken twice.
                to_next = 1 if group + 1 < last else 0
                low, high = min(8, n - at), min(8, n - at - 8 * to_next)
                i = start
                while i + 4 <= end:
                    c0, c1, c2, c3, c4, c5, c6, c7 = tile_2x4(
                        w, to_next * group_bytes, blocks, a + i * row, row
                    )
                    o = out + i * out_row + 4 * at
                    put_pair(o, c0, c4, at, bias, scales, accumulate, low, high, to_next)
                    o += out_row
                    put_pair(o, c1, c5, at, bias, scales, accumulate, low, high, to_next)
                    o += out_row
                    put_pair(o, c2, c6, at, bias, scales, accumulate, low, high, to_next)
                    o += out_row
                    put_pair(o, c3, c7, at, bias, scales, accumulate, low, high, to_next)
                    i += 4
                while i < end:
                    o = out + i * out_row + 4 * at
                    c0 = tile_1(w, blocks, a + i * row)
                    finish(o, c0, at, bias, scales, accumulate, low)
                    if to_next:
                        c0 = tile_1(w + group_bytes, blocks, a + i * row)
                        finish(o + 32, c0, at + 8, bias, scales, accumulate, high)
                    i += 1
            chunk = next_chunk(thread)

    return multiply


multiply_q4_0 = make_multiply(dot_q4_0, dots_q4_0, factor_q4_0, offset_q4_0, 144)
multiply_q4_1 = make_multiply(dot_q4_1, dots_q4_1, factor_q4_1, offset_q4_1, 160)
multiply_u4z = make_multiply(dot_q4_1, dots_q4_1, factor_q4_1, offset_u4z, 160)
multiply_q8_0 = make_multiply(dot_q8_0, dots_q8_0, factor_q8_0, no_offset, 272)
multiply_w8a8 = make_multiply(dot_w8a8, dots_w8a8, factor_w8a8, no_offset, 256)
multiply_q4_k = make_multiply(dot_q4_k, dots_q4_k, factor_q4_k, offset_q4_k, 144)
multiply_q5_k = make_multiply(dot_q5_k, dots_q5_k, factor_q5_k, offset_q5_k, 176)
multiply_q6_k = make_multiply(dot_q6_k, dots_q6_k, factor_q6_k, no_offset, 210)
