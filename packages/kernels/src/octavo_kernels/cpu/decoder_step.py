"""A whole step of a persistent batch in one call: from slots to sampled tokens.

What the step's tokens are, where they stand and where their keys and values go is read off the
batch's own tables, so the caller names slots and counts and nothing else. Then come the embedding,
all layers, the norm and the head for the rows that sample, and the sampling; the tokens are
appended to the tables. Embedding, layers and sampling are kernels of their own, called by their
entry points, so the results are theirs bit for bit.

What it works on is described by words of 8 bytes; `octavo_kernels.decoder_step` fills them.
"""

from __future__ import annotations

from octavo_kernels.cpu.attention_plan import IS_SPLIT, MAX_ROWS, NUM_REQUESTS, NUM_UNITS
from octavo_kernels.cpu.decoder import (
    HIDDEN,
    HIDDEN_SIZE,
    NORMED,
    NUM_TOKENS,
    PRIVATE_ROWS,
    QUANTIZED,
    prepare_row,
    private,
    project,
    word,
)
from octavo_kernels.cpu.jit import jit
from octavo_kernels.cpu.sampling import NUM_ROWS as SAMPLING_ROWS
from octavo_kernels.cpu.sampling import TOKENS as SAMPLING_TOKENS
from octavo_kernels.cpu.simd import (
    load_f32,
    load_f32x8,
    load_i32,
    load_i64,
    mul,
    splat_f32,
    store_f32x8,
    store_i32,
    store_i64,
)
from octavo_kernels.cpu.team import barrier, call_entry, next_chunk

# Words that each step sets, and those that it answers with.
NUM_SLOTS, SAMPLES, STEP_MAX_ROWS, STEP_IS_SPLIT, ERROR, NUM_ROWS = range(0, 48, 8)
# The step: ``[num_slots]`` int64 each.
SLOTS, COUNTS, STARTS, SAMPLED, SAMPLED_INDEX = range(48, 88, 8)
# The batch, by slot.
TOKEN_IDS, TOKENS_STRIDE, NUM_KNOWN, NUM_BLOCKS, BLOCK_SIZE = range(88, 128, 8)
TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, SEEDS = range(128, 168, 8)
# The flat batch.
INPUT_IDS, POSITIONS, QUERY_START_LOC, SEQ_LENS, LAST_TOKENS = range(168, 208, 8)
# The calls that a step is made of, and what they get.
KINDS, NUM_KINDS, PLAN, PROBLEMS, NUM_PROBLEMS = range(208, 248, 8)
EMBED, EMBED_ARGUMENTS, DECODE, DECODER, DECODER_ARGUMENT = range(248, 288, 8)
HEAD, HEAD_PARTS, FINAL_NORM, LOGITS, LOGITS_STRIDE = range(288, 328, 8)
SAMPLE, SAMPLING, SAMPLING_ARGUMENT = range(328, 352, 8)
# Sampling parameters of the rows that sample.
ROW_TEMPERATURE, ROW_TOP_K, ROW_TOP_P, ROW_LOG_MIN_P, ROW_SEEDS, ROW_POSITIONS = range(352, 400, 8)
EMBEDDING_SCALE = 400

# Words of a kind of attention: layers with one block table and one window.
TABLE, TABLE_STRIDE, SLOT_MAPPING, PLAN_PROBLEM = range(0, 32, 8)
KIND_BYTES = 32

# Of the embedding's arguments, the number of tokens.
EMBED_TOKENS = 8

PROBLEM_BYTES = 240
"""Of a problem of attention; a layer's is `PROBLEMS` and so many bytes for each before it. A word
of `KIND_OF` tells its kind."""


@jit
def find_unknown(step: int) -> int:
    """Index of a slot that is to compute a token it does not have, or has no block for; or -1."""
    for i in range(word(step, NUM_SLOTS)):
        slot = load_i64(word(step, SLOTS) + 8 * i)
        end = load_i64(word(step, STARTS) + 8 * i) + load_i64(word(step, COUNTS) + 8 * i)
        capacity = load_i64(word(step, NUM_BLOCKS) + 8 * slot) * word(step, BLOCK_SIZE)
        if end > load_i64(word(step, NUM_KNOWN) + 8 * slot) or end > capacity:
            return i
    return -1


