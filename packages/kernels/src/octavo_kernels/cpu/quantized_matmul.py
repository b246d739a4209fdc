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
from octavo_kernels.cpu.byte_dots import BYTES_OF_8, FIVES, NIBBLES, SIXES, Bytes, dots_of
from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    add,
    and_i32,
    f32x8,
    f32x16,
    join_f32,
    load_f16x8,
    load_f32x16,
    load_first_of_16,
    load_u8x8_i32,
    mul,
    negative,
    or_i32,
    prefetch,
    shl_i32,
    shr_i32,
    splat_f32,
    splat_i32,
    stay_apart,
    store_f32x16,
    store_first,
    to_f32,
    to_scalar_f32,
    zero_f32x8,
)
from octavo_kernels.cpu.team import next_chunk, num_threads
from octavo_kernels.cpu.tiles import (
    TILE_ROWS,
    add_dots,
    add_products,
    cover_with,
    distances_to,
    join_of,
    zeros_of,
)

ROWS_OF_TILE = TILE_ROWS[0]
ROWS_OF_CHUNK = 32  # rows of x that pass over a group of weights: 23 KB at 576 inputs, in the L1
CHUNK_BYTES = 1 << 16  # weights of a chunk: about 3 us at 20 GB/s
LINE, AHEAD, FARTHER = 64, 3072, 8192
"""Bytes of a cache line, and how far ahead weights are asked for where few rows pass over them. One
row of x against Q8_0 read 19.9 GB/s with 3 KiB, 16.7 without, and 13.7 with 1 KiB and every other
line: a stream with gaps misleads the CPU's own prefetcher. Where many rows pass over two groups,
the two after them are asked for meanwhile: 32 rows take 0.78 to 0.89 times as long as with 3 KiB,
which the first tile would run into and the others ask for in vain. A single tile of rows is done
too soon for that where groups are small, and asks for what is `FARTHER` away."""


# ---- what a kind of weight is: for a block b of 32 inputs of the 8 rows at w, where its bytes
# are, the factor of a dot product, and what the sum of x is multiplied with


@inline
def bytes_q4_0(w: int, b: int) -> int:
    return w + b * 144 + 16


@inline
def factor_q4_0(w: int, b: int) -> Any:
    return load_f16x8(w + b * 144)


@inline
def offset_q4_0(w: int, b: int) -> Any:
    """Weights are ``d * (q - 8)``."""
    return mul(load_f16x8(w + b * 144), splat_f32(to_scalar_f32(-8)))


@inline
def bytes_q4_1(w: int, b: int) -> int:
    return w + b * 160 + 32


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
def bytes_q8_0(w: int, b: int) -> int:
    return w + b * 272 + 16


@inline
def factor_q8_0(w: int, b: int) -> Any:
    return load_f16x8(w + b * 272)


@inline
def bytes_w8a8(w: int, b: int) -> int:
    return w + b * 256


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
def bytes_q4_k(w: int, b: int) -> int:
    return w + (b >> 3) * 1152 + 128 + 128 * (b & 7)


@inline
def factor_q4_k(w: int, b: int) -> Any:
    return sub_scale(w + (b >> 3) * 1152, b & 7)


@inline
def offset_q4_k(w: int, b: int) -> Any:
    return sub_minimum(w + (b >> 3) * 1152, b & 7)


@inline
def bytes_q5_k(w: int, b: int) -> int:
    return w + (b >> 3) * 1408 + 128 + 160 * (b & 7)


@inline
def factor_q5_k(w: int, b: int) -> Any:
    return sub_scale(w + (b >> 3) * 1408, b & 7)


@inline
def offset_q5_k(w: int, b: int) -> Any:
    return sub_minimum(w + (b >> 3) * 1408, b & 7)


@inline
def bytes_q6_k(w: int, b: int) -> int:
    return w + (b >> 3) * 1680 + 144 + 192 * (b & 7)


@inline
def scales_q6_k(w: int, b: int) -> int:
    """Where the int8 scales of each 16 inputs are, which are part of the dot product."""
    return w + (b >> 3) * 1680 + 16 + 16 * (b & 7)


@inline
def factor_q6_k(w: int, b: int) -> Any:
    return load_f16x8(w + (b >> 3) * 1680)


@inline
def no_offset(w: int, b: int) -> Any:
    return zero_f32x8()


@inline
def no_scales(w: int, b: int) -> int:
    return 0


# ---- tiles, and the whole product ----------------------------------------------------------


@inline
def finish(out: int, c: Any, n: int, bias: int, scales: int, accumulate: int, count: int) -> None:
    """Apply a row's scale and bias, add what is there if so asked, and store `count` lanes."""
    if count == 16:
        if scales:
            c = mul(c, load_f32x16(scales + 4 * n))
        if bias:
            c = add(c, load_f32x16(bias + 4 * n))
        if accumulate:
            c = add(load_f32x16(out), c)
        store_f32x16(out, c)
        return
    if scales:
        c = mul(c, load_first_of_16(scales + 4 * n, count))
    if bias:
        c = add(c, load_first_of_16(bias + 4 * n, count))
    if accumulate:
        c = add(load_first_of_16(out, count), c)
    store_first(out, c, count)


