"""All layers of a Llama-like decoder in one call.

A layer is norm, projections to queries, keys and values, rotary embedding and cache write,
attention, output projection, norm, gated feed-forward. The residual stream is float32 and
updated in place. Matmuls and attention are kernels of their own, called by their entry
points: which ones is data, so this function is compiled once for all kinds of weights.

Every step here is done row by row (or head by head) in an order that depends on nothing
else, so a token's result does not depend on the batch or on the number of threads.

What it works on is described by words of 8 bytes; `octavo_kernels.decoder` fills them.
"""

from __future__ import annotations

from typing import Any

from octavo_kernels.cpu.activations import quantize_row, quantized_bytes
from octavo_kernels.cpu.gated import gated_row
from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.norms import rms_norm_row
from octavo_kernels.cpu.simd import (
    add,
    load_f32,
    load_f32x8,
    load_f32x16,
    load_i32,
    load_i64,
    mul,
    store_as_bf16,
    store_as_f16,
    store_f32x8,
    store_i64,
    store_lanes,
    sub,
)
from octavo_kernels.cpu.team import barrier, call_entry, next_chunk, num_threads, rank, start_alone

# Words of the decoder and of a step.
LAYERS, NUM_LAYERS, HIDDEN, HIDDEN_SIZE, NUM_TOKENS, EPS, ROTARY_DIM, POSITIONS = range(0, 64, 8)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CACHE_KIND, ATTEND, QUERY = range(64, 120, 8)
ATTENDED, QKV, QKV_SIZE, GATE_UP, FFN_SIZE, ACTIVATION = range(120, 168, 8)
NORMED, QUANTIZED, FFN_QUANTIZED, FFN_ROWS, ARGUMENTS, PRIVATE_BYTES = range(168, 216, 8)
FINAL_NORM, BRANCH, ALONE, OUTPUT, FIRST_TOKEN = range(216, 256, 8)
DECODER_BYTES = 256

# Words of a layer.
INPUT_NORM, QKV_PARTS, QUERY_NORM, KEY_NORM, PROBLEM, KEY_CACHE, VALUE_CACHE = range(0, 56, 8)
SLOTS, COS_SIN, OUTPUT_PARTS, AFTER_ATTENTION, FFN_NORM, GATE_UP_PARTS = range(56, 104, 8)
DOWN_PARTS, AFTER_FFN = range(104, 120, 8)
LAYER_BYTES = 120

# Words of a list of projections with one input, and of each of them.
NUM_PARTS, NEEDS_QUANTIZED, PARTS = 0, 8, 16
ENTRY, TAKES_QUANTIZED, ROWS, INPUTS, WEIGHT, BIAS, SCALES, SCALE_BLOCK = range(0, 64, 8)
COLUMN = 64
PART_BYTES = 72

CACHE_F32, CACHE_BF16, CACHE_F16 = 0, 1, 2
ARGUMENT_BYTES = 128

# Words of what a thread needs to work alone: a team of its own, with it as the only member, and
# the words of a decoder of some of the step's tokens.
TEAM, MEMBER, BLOCK = 0, 640, 704
ALONE_BYTES = BLOCK + DECODER_BYTES

ROWS_OF_BLOCK, FEWEST_ROWS = 32, 8
"""From `FEWEST_ROWS` tokens for each thread on, a thread takes up to `ROWS_OF_BLOCK` through all of
a layer that needs no others, alone: they stay in its caches, and no thread waits for another."""

PRIVATE_ROWS = 4
"""Up to here every thread normalizes and quantizes all rows for itself: a row of 576 takes
0.4 us, about what the barrier would."""


@inline
def word(of: int, offset: int) -> int:
    return load_i64(of + offset)


