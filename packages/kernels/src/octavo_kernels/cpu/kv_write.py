"""Rotary embedding and the write of keys and values to the paged cache."""

from __future__ import annotations

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.kv_types import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    INT8,
    item_bytes,
    largest_of,
    store_kv,
)
from octavo_kernels.cpu.lanes import finite_or_zero
from octavo_kernels.cpu.simd import (
    abs_bits,
    hmax_bits,
    load_f32,
    load_f32x8,
    load_i32,
    load_i64,
    max_i32,
    maximum,
    minimum,
    mul,
    splat_f32,
    store_f32,
    store_f32x8,
    sub,
    zero_i32x8,
)
from octavo_kernels.cpu.simd import add as plus
from octavo_kernels.cpu.team import next_chunk, rank

# Byte offsets of a problem's words of 8 bytes; `octavo_kernels.kv_write_problem` fills them.
# Strides are bytes between tokens; without positions nothing is rotated, without a query only
# keys and values are written.
POSITIONS, COS_SIN, ROTARY_DIM, INTERLEAVED = range(0, 32, 8)
QUERY, QUERY_STRIDE, ROTATED, NUM_HEADS = range(32, 64, 8)
KEY, KEY_STRIDE, VALUE, VALUE_STRIDE = range(64, 96, 8)
KEY_CACHE, VALUE_CACHE, KEY_SCALE, VALUE_SCALE, SLOTS = range(96, 136, 8)
NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SCRATCH = range(136, 184, 8)

TOKENS_OF_CHUNK = 8


@inline
def _word(problem: int, offset: int) -> int:
    return load_i64(problem + offset)


@jit
def rotate_head(
    source: int, target: int, cos_sin: int, rotary_dim: int, dim: int, interleaved: int
) -> None:
    """Rotate one head of float32; both products are rounded, as the twin's are."""
    half = rotary_dim // 2
    i = 0
    if interleaved:
        while i < half:
            x, y = load_f32(source + 8 * i), load_f32(source + 8 * i + 4)
            cos, sin = load_f32(cos_sin + 4 * i), load_f32(cos_sin + 4 * (half + i))
            store_f32(target + 8 * i, x * cos - y * sin)
            store_f32(target + 8 * i + 4, y * cos + x * sin)
            i += 1
    else:
        while i + 8 <= half:
            first, second = load_f32x8(source + 4 * i), load_f32x8(source + 4 * (half + i))
            cos8, sin8 = load_f32x8(cos_sin + 4 * i), load_f32x8(cos_sin + 4 * (half + i))
            store_f32x8(target + 4 * i, sub(mul(first, cos8), mul(second, sin8)))
            store_f32x8(target + 4 * (half + i), plus(mul(second, cos8), mul(first, sin8)))
            i += 8
        while i < half:
            x, y = load_f32(source + 4 * i), load_f32(source + 4 * (half + i))
            cos, sin = load_f32(cos_sin + 4 * i), load_f32(cos_sin + 4 * (half + i))
            store_f32(target + 4 * i, x * cos - y * sin)
            store_f32(target + 4 * (half + i), y * cos + x * sin)
            i += 1
    for j in range(rotary_dim, dim):
        store_f32(target + 4 * j, load_f32(source + 4 * j))