@jit
def lay_out(step: int) -> None:
    """Write the flat batch: a slot's tokens one after the other, slot by slot."""
    block_size, ids = word(step, BLOCK_SIZE), word(step, INPUT_IDS)
    positions = word(step, POSITIONS)
    token, rows = 0, 0
    store_i32(word(step, QUERY_START_LOC), 0)
    for i in range(word(step, NUM_SLOTS)):
        slot = load_i64(word(step, SLOTS) + 8 * i)
        start = load_i64(word(step, STARTS) + 8 * i)
        end = start + load_i64(word(step, COUNTS) + 8 * i)
        known = word(step, TOKEN_IDS) + word(step, TOKENS_STRIDE) * slot
        for position in range(start, end):
            store_i32(ids + 4 * token, load_i32(known + 4 * position))
            store_i32(positions + 4 * token, position)
            block, offset = position // block_size, position % block_size
            for kind in range(word(step, NUM_KINDS)):
                words = word(step, KINDS) + KIND_BYTES * kind
                table = word(words, TABLE) + 4 * word(words, TABLE_STRIDE) * slot
                cache_slot = load_i32(table + 4 * block) * block_size + offset
                store_i32(word(words, SLOT_MAPPING) + 4 * token, cache_slot)
            token += 1
        store_i32(word(step, QUERY_START_LOC) + 4 * i + 4, token)
        store_i32(word(step, SEQ_LENS) + 4 * i, end)
        store_i64(word(step, SAMPLED) + 8 * i, -1)
        # Where the last known token is computed, the next one can be sampled.
        if end == load_i64(word(step, NUM_KNOWN) + 8 * slot):
            store_i64(word(step, LAST_TOKENS) + 8 * rows, token - 1)
            store_i64(word(step, SAMPLED_INDEX) + 8 * rows, i)
            gather_parameters(step, slot, rows)
            rows += 1
    store_i64(step + NUM_ROWS, rows)
    store_i64(word(step, DECODER) + NUM_TOKENS, token)
    store_i64(word(step, EMBED_ARGUMENTS) + EMBED_TOKENS, token)
    store_i64(word(step, HEAD) + NUM_TOKENS, rows)
    store_i64(word(step, SAMPLING) + SAMPLING_ROWS, rows)


@jit
def gather_parameters(step: int, slot: int, row: int) -> None:
    """Copy what a slot wants of the sampler to a row; its token's index is its noise's position."""
    for source, target in (
        (TEMPERATURE, ROW_TEMPERATURE),
        (TOP_K, ROW_TOP_K),
        (TOP_P, ROW_TOP_P),
        (LOG_MIN_P, ROW_LOG_MIN_P),
    ):
        store_i32(word(step, target) + 4 * row, load_i32(word(step, source) + 4 * slot))
    store_i64(word(step, ROW_SEEDS) + 8 * row, load_i64(word(step, SEEDS) + 8 * slot))
    store_i64(word(step, ROW_POSITIONS) + 8 * row, load_i64(word(step, NUM_KNOWN) + 8 * slot))


@jit
def plan_attention(thread: int, step: int) -> None:
    """Divide the attention of each kind, and tell all layers."""
    for kind in range(word(step, NUM_KINDS)):
        problem = word(word(step, KINDS) + KIND_BYTES * kind, PLAN_PROBLEM)
        store_i64(problem + NUM_REQUESTS, word(step, NUM_SLOTS))
        store_i64(problem + MAX_ROWS, word(step, STEP_MAX_ROWS))
        store_i64(problem + IS_SPLIT, word(step, STEP_IS_SPLIT))
        call_entry(word(step, PLAN), thread, word(step, KINDS) + KIND_BYTES * kind + PLAN_PROBLEM)
    for index in range(word(step, NUM_PROBLEMS)):
        problem = word(step, PROBLEMS) + (PROBLEM_BYTES + 8) * index
        planned = word(word(step, KINDS) + KIND_BYTES * word(problem, PROBLEM_BYTES), PLAN_PROBLEM)
        for offset in (NUM_UNITS, NUM_REQUESTS, MAX_ROWS, IS_SPLIT):
            store_i64(problem + offset, word(planned, offset))