@jit
def project(
    thread: int, decoder: int, parts: int, x: int, a: int, out: int, out_row: int, accumulate: int
) -> None:
    """Multiply with each of some weights, and end with a barrier.

    Args:
        thread: This thread.
        decoder: Words of the decoder.
        parts: Words of the weights.
        x: The input as float32, if one of them is dense.
        a: The input quantized, if one is quantized.
        out: Where the result goes, rows `out_row` bytes apart.
        out_row: See `out`.
        accumulate: Whether it is added to what is there.
    """
    arguments = word(decoder, ARGUMENTS) + rank(thread) * ARGUMENT_BYTES
    for i in range(word(parts, NUM_PARTS)):
        part = parts + PARTS + i * PART_BYTES
        inputs = word(part, INPUTS)
        if word(part, TAKES_QUANTIZED):
            store_i64(arguments, a)
            store_i64(arguments + 8, quantized_bytes(inputs))
        else:
            store_i64(arguments, x)
            store_i64(arguments + 8, 4 * inputs)
        store_i64(arguments + 16, word(decoder, NUM_TOKENS))
        for j in range(6):  # rows, inputs, weight, bias, scales and their block
            store_i64(arguments + 24 + 8 * j, word(part, ROWS + 8 * j))
        store_i64(arguments + 72, out + 4 * word(part, COLUMN))
        store_i64(arguments + 80, out_row)
        store_i64(arguments + 88, accumulate)
        call_entry(word(part, ENTRY), thread, arguments)
        barrier(thread)


@inline
def private(thread: int, decoder: int, buffer: int) -> int:
    """Where this thread finds a buffer of rows: its own, if there are few."""
    at = word(decoder, buffer)
    if word(decoder, NUM_TOKENS) <= PRIVATE_ROWS:
        at += rank(thread) * word(decoder, PRIVATE_BYTES)
    return at


@jit
def prepare_row(decoder: int, i: int, source: int, norm: int, parts: int, x: int, a: int) -> None:
    """Normalize row `i` (if there is a norm) to `x`, and quantize it to `a` (if asked for)."""
    if norm:
        size = word(decoder, HIDDEN_SIZE)
        row = x + 4 * size * i
        rms_norm_row(source + 4 * size * i, norm, size, load_eps(decoder), row)
    else:
        size = word(decoder, NUM_HEADS) * word(decoder, HEAD_DIM)
        row = source + 4 * size * i
    if word(parts, NEEDS_QUANTIZED):
        quantize_row(row, size, a + quantized_bytes(size) * i)


@inline
def load_eps(decoder: int) -> float:
    return load_f32(decoder + EPS)


@jit
def prepare(thread: int, decoder: int, source: int, norm: int, parts: int) -> None:
    """Make the input of a projection from all rows of `source`."""
    x, a = private(thread, decoder, NORMED), private(thread, decoder, QUANTIZED)
    m = word(decoder, NUM_TOKENS)
    if m <= PRIVATE_ROWS:
        for i in range(m):
            prepare_row(decoder, i, source, norm, parts, x, a)
        return
    i = next_chunk(thread)
    while i < m:
        prepare_row(decoder, i, source, norm, parts, x, a)
        i = next_chunk(thread)
    barrier(thread)


@inline
def store_cache(where: int, index: int, value: object, kind: int) -> None:
    """Store 8 or 16 numbers as those from number `index` on of a cache."""
    if kind == CACHE_F32:
        store_lanes(where + 4 * index, value)
    elif kind == CACHE_BF16:
        store_as_bf16(where + 2 * index, value)
    else:
        store_as_f16(where + 2 * index, value)


@inline
def turn(x: Any, y: Any, cos: Any, sin: Any) -> Any:
    """Rotate pairs. Rounded like the torch twin: products first."""
    return sub(mul(x, cos), mul(y, sin)), add(mul(y, cos), mul(x, sin))


