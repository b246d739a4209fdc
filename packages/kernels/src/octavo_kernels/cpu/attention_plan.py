"""How a step's attention is divided into units, the same for all layers of one kind.

A *unit* is what one thread computes at a time: some query tokens, one KV head with all its
query heads (*rows* are token by token, head by head), and some segments. Units of one segment
write partial results, which are merged after a barrier; that is how one long request keeps
several threads busy.

The tokens of a unit are consecutive ones of one prompt, or one of each of several requests
that begin with the same blocks. Requests stand in the order of their block tables, so those
that have more in common are neighbours, and a tree of prefixes is read as one.
"""

from __future__ import annotations

from octavo_kernels.cpu.attention_tiles import TILE
from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import load_i32, load_i64, store_i64

SEGMENT = 256
"""Positions of a segment. Merging one costs as much as half a position; a context of 512 and
three KV heads are six units for two threads."""

# Byte offsets of a problem's words of 8 bytes; `octavo_kernels.attention_problem` fills them.
QUERY, KEYS, VALUES, OUTPUT, KEY_SCALE, VALUE_SCALE, SINKS = range(0, 56, 8)
QUERY_START_LOC, SEQ_LENS, BLOCK_TABLES, TABLE_ROWS = range(56, 88, 8)
TOKENS, UNITS, SCRATCH, PARTIALS = range(88, 120, 8)
NUM_UNITS, NUM_REQUESTS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM = range(120, 168, 8)
BLOCK_SIZE, TABLE_STRIDE, VALUE_STRIDE, WINDOW, MAX_ROWS = range(168, 208, 8)
SCALE, SOFT_CAP, IS_SPLIT, SCRATCH_BYTES = range(208, 240, 8)

# Of a query token's: where its request's block table is, its row of the query, its position, and
# how many positions from the start on it has in common with the token before it.
TABLE, INDEX, POSITION, SHARED = range(0, 32, 8)
TOKEN_BYTES = 32

# And of a unit's.
FIRST_TOKEN, NUM_TOKENS, KV_HEAD, FIRST_SEGMENT, LAST_SEGMENT, TASK = range(0, 48, 8)
UNIT_BYTES = 48

SHARING_ROWS = 24
"""Query rows of a unit of requests that share a prefix."""

ALL = 1 << 40
"""More positions than there are."""


@inline
def word(problem: int, offset: int) -> int:
    return load_i64(problem + offset)


@jit
def plan(_thread: int, problem: int) -> None:
    """Write the tokens and units of a step: the same for all layers of one kind of attention.

    Prompts come first, and of each the late tokens: they have most to do, and what is left for
    the end is small. `TOKENS` and `UNITS` have room for all of them. `MAX_ROWS` is how many query
    rows a unit may have, and afterwards how many the largest one has.
    """
    starts, tokens = word(problem, QUERY_START_LOC), word(problem, TOKENS)
    store_i64(problem + NUM_UNITS, 0)
    task, most = 0, _rows_to_tokens(problem, word(problem, MAX_ROWS))
    store_i64(problem + MAX_ROWS, 0)
    for request in range(word(problem, NUM_REQUESTS)):
        count = load_i32(starts + 4 * request + 4) - load_i32(starts + 4 * request)
        if count > 1:
            task = _plan_prompt(problem, request, tokens, most, task)
            tokens += count * TOKEN_BYTES
    count = 0
    for request in range(word(problem, NUM_REQUESTS)):
        if load_i32(starts + 4 * request + 4) - load_i32(starts + 4 * request) == 1:
            _insert_token(problem, request, tokens, count)
            count += 1
    _plan_single_tokens(problem, tokens, count, most, task)


