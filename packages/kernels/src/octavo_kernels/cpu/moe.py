"""A mixture of gated feed-forwards: each token through the experts that were chosen for it.

Pairs of a token and an expert are sorted by expert, so that an expert's weights are read
once for all its tokens. A token's results are added in the order of its choices; nothing
depends on which other tokens an expert got.
"""

from __future__ import annotations

from octavo_kernels.cpu.activations import quantize_row, quantized_bytes
from octavo_kernels.cpu.gated import gated_row
from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    broadcast_f32,
    fma,
    load_f32x8,
    load_i32,
    load_i64,
    store_f32x8,
    store_i64,
    zero_f32x8,
)
from octavo_kernels.cpu.team import barrier, call_entry, next_chunk, rank

# Words of a call.
X, X_ROW, NUM_TOKENS, TOP_K, HIDDEN_SIZE, FFN_SIZE, ACTIVATION, NUM_EXPERTS = range(0, 64, 8)
GATE_UP_WORDS, DOWN_WORDS, TOPK_WEIGHTS, TOKEN_OF_PAIR, PLACE_OF_CHOICE, EXPERT_STARTS = range(
    64, 112, 8
)
ROWS, QUANTIZED, GATE_UP, FFN_ROWS, FFN_QUANTIZED, DOWN, OUT, ARGUMENTS = range(112, 176, 8)

# Words of an expert's projection.
ENTRY, TAKES_QUANTIZED, OUT_FEATURES, IN_FEATURES = range(0, 32, 8)
PROJECTION_BYTES = 64
ARGUMENT_BYTES = 128


@inline
def word(of: int, offset: int) -> int:
    return load_i64(of + offset)


@jit
def project(
    thread: int, call: int, projections: int, x: int, a: int, in_size: int, out: int, out_size: int
) -> None:
    """Multiply each expert's rows with its weight."""
    arguments = word(call, ARGUMENTS) + rank(thread) * ARGUMENT_BYTES
    starts = word(call, EXPERT_STARTS)
    for expert in range(word(call, NUM_EXPERTS)):
        start, end = load_i32(starts + 4 * expert), load_i32(starts + 4 * expert + 4)
        if start == end:
            continue
        projection = projections + expert * PROJECTION_BYTES
        if word(projection, TAKES_QUANTIZED):
            store_i64(arguments, a + quantized_bytes(in_size) * start)
            store_i64(arguments + 8, quantized_bytes(in_size))
        else:
            store_i64(arguments, x + 4 * in_size * start)
            store_i64(arguments + 8, 4 * in_size)
        store_i64(arguments + 16, end - start)
        for i in range(6):  # features, weight, bias, scales and their block
            store_i64(arguments + 24 + 8 * i, word(projection, OUT_FEATURES + 8 * i))
        store_i64(arguments + 72, out + 4 * out_size * start)
        store_i64(arguments + 80, 4 * out_size)
        store_i64(arguments + 88, 0)
        call_entry(word(projection, ENTRY), thread, arguments)
        barrier(thread)


@jit
def gather(call: int, pair: int) -> None:
    """Copy the token of a pair to its place, and quantize it."""
    size = word(call, HIDDEN_SIZE)
    token = load_i32(word(call, TOKEN_OF_PAIR) + 4 * pair)
    source = word(call, X) + word(call, X_ROW) * token
    row = word(call, ROWS) + 4 * size * pair
    for i in range(0, size, 8):
        store_f32x8(row + 4 * i, load_f32x8(source + 4 * i))
    quantize_row(source, size, word(call, QUANTIZED) + quantized_bytes(size) * pair)


@jit
def activate(call: int, pair: int) -> None:
    size = word(call, FFN_SIZE)
    gate = word(call, GATE_UP) + 8 * size * pair
    row = word(call, FFN_ROWS) + 4 * size * pair
    gated_row(gate, gate + 4 * size, size, word(call, ACTIVATION), row)
    quantize_row(row, size, word(call, FFN_QUANTIZED) + quantized_bytes(size) * pair)


@jit
def combine(call: int, token: int) -> None:
    """Add a token's results up, each times its weight."""
    size, top_k = word(call, HIDDEN_SIZE), word(call, TOP_K)
    weights = word(call, TOPK_WEIGHTS) + 4 * top_k * token
    places = word(call, PLACE_OF_CHOICE) + 4 * top_k * token
    for i in range(0, size, 8):
        total = zero_f32x8()
        for choice in range(top_k):
            row = word(call, DOWN) + 4 * size * load_i32(places + 4 * choice)
            total = fma(load_f32x8(row + 4 * i), broadcast_f32(weights + 4 * choice), total)
        store_f32x8(word(call, OUT) + 4 * (size * token + i), total)


@jit
def fused_moe(thread: int, call: int) -> None:
    """Run the whole mixture."""
    hidden, ffn = word(call, HIDDEN_SIZE), word(call, FFN_SIZE)
    pairs = word(call, NUM_TOKENS) * word(call, TOP_K)
    pair = next_chunk(thread)
    while pair < pairs:
        gather(call, pair)
        pair = next_chunk(thread)
    barrier(thread)
    x, a = word(call, ROWS), word(call, QUANTIZED)
    project(thread, call, word(call, GATE_UP_WORDS), x, a, hidden, word(call, GATE_UP), 2 * ffn)
    pair = next_chunk(thread)
    while pair < pairs:
        activate(call, pair)
        pair = next_chunk(thread)
    barrier(thread)
    x, a = word(call, FFN_ROWS), word(call, FFN_QUANTIZED)
    project(thread, call, word(call, DOWN_WORDS), x, a, ffn, word(call, DOWN), hidden)
    token = next_chunk(thread)
    while token < word(call, NUM_TOKENS):
        combine(call, token)
        token = next_chunk(thread)