@inline
def write_head(
    head: int, cos_sin: int, rotary_dim: int, dim: int, where: int, index: int, kind: int
) -> None:
    """Write a head as the numbers from `index` on of a cache, its first `rotary_dim` rotated.

    Components half of `rotary_dim` apart are pairs.
    """
    half = rotary_dim // 2
    sines, others = cos_sin + 4 * half, head + 4 * half
    whole = half // 16 * 16
    for i in range(0, whole, 16):
        x, y = load_f32x16(head + 4 * i), load_f32x16(others + 4 * i)
        x, y = turn(x, y, load_f32x16(cos_sin + 4 * i), load_f32x16(sines + 4 * i))
        store_cache(where, index + i, x, kind)
        store_cache(where, index + half + i, y, kind)
    if whole < half:
        at = 4 * whole
        x8, y8 = load_f32x8(head + at), load_f32x8(others + at)
        x8, y8 = turn(x8, y8, load_f32x8(cos_sin + at), load_f32x8(sines + at))
        store_cache(where, index + whole, x8, kind)
        store_cache(where, index + half + whole, y8, kind)
    whole = dim - (dim - rotary_dim) % 16
    for i in range(rotary_dim, whole, 16):
        store_cache(where, index + i, load_f32x16(head + 4 * i), kind)
    if whole < dim:
        store_cache(where, index + whole, load_f32x8(head + 4 * whole), kind)


@jit
def rotate_and_write(decoder: int, layer: int, token: int) -> None:
    """Rotate a token's queries and keys, and write its keys and values to the cache."""
    dim, num_kv_heads = word(decoder, HEAD_DIM), word(decoder, NUM_KV_HEADS)
    num_heads, kind = word(decoder, NUM_HEADS), word(decoder, CACHE_KIND)
    rotary_dim, block_size = word(decoder, ROTARY_DIM), word(decoder, BLOCK_SIZE)
    position = load_i32(word(decoder, POSITIONS) + 4 * token)
    cos_sin = word(layer, COS_SIN) + 4 * rotary_dim * position
    row = word(decoder, QKV) + 4 * word(decoder, QKV_SIZE) * token
    query = word(decoder, QUERY) + 4 * num_heads * dim * token
    eps = load_eps(decoder)
    for head in range(num_heads):
        at = row + 4 * dim * head
        if word(layer, QUERY_NORM):
            rms_norm_row(at, word(layer, QUERY_NORM), dim, eps, at)
        write_head(at, cos_sin, rotary_dim, dim, query, dim * head, CACHE_F32)
    slot = load_i32(word(layer, SLOTS) + 4 * (word(decoder, FIRST_TOKEN) + token))
    if slot < 0:
        return
    first = slot // block_size * num_kv_heads * block_size + slot % block_size
    keys = row + 4 * dim * num_heads
    values = keys + 4 * dim * num_kv_heads
    for head in range(num_kv_heads):
        at = keys + 4 * dim * head
        if word(layer, KEY_NORM):
            rms_norm_row(at, word(layer, KEY_NORM), dim, eps, at)
        index = (first + head * block_size) * dim
        write_head(at, cos_sin, rotary_dim, dim, word(layer, KEY_CACHE), index, kind)
        value = values + 4 * dim * head
        write_head(value, cos_sin, 0, dim, word(layer, VALUE_CACHE), index, kind)


@jit
def activate(thread: int, decoder: int, parts: int) -> None:
    """Apply the gated activation to all rows, and end with a barrier.

    Threads share rows in pieces of up to 256; one that works alone takes them whole.
    """
    size, m = word(decoder, FFN_SIZE), word(decoder, NUM_TOKENS)
    piece = 256 if num_threads(thread) > 1 else size
    pieces = (size + piece - 1) // piece
    chunk = next_chunk(thread)
    while chunk < m * pieces:
        i, start = chunk // pieces, chunk % pieces * piece
        count = min(piece, size - start)
        gate = word(decoder, GATE_UP) + 4 * (2 * size * i + start)
        row = word(decoder, FFN_ROWS) + 4 * (size * i + start)
        gated_row(gate, gate + 4 * size, count, word(decoder, ACTIVATION), row)
        if word(parts, NEEDS_QUANTIZED):
            q = word(decoder, FFN_QUANTIZED) + quantized_bytes(size) * i
            quantize_row(row, count, q + quantized_bytes(start))
        chunk = next_chunk(thread)
    barrier(thread)


