"""Penalties and grammar bitmasks, in place on rows of logits."""

from __future__ import annotations

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.lanes import NEGATIVE_INFINITY, keep_bits, lowest
from octavo_kernels.cpu.simd import (
    load_f32,
    load_f32x8,
    load_i32,
    load_i64,
    store_f32,
    store_f32x8,
    store_i32,
)
from octavo_kernels.cpu.team import next_chunk, rank

# Byte offsets of the words of a call.
LOGITS, ROW_STRIDE, NUM_ROWS, VOCAB_SIZE = range(0, 32, 8)
TOKEN_IDS, TOKENS_STRIDE, NUM_PROMPT_TOKENS, NUM_TOKENS = range(32, 64, 8)
REPETITION, FREQUENCY, PRESENCE, COUNTS = range(64, 96, 8)
BITMASK, NUM_WORDS, ROWS = range(32, 56, 8)

IN_PROMPT = 1 << 30
"""Beside the count of a token's occurrences in the output."""


@inline
def _word(problem: int, offset: int) -> int:
    return load_i64(problem + offset)


@jit
def _penalize_row(problem: int, row: int, counts: int) -> None:
    """Count a row's tokens, then change each once and clear its count."""
    vocab_size = _word(problem, VOCAB_SIZE)
    logits = _word(problem, LOGITS) + row * _word(problem, ROW_STRIDE)
    tokens = _word(problem, TOKEN_IDS) + row * _word(problem, TOKENS_STRIDE)
    num_prompt_tokens = load_i64(_word(problem, NUM_PROMPT_TOKENS) + 8 * row)
    num_tokens = load_i64(_word(problem, NUM_TOKENS) + 8 * row)
    repetition = load_f32(_word(problem, REPETITION) + 4 * row)
    frequency = load_f32(_word(problem, FREQUENCY) + 4 * row)
    presence = load_f32(_word(problem, PRESENCE) + 4 * row)
    if repetition == 1 and frequency == 0 and presence == 0:
        return
    for i in range(num_tokens):
        token = load_i32(tokens + 4 * i)
        if 0 <= token < vocab_size:
            at = counts + 4 * token
            count = load_i32(at)
            store_i32(at, count + 1 if i >= num_prompt_tokens else count | IN_PROMPT)
    for i in range(num_tokens):
        token = load_i32(tokens + 4 * i)
        if not 0 <= token < vocab_size:
            continue
        count = load_i32(counts + 4 * token)
        if count == 0:
            continue
        store_i32(counts + 4 * token, 0)
        logit = load_f32(logits + 4 * token)
        logit = logit / repetition if logit > 0 else logit * repetition
        in_output = count & (IN_PROMPT - 1)
        if in_output:
            logit = logit - frequency * in_output - presence
        store_f32(logits + 4 * token, logit)


@jit
def penalize_rows(thread: int, problem: int) -> None:
    """Do this thread's part of a step's penalties; a barrier has to follow."""
    counts = _word(problem, COUNTS) + rank(thread) * _word(problem, VOCAB_SIZE) * 4
    row = next_chunk(thread)
    while row < _word(problem, NUM_ROWS):
        _penalize_row(problem, row, counts)
        row = next_chunk(thread)


@jit
def _mask_row(problem: int, index: int) -> None:
    vocab_size, num_words = _word(problem, VOCAB_SIZE), _word(problem, NUM_WORDS)
    row = load_i64(_word(problem, ROWS) + 8 * index)
    logits = _word(problem, LOGITS) + row * _word(problem, ROW_STRIDE)
    words = _word(problem, BITMASK) + index * num_words * 4
    covered = min(vocab_size // 8, num_words * 4)
    for i in range(covered):
        bits = load_i32(words + i // 4 * 4) >> (i % 4 * 8) & 255
        if bits == 0:
            store_f32x8(logits + 32 * i, lowest())
        elif bits != 255:
            store_f32x8(logits + 32 * i, keep_bits(load_f32x8(logits + 32 * i), bits))
    for token in range(covered * 8, vocab_size):
        allowed = 0
        if token // 32 < num_words:
            allowed = load_i32(words + token // 32 * 4) >> (token % 32) & 1
        if not allowed:
            store_f32(logits + 4 * token, NEGATIVE_INFINITY)


@jit
def mask_rows(thread: int, problem: int) -> None:
    """Do this thread's part of a step's bitmasks; a barrier has to follow."""
    index = next_chunk(thread)
    while index < _word(problem, NUM_ROWS):
        _mask_row(problem, index)
        index = next_chunk(thread)