@jit
def scale_embedding(thread: int, step: int) -> None:
    """Multiply the embedding by a factor, and end with a barrier."""
    decoder, scale = word(step, DECODER), splat_f32(load_f32(step + EMBEDDING_SCALE))
    size = word(decoder, HIDDEN_SIZE)
    i = next_chunk(thread)
    while i < word(decoder, NUM_TOKENS):
        row = word(decoder, HIDDEN) + 4 * size * i
        for at in range(0, 4 * size, 32):
            store_f32x8(row + at, mul(load_f32x8(row + at), scale))
        i = next_chunk(thread)
    barrier(thread)


@jit
def compute_logits(thread: int, step: int) -> None:
    """Norm and head of the rows that sample, and end with a barrier."""
    head, parts = word(step, HEAD), word(step, HEAD_PARTS)
    rows, size = word(step, NUM_ROWS), word(head, HIDDEN_SIZE)
    x, a = private(thread, head, NORMED), private(thread, head, QUANTIZED)
    # Few rows every thread prepares for itself, as `prepare` does.
    is_shared = rows > PRIVATE_ROWS
    i = next_chunk(thread) if is_shared else 0
    while i < rows:
        token = load_i64(word(step, LAST_TOKENS) + 8 * i)
        source = word(head, HIDDEN) + 4 * size * (token - i)
        prepare_row(head, i, source, word(step, FINAL_NORM), parts, x, a)
        i = next_chunk(thread) if is_shared else i + 1
    if is_shared:
        barrier(thread)
    project(thread, head, parts, x, a, word(step, LOGITS), word(step, LOGITS_STRIDE), 0)


@jit
def append_tokens(step: int, tokens: int) -> None:
    """Append each row's token (``[num_rows]`` int64) to its slot, and report it."""
    for row in range(word(step, NUM_ROWS)):
        i = load_i64(word(step, SAMPLED_INDEX) + 8 * row)
        slot, token = load_i64(word(step, SLOTS) + 8 * i), load_i64(tokens + 8 * row)
        store_i64(word(step, SAMPLED) + 8 * i, token)
        at = word(step, NUM_KNOWN) + 8 * slot
        num_known = load_i64(at)
        known = word(step, TOKEN_IDS) + word(step, TOKENS_STRIDE) * slot
        store_i32(known + 4 * num_known, token)
        store_i64(at, num_known + 1)


@jit
def run_step(thread: int, step: int) -> None:
    """Run a step.

    Afterwards `ERROR` is the index of a slot that lacks a token or a block, and then nothing was
    done, or -1; `NUM_ROWS` rows had their last known token computed. With `SAMPLES`, `SAMPLED` is
    ``[num_slots]`` int64, -1 where nothing was sampled; without, `LOGITS` has a row for each.
    """
    if next_chunk(thread) == 0:
        error = find_unknown(step)
        store_i64(step + ERROR, error)
        if error < 0:
            lay_out(step)
            plan_attention(thread, step)
    barrier(thread)
    if word(step, ERROR) >= 0:
        return
    call_entry(word(step, EMBED), thread, word(step, EMBED_ARGUMENTS))
    barrier(thread)
    if load_f32(step + EMBEDDING_SCALE) != 1:
        scale_embedding(thread, step)
    call_entry(word(step, DECODE), thread, step + DECODER_ARGUMENT)
    if word(step, NUM_ROWS) == 0:
        return
    compute_logits(thread, step)
    if not word(step, SAMPLES):
        return
    call_entry(word(step, SAMPLE), thread, step + SAMPLING_ARGUMENT)
    barrier(thread)
    if next_chunk(thread) == 0:
        append_tokens(step, word(word(step, SAMPLING), SAMPLING_TOKENS))