@jit
def are_quantized(parts: int) -> bool:
    """Whether all projections of a list are; dense ones sum runs of inputs one by one."""
    for i in range(word(parts, NUM_PARTS)):
        if not word(parts + PARTS + i * PART_BYTES, TAKES_QUANTIZED):
            return False
    return True


@jit
def add_projection(thread: int, decoder: int, parts: int, x: int, a: int, norm: int) -> None:
    """Add a projection to the residual stream, normed before if there is a norm behind a block.

    Ends with a barrier.
    """
    size, hidden = word(decoder, HIDDEN_SIZE), word(decoder, HIDDEN)
    if not norm and are_quantized(parts):
        project(thread, decoder, parts, x, a, hidden, 4 * size, 1)
        return
    branch, eps = word(decoder, BRANCH), load_eps(decoder)
    project(thread, decoder, parts, x, a, branch, 4 * size, 0)
    i = next_chunk(thread)
    while i < word(decoder, NUM_TOKENS):
        row, stream = branch + 4 * size * i, hidden + 4 * size * i
        if norm:
            rms_norm_row(row, norm, size, eps, row)
        for at in range(0, 4 * size, 32):
            store_f32x8(stream + at, add(load_f32x8(row + at), load_f32x8(stream + at)))
        i = next_chunk(thread)
    barrier(thread)


@jit
def before_attention(thread: int, decoder: int, layer: int) -> None:
    """Project to queries, keys and values, and write the latter to the cache."""
    parts = word(layer, QKV_PARTS)
    prepare(thread, decoder, word(decoder, HIDDEN), word(layer, INPUT_NORM), parts)
    x, a = private(thread, decoder, NORMED), private(thread, decoder, QUANTIZED)
    project(thread, decoder, parts, x, a, word(decoder, QKV), 4 * word(decoder, QKV_SIZE), 0)
    token = next_chunk(thread)
    while token < word(decoder, NUM_TOKENS):
        rotate_and_write(decoder, layer, token)
        token = next_chunk(thread)
    barrier(thread)


@jit
def after_attention(thread: int, decoder: int, layer: int) -> None:
    """Add the attention's and the feed-forward's results to the residual stream."""
    attended, parts = word(decoder, ATTENDED), word(layer, OUTPUT_PARTS)
    prepare(thread, decoder, attended, 0, parts)
    a = private(thread, decoder, QUANTIZED)
    add_projection(thread, decoder, parts, attended, a, word(layer, AFTER_ATTENTION))
    feed_forward_block(thread, decoder, layer)


@jit
def feed_forward_block(thread: int, decoder: int, layer: int) -> None:
    """Add the feed-forward of one layer to the residual stream."""
    hidden, parts = word(decoder, HIDDEN), word(layer, GATE_UP_PARTS)
    prepare(thread, decoder, hidden, word(layer, FFN_NORM), parts)
    x, a = private(thread, decoder, NORMED), private(thread, decoder, QUANTIZED)
    row = 8 * word(decoder, FFN_SIZE)
    project(thread, decoder, parts, x, a, word(decoder, GATE_UP), row, 0)
    parts = word(layer, DOWN_PARTS)
    activate(thread, decoder, parts)
    x, a = word(decoder, FFN_ROWS), word(decoder, FFN_QUANTIZED)
    add_projection(thread, decoder, parts, x, a, word(layer, AFTER_FFN))


@jit
def rows_of_block(thread: int, decoder: int) -> int:
    """How many tokens a thread takes through a layer alone; 0 if all threads work together."""
    share = (word(decoder, NUM_TOKENS) + num_threads(thread) - 1) // num_threads(thread)
    if share < FEWEST_ROWS or not word(decoder, ALONE):
        return 0
    blocks = (share + ROWS_OF_BLOCK - 1) // ROWS_OF_BLOCK
    return (share + blocks - 1) // blocks