def make_tile(
    kind: Bytes, where: Any, scales: Any, factor: Any, offset: Any, block_bytes: int, rows: int
) -> Any:
    """Make the tile of two groups of weights, `group` bytes apart, and `rows` rows of x."""
    has_offset = offset is not no_offset
    zeros_of_one, zeros_of_two = zeros_of(rows, f32x8), zeros_of(rows, f32x16)
    dots_of_one, dots_of_two = dots_of(kind, rows, 1), dots_of(kind, rows, 2)
    join_sums, distances = join_of(rows), distances_to(rows)

    @inline
    def fetch(where: int) -> None:
        """Ask for every line of a block."""
        for line in range(0, block_bytes, LINE):
            prefetch(where + line)

    @jit
    def joint_tile(w: int, group: int, ahead: int, blocks: int, a: int, row: int) -> Any:
        stay_apart()
        c, x_rows, later = zeros_of_two(), distances(row), w + ahead
        for b in range(blocks):
            # Two streams, which lie one behind the other: as much as is read is asked for.
            fetch(later + 2 * b * block_bytes)
            fetch(later + (2 * b + 1) * block_bytes)
            products = dots_of_two(where(w, b), scales(w, b), group, a, x_rows)
            d = join_f32(factor(w, b), factor(w + group, b))
            c = add_dots(c, products, d, a + SCALE, x_rows)
            if has_offset:
                o = join_f32(offset(w, b), offset(w + group, b))
                c = add_products(c, o, a + TOTAL, x_rows)
            a += BLOCK_BYTES
        return c

    @jit
    def half_tile(w: int, blocks: int, a: int, row: int) -> Any:
        stay_apart()
        c, x_rows = zeros_of_one(), distances(row)
        for b in range(blocks):
            fetch(w + AHEAD + b * block_bytes)
            products = dots_of_one(where(w, b), scales(w, b), 0, a, x_rows)
            c = add_dots(c, products, factor(w, b), a + SCALE, x_rows)
            if has_offset:
                c = add_products(c, offset(w, b), a + TOTAL, x_rows)
            a += BLOCK_BYTES
        return c

    @jit
    def separate_tiles(w: int, group: int, _ahead: int, blocks: int, a: int, row: int) -> Any:
        low, high = half_tile(w, blocks, a, row), half_tile(w + group, blocks, a, row)
        return join_sums(low, high)

    # Few rows of x wait for memory, which is fastest with one stream. The other function is
    # never called, and so never compiled.
    return joint_tile if rows > 2 and kind.is_joint else separate_tiles


def make_multiply(
    kind: Bytes, where: Any, factor: Any, offset: Any, block_bytes: int, scales: Any = no_scales
) -> Any:
    """Make the product over one kind of weight, from what the kind is.

    `block_bytes` are the bytes of 32 inputs of 8 rows, on average.
    """

    def make_step(rows: int) -> Any:
        tile = make_tile(kind, where, scales, factor, offset, block_bytes, rows)

        @inline
        def step(a: int, row: int, out: int, out_row: int, others: Any) -> None:
            w, group, ahead, blocks, n, bias, scales, accumulate, count = others
            c = tile(w, group, ahead, blocks, a, row)
            for i in range(rows):
                finish(out + i * out_row, c[i], n, bias, scales, accumulate, count)

        return step

    cover = cover_with(make_step)

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
        ahead = 2 * group_bytes
        if m <= ROWS_OF_TILE:
            ahead *= (FARTHER + ahead - 1) // ahead
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
                to_next = group_bytes if group + 1 < last else 0
                count = min(16 if to_next else 8, n - at)
                others = (w, to_next, ahead, blocks, at, bias, scales, accumulate, count)
                cover(start, end, a, row, out + 4 * at, out_row, others)
            chunk = next_chunk(thread)

    return multiply


multiply_q4_0 = make_multiply(NIBBLES, bytes_q4_0, factor_q4_0, offset_q4_0, 144)
multiply_q4_1 = make_multiply(NIBBLES, bytes_q4_1, factor_q4_1, offset_q4_1, 160)
multiply_u4z = make_multiply(NIBBLES, bytes_q4_1, factor_q4_1, offset_u4z, 160)
multiply_q8_0 = make_multiply(BYTES_OF_8, bytes_q8_0, factor_q8_0, no_offset, 272)
multiply_w8a8 = make_multiply(BYTES_OF_8, bytes_w8a8, factor_w8a8, no_offset, 256)
multiply_q4_k = make_multiply(NIBBLES, bytes_q4_k, factor_q4_k, offset_q4_k, 144)
multiply_q5_k = make_multiply(FIVES, bytes_q5_k, factor_q5_k, offset_q5_k, 176)
multiply_q6_k = make_multiply(SIXES, bytes_q6_k, factor_q6_k, no_offset, 210, scales_q6_k)
