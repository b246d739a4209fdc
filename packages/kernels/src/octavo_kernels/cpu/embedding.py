"""Rows of a packed weight as float32: the embedding of tokens."""

from __future__ import annotations

from typing import Any

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.quantized_matmul import (
    factor_q4_0,
    factor_q4_1,
    factor_q4_k,
    factor_q5_k,
    factor_q6_k,
    factor_q8_0,
    factor_w8a8,
    no_offset,
    offset_q4_0,
    offset_q4_1,
    offset_q4_k,
    offset_q5_k,
    offset_u4z,
)
from octavo_kernels.cpu.simd import (
    fma_f32,
    load_bf16,
    load_f16,
    load_f32,
    load_i8,
    load_i32,
    load_u8,
    store_f32,
    store_f32x8,
    to_scalar_f32,
)
from octavo_kernels.cpu.team import next_chunk, rank


@inline
def nibble(p: int, r: int, i: int) -> int:
    """Input `i` of 32 of row `r`, of nibbles at `p`."""
    at = p + 32 * ((i & 15) >> 2) + 4 * r + (i & 3)
    return (load_u8(at) >> (4 * (i >> 4))) & 15


@inline
def value_q4_0(w: int, b: int, r: int, i: int) -> int:
    return nibble(w + b * 144 + 16, r, i)


@inline
def value_q4_1(w: int, b: int, r: int, i: int) -> int:
    return nibble(w + b * 160 + 32, r, i)


@inline
def value_q8_0(w: int, b: int, r: int, i: int) -> int:
    return load_i8(w + b * 272 + 16 + 32 * (i >> 2) + 4 * r + (i & 3))


@inline
def value_w8a8(w: int, b: int, r: int, i: int) -> int:
    return load_i8(w + b * 256 + 32 * (i >> 2) + 4 * r + (i & 3))


@inline
def value_q4_k(w: int, b: int, r: int, i: int) -> int:
    return nibble(w + (b >> 3) * 1152 + 128 + 128 * (b & 7), r, i)


@inline
def value_q5_k(w: int, b: int, r: int, i: int) -> int:
    p = w + (b >> 3) * 1408 + 128 + 160 * (b & 7)
    fifth = (load_u8(p + 128 + 4 * r + (i & 3)) >> (i >> 2)) & 1
    return nibble(p, r, i) + 16 * fifth


@inline
def value_q6_k(w: int, b: int, r: int, i: int) -> int:
    """Times its scale, as the dot product has it."""
    p = w + (b >> 3) * 1680
    s = p + 144 + 192 * (b & 7)
    at = s + 128 + 32 * (i >> 4) + 4 * r + (i & 3)
    pair = (load_u8(at) >> (2 * ((i >> 2) & 3))) & 3
    scale = load_i8(p + 16 + 16 * (b & 7) + 8 * (i >> 4) + r)
    return (nibble(s, r, i) + 16 * pair - 32) * scale


def make_embed(value: Any, factor: Any, offset: Any, block_bytes: int) -> Any:
    """Make the kernel for one kind, from what the kind is."""

    @jit
    def embed(
        thread: int, ids: int, m: int, k: int, weight: int, scales: int, scratch: int, out: int
    ) -> None:
        """Write row ``ids[i]`` (int32) to ``out[i]``; `scratch` has 64 bytes for each thread."""
        blocks = k // 32
        words = scratch + 64 * rank(thread)
        i = next_chunk(thread)
        while i < m:
            row = load_i32(ids + 4 * i)
            r = row & 7
            w = weight + (row >> 3) * blocks * block_bytes
            scale = to_scalar_f32(1)
            if scales:
                scale = load_f32(scales + 4 * row)
            for b in range(blocks):
                store_f32x8(words, factor(w, b))
                store_f32x8(words + 32, offset(w, b))
                d = load_f32(words + 4 * r) * scale
                o = load_f32(words + 32 + 4 * r)
                for j in range(32):
                    q = to_scalar_f32(value(w, b, r, j))
                    store_f32(out + 4 * (i * k + 32 * b + j), fma_f32(q, d, o))
            i = next_chunk(thread)

    return embed


def make_dense_embed(load: Any, itemsize: int) -> Any:
    """Make the kernel for one dense type."""

    @jit
    def embed(
        thread: int, ids: int, m: int, k: int, weight: int, _scales: int, _scratch: int, out: int
    ) -> None:
        i = next_chunk(thread)
        while i < m:
            row = load_i32(ids + 4 * i)
            w = weight + (row >> 4) * 16 * itemsize * k + itemsize * (row & 15)
            for j in range(k):
                store_f32(out + 4 * (i * k + j), load(w + 16 * itemsize * j))
            i = next_chunk(thread)

    return embed


q4_0 = make_embed(value_q4_0, factor_q4_0, offset_q4_0, 144)
q4_1 = make_embed(value_q4_1, factor_q4_1, offset_q4_1, 160)
u4z = make_embed(value_q4_1, factor_q4_1, offset_u4z, 160)
q8_0 = make_embed(value_q8_0, factor_q8_0, no_offset, 272)
w8a8 = make_embed(value_w8a8, factor_w8a8, no_offset, 256)
q4_k = make_embed(value_q4_k, factor_q4_k, offset_q4_k, 144)
q5_k = make_embed(value_q5_k, factor_q5_k, offset_q5_k, 176)
q6_k = make_embed(value_q6_k, factor_q6_k, no_offset, 210)
f32 = make_dense_embed(load_f32, 4)
bf16 = make_dense_embed(load_bf16, 2)
f16 = make_dense_embed(load_f16, 2)