@inline
def _rows_to_tokens(problem: int, rows: int) -> int:
    """How many tokens have so many query rows of one KV head, at least 1."""
    return max(rows * word(problem, NUM_KV_HEADS) // word(problem, NUM_HEADS), 1)


@jit
def _write_token(problem: int, request: int, index: int, token: int) -> None:
    """Write a request's query token, given its row of the query."""
    row = request
    if word(problem, TABLE_ROWS):
        row = load_i64(word(problem, TABLE_ROWS) + 8 * request)
    end = load_i32(word(problem, QUERY_START_LOC) + 4 * request + 4)
    position = load_i32(word(problem, SEQ_LENS) + 4 * request) - (end - index)
    table = word(problem, BLOCK_TABLES) + row * word(problem, TABLE_STRIDE) * 4
    store_i64(token + TABLE, table)
    store_i64(token + INDEX, index)
    store_i64(token + POSITION, position)
    store_i64(token + SHARED, ALL)


@jit
def _plan_prompt(problem: int, request: int, tokens: int, most: int, task: int) -> int:
    """Divide several tokens of a request into units; return the number of the next task."""
    start = load_i32(word(problem, QUERY_START_LOC) + 4 * request)
    count = load_i32(word(problem, QUERY_START_LOC) + 4 * request + 4) - start
    for i in range(count):
        _write_token(problem, request, start + i, tokens + i * TOKEN_BYTES)
    for first in range((count - 1) // most * most, -1, -most):
        task = _add_units(problem, tokens + first * TOKEN_BYTES, min(most, count - first), task)
    return task


@jit
def _insert_token(problem: int, request: int, tokens: int, count: int) -> None:
    """Add a request's only token to `count` others, in the order of their block tables."""
    index = load_i32(word(problem, QUERY_START_LOC) + 4 * request)
    new = tokens + count * TOKEN_BYTES
    _write_token(problem, request, index, new)
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if _is_before(problem, new, tokens + middle * TOKEN_BYTES):
            high = middle
        else:
            low = middle + 1
    for offset in range(0, TOKEN_BYTES, 8):
        moved = load_i64(new + offset)
        for at in range(new + offset, tokens + low * TOKEN_BYTES + offset, -TOKEN_BYTES):
            store_i64(at, load_i64(at - TOKEN_BYTES))
        store_i64(tokens + low * TOKEN_BYTES + offset, moved)


@jit
def _num_same_blocks(problem: int, token: int, other: int) -> int:
    """How many blocks two requests have in common, from the first on."""
    end = min(word(token, POSITION), word(other, POSITION)) // word(problem, BLOCK_SIZE) + 1
    table, other_table = word(token, TABLE), word(other, TABLE)
    count = 0
    while count < end and load_i32(table + 4 * count) == load_i32(other_table + 4 * count):
        count += 1
    return count


@jit
def _is_before(problem: int, token: int, other: int) -> bool:
    """Whether a token's block table comes before another's in lexicographic order."""
    count = _num_same_blocks(problem, token, other)
    position, other_position = word(token, POSITION), word(other, POSITION)
    if count * word(problem, BLOCK_SIZE) > min(position, other_position):
        return position < other_position
    return load_i32(word(token, TABLE) + 4 * count) < load_i32(word(other, TABLE) + 4 * count)


@jit
def _plan_single_tokens(problem: int, tokens: int, count: int, most: int, task: int) -> None:
    """Divide tokens of as many requests into units of those that have a tile to share."""
    most = min(most, _rows_to_tokens(problem, SHARING_ROWS))
    first = 0
    while first < count:
        last = first + 1
        while last < count and _find_shared(problem, tokens + last * TOKEN_BYTES):
            last += 1
        task = _plan_sharing(problem, tokens + first * TOKEN_BYTES, last - first, most, task)
        first = last


@jit
def _find_shared(problem: int, token: int) -> bool:
    """Note what a token shares with the one before it; return whether it sees a tile of that."""
    before = token - TOKEN_BYTES
    shared = _num_same_blocks(problem, token, before) * word(problem, BLOCK_SIZE)
    shared = min(shared, word(token, POSITION) + 1, word(before, POSITION) + 1)
    store_i64(token + SHARED, shared)
    first_seen = max(word(token, POSITION) - word(problem, WINDOW) + 1, 0)
    return shared // TILE * TILE > first_seen


@jit
def _plan_sharing(problem: int, tokens: int, count: int, most: int, task: int) -> int:
    """Divide tokens that share a prefix into units of about one size."""
    pieces = (count + most - 1) // most
    first = 0
    for piece in range(pieces):
        last = count * (piece + 1) // pieces
        task = _add_units(problem, tokens + first * TOKEN_BYTES, last - first, task)
        first = last
    return task


@jit
def _add_units(problem: int, tokens: int, count: int, task: int) -> int:
    """Add the units of some tokens, one task for each KV head; return the next task's number."""
    rows = count * word(problem, NUM_HEADS) // word(problem, NUM_KV_HEADS)
    store_i64(problem + MAX_ROWS, max(word(problem, MAX_ROWS), rows))
    lowest_position, highest_position = positions(tokens, count)
    first_segment = max(lowest_position - word(problem, WINDOW) + 1, 0) // SEGMENT
    last_segment = highest_position // SEGMENT + 1
    step = 1 if word(problem, IS_SPLIT) else last_segment - first_segment
    num_units = word(problem, NUM_UNITS)
    for head in range(word(problem, NUM_KV_HEADS)):
        for segment in range(first_segment, last_segment, step):
            unit = word(problem, UNITS) + num_units * UNIT_BYTES
            store_i64(unit + FIRST_TOKEN, tokens)
            store_i64(unit + NUM_TOKENS, count)
            store_i64(unit + KV_HEAD, head)
            store_i64(unit + FIRST_SEGMENT, segment)
            store_i64(unit + LAST_SEGMENT, segment + step)
            store_i64(unit + TASK, task + head)
            num_units += 1
    store_i64(problem + NUM_UNITS, num_units)
    return task + word(problem, NUM_KV_HEADS)


@jit
def positions(tokens: int, count: int) -> tuple[int, int]:
    """Lowest and highest position of some tokens."""
    lowest_position = highest_position = word(tokens, POSITION)
    for i in range(1, count):
        position = word(tokens + i * TOKEN_BYTES, POSITION)
        lowest_position = min(lowest_position, position)
        highest_position = max(highest_position, position)
    return lowest_position, highest_position