@jit
def describe_block(thread: int, decoder: int, first: int, count: int, rows: int) -> int:
    """Write the words of a decoder of `count` tokens from token `first` on, and return where.

    Of each buffer that nobody else reads, a thread has `rows` rows, the same for all its blocks.
    """
    block = word(decoder, ALONE) + rank(thread) * ALONE_BYTES + BLOCK
    for at in range(0, DECODER_BYTES, 8):
        store_i64(block + at, word(decoder, at))
    store_i64(block + NUM_TOKENS, count)
    store_i64(block + FIRST_TOKEN, first)
    size, ffn_size = word(decoder, HIDDEN_SIZE), word(decoder, FFN_SIZE)
    query_size, mine = word(decoder, NUM_HEADS) * word(decoder, HEAD_DIM), rank(thread) * rows
    widest = max(size, query_size)
    store_i64(block + HIDDEN, word(decoder, HIDDEN) + 4 * size * first)
    store_i64(block + POSITIONS, word(decoder, POSITIONS) + 4 * first)
    store_i64(block + QUERY, word(decoder, QUERY) + 4 * query_size * first)
    store_i64(block + ATTENDED, word(decoder, ATTENDED) + 4 * query_size * first)
    store_i64(block + QKV, word(decoder, QKV) + 4 * word(decoder, QKV_SIZE) * mine)
    store_i64(block + GATE_UP, word(decoder, GATE_UP) + 8 * ffn_size * mine)
    store_i64(block + FFN_ROWS, word(decoder, FFN_ROWS) + 4 * ffn_size * mine)
    quantized = word(decoder, FFN_QUANTIZED) + quantized_bytes(ffn_size) * mine
    store_i64(block + FFN_QUANTIZED, quantized)
    store_i64(block + NORMED, word(decoder, NORMED) + 4 * widest * mine)
    store_i64(block + QUANTIZED, word(decoder, QUANTIZED) + 4 * widest * mine)
    store_i64(block + BRANCH, word(decoder, BRANCH) + 4 * size * mine)
    store_i64(block + ARGUMENTS, word(decoder, ARGUMENTS) + rank(thread) * ARGUMENT_BYTES)
    return block


@jit
def run_blocks(thread: int, decoder: int, layer: int, rows: int, is_after: int) -> None:
    """Do what is before or after a layer's attention, block by block, and end with a barrier."""
    alone = word(decoder, ALONE) + rank(thread) * ALONE_BYTES + MEMBER
    m = word(decoder, NUM_TOKENS)
    first = next_chunk(thread) * rows
    while first < m:
        block = describe_block(thread, decoder, first, min(rows, m - first), rows)
        start_alone(alone)
        if is_after:
            after_attention(alone, block, layer)
        else:
            before_attention(alone, block, layer)
        first = next_chunk(thread) * rows
    barrier(thread)


@jit
def decode(thread: int, decoder: int) -> None:
    """Run all layers, and the final norm from the residual stream to `OUTPUT`, if there is one.

    Without one all is done for every thread when it returns; with one a barrier has to follow.
    """
    rows = rows_of_block(thread, decoder)
    for index in range(word(decoder, NUM_LAYERS)):
        layer = word(decoder, LAYERS) + index * LAYER_BYTES
        if rows:
            run_blocks(thread, decoder, layer, rows, 0)
        else:
            before_attention(thread, decoder, layer)
        # An entry point's only argument here is the problem's address.
        call_entry(word(decoder, ATTEND), thread, layer + PROBLEM)
        barrier(thread)
        if rows:
            run_blocks(thread, decoder, layer, rows, 1)
        else:
            after_attention(thread, decoder, layer)
    if not word(decoder, OUTPUT):
        return
    size, eps = word(decoder, HIDDEN_SIZE), load_eps(decoder)
    i = next_chunk(thread)
    while i < word(decoder, NUM_TOKENS):
        source, target = word(decoder, HIDDEN) + 4 * size * i, word(decoder, OUTPUT) + 4 * size * i
        rms_norm_row(source, word(decoder, FINAL_NORM), size, eps, target)
        i = next_chunk(thread)