@jit
def write_head(source: int, target: int, scale: int, dim: int, kind: int) -> None:
    """Write one head of float32 to its place in a cache, and its scale unless that is 0."""
    size, largest = item_bytes(kind), largest_of(kind)
    if scale:
        bits = zero_i32x8()
        for i in range(dim // 8):
            bits = max_i32(bits, abs_bits(load_f32x8(source + 32 * i)))
        magnitude = hmax_bits(bits)
        store_f32(scale, magnitude / largest)
        factor = splat_f32(largest / magnitude if magnitude > 0 else 0.0)
        for i in range(dim // 8):
            scaled = finite_or_zero(mul(load_f32x8(source + 32 * i), factor), largest)
            store_kv(target + 8 * i * size, scaled, kind)
    elif largest > 0:
        high, low = splat_f32(largest), splat_f32(-largest)
        for i in range(dim // 8):
            x = maximum(minimum(load_f32x8(source + 32 * i), high), low)
            store_kv(target + 8 * i * size, x, kind)
    else:
        for i in range(dim // 8):
            store_kv(target + 8 * i * size, load_f32x8(source + 32 * i), kind)


@jit
def _write_token(problem: int, token: int, cos_sin: int, scratch: int, kind: int) -> None:
    slot = load_i32(_word(problem, SLOTS) + 4 * token)
    if slot < 0:
        return
    num_kv_heads, block_size = _word(problem, NUM_KV_HEADS), _word(problem, BLOCK_SIZE)
    dim, value_dim = _word(problem, HEAD_DIM), _word(problem, VALUE_DIM)
    key = _word(problem, KEY) + token * _word(problem, KEY_STRIDE)
    value = _word(problem, VALUE) + token * _word(problem, VALUE_STRIDE)
    key_scale, value_scale = _word(problem, KEY_SCALE), _word(problem, VALUE_SCALE)
    for head in range(num_kv_heads):
        at = (slot // block_size * num_kv_heads + head) * block_size + slot % block_size
        source = key + head * dim * 4
        if cos_sin:
            rotary_dim, interleaved = _word(problem, ROTARY_DIM), _word(problem, INTERLEAVED)
            rotate_head(source, scratch, cos_sin, rotary_dim, dim, interleaved)
            source = scratch
        target = _word(problem, KEY_CACHE) + at * dim * item_bytes(kind)
        write_head(source, target, key_scale + 4 * at if key_scale else 0, dim, kind)
        source = value + head * value_dim * 4
        target = _word(problem, VALUE_CACHE) + at * value_dim * item_bytes(kind)
        write_head(source, target, value_scale + 4 * at if value_scale else 0, value_dim, kind)


@jit
def _rotate_query(problem: int, token: int, cos_sin: int) -> None:
    num_heads, dim = _word(problem, NUM_HEADS), _word(problem, HEAD_DIM)
    source = _word(problem, QUERY) + token * _word(problem, QUERY_STRIDE)
    target = _word(problem, ROTATED) + token * num_heads * dim * 4
    rotary_dim, interleaved = _word(problem, ROTARY_DIM), _word(problem, INTERLEAVED)
    for head in range(num_heads):
        at = head * dim * 4
        rotate_head(source + at, target + at, cos_sin, rotary_dim, dim, interleaved)


@jit
def write_tokens(thread: int, problem: int, kind: int) -> None:
    """Do this thread's part of a step's rotations and writes; a barrier has to follow.

    Args:
        thread: Whose part.
        problem: Address of the words `POSITIONS` to `SCRATCH`.
        kind: Type of the caches, see `octavo_kernels.cpu.kv_types`.
    """
    num_tokens, positions = _word(problem, NUM_TOKENS), _word(problem, POSITIONS)
    scratch = _word(problem, SCRATCH) + rank(thread) * _word(problem, HEAD_DIM) * 4
    chunk = next_chunk(thread)
    while chunk * TOKENS_OF_CHUNK < num_tokens:
        first = chunk * TOKENS_OF_CHUNK
        for token in range(first, min(first + TOKENS_OF_CHUNK, num_tokens)):
            cos_sin = 0
            if positions:
                row = load_i32(positions + 4 * token) * _word(problem, ROTARY_DIM)
                cos_sin = _word(problem, COS_SIN) + 4 * row
            if _word(problem, QUERY):
                _rotate_query(problem, token, cos_sin)
            if _word(problem, KEY_CACHE):
                _write_token(problem, token, cos_sin, scratch, kind)
        chunk = next_chunk(thread)


@jit
def write_f32(thread: int, problem: int) -> None:
    write_tokens(thread, problem, F32)


@jit
def write_bf16(thread: int, problem: int) -> None:
    write_tokens(thread, problem, BF16)


@jit
def write_f16(thread: int, problem: int) -> None:
    write_tokens(thread, problem, F16)


@jit
def write_int8(thread: int, problem: int) -> None:
    write_tokens(thread, problem, INT8)


@jit
def write_e4m3(thread: int, problem: int) -> None:
    write_tokens(thread, problem, E4M3)


@jit
def write_e5m2(thread: int, problem: int) -> None:
    write_tokens(thread, problem, E5M2)
