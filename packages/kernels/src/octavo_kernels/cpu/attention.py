"""Paged attention with an online softmax.

Positions are taken in tiles of `TILE`, counted from the start of the sequence, and tiles in
segments of `SEGMENT`. A segment is one online softmax (Milakov and Gimelshein 2018, arXiv
1805.02867; Dao et al. 2022, arXiv 2205.14135) from its first tile to its last; segments are
merged in order. All of that depends on a query's position only, so its result is the same bit
for bit in a decode step, in a prompt cut into any pieces, and on any number of threads: who
computes a segment, and beside which other queries, changes nothing.

What one thread computes at a time is a unit (`attention_plan.py`). As long as the tokens of a
unit have the same blocks, their keys and values are read and converted once for all, as in
Hydragen (Juravsky et al. 2024, arXiv 2402.05099) and ChunkAttention (Ye et al. 2024, arXiv
2402.15220); then each request goes on with its own.
"""

from __future__ import annotations

from octavo_kernels.cpu.attention_plan import (
    BLOCK_SIZE,
    FIRST_SEGMENT,
    FIRST_TOKEN,
    HEAD_DIM,
    INDEX,
    IS_SPLIT,
    KEY_SCALE,
    KEYS,
    KV_HEAD,
    LAST_SEGMENT,
    MAX_ROWS,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_TOKENS,
    NUM_UNITS,
    OUTPUT,
    PARTIALS,
    POSITION,
    QUERY,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SEGMENT,
    SHARED,
    SINKS,
    SOFT_CAP,
    TABLE,
    TASK,
    TOKEN_BYTES,
    UNIT_BYTES,
    UNITS,
    VALUE_DIM,
    VALUE_SCALE,
    VALUE_STRIDE,
    VALUES,
    WINDOW,
    positions,
    word,
)
from octavo_kernels.cpu.attention_tiles import (
    COLUMNS_AT_ONCE,
    KEYS_AT_ONCE,
    LINE,
    ROWS_AT_ONCE,
    TILE,
    score,
    weigh,
    weigh_8,
    weigh_32,
)
from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.kv_types import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    INT8,
    item_bytes,
    load_kv,
)
from octavo_kernels.cpu.lanes import keep_lanes
from octavo_kernels.cpu.simd import (
    add,
    div,
    exp,
    first_lane,
    fma,
    high_half,
    hmax_f32x16,
    hsum,
    load_f32,
    load_f32x8,
    load_f32x16,
    load_i32,
    load_i64,
    low_half,
    maximum,
    mul,
    prefetch,
    splat_f32,
    splat_f32x16,
    store_f32,
    store_f32x8,
    store_f32x16,
    store_i64,
    sub,
    zero_f32x8,
)
from octavo_kernels.cpu.team import barrier, next_chunk, num_threads, rank

GATHERED_ROWS = 24
"""More rows than this read a tile's keys and values from a float32 copy: the conversion is paid
once. Up to here converting them again for every 3 or 4 rows takes 0.8 to 0.95 times as long."""

UNITS_TO_TAKE_AHEAD = 8
"""From so many units for each thread on, a thread takes one before it needs it, and so knows which
keys and values it reads next. With fewer it might take the last one, and have others wait."""

# Where a tile's keys and values are, an address for every 8 positions of them: what is read now,
# and what is read later.
KEY_PLACES, VALUE_PLACES, LATER_PLACES = 0, TILE, 2 * TILE
# And of which positions the latter are: block table, KV head, from and to which position.
LATER_TABLE, LATER_HEAD, LATER_FIRST, LATER_LAST = range(4 * TILE, 4 * TILE + 32, 8)
PLACES_BYTES = 5 * TILE

EMPTY_MAXIMUM = -3.0e38
"""Maximum of no scores: finite, so that its difference to itself is 0 and not NaN."""


@inline
def _exp(x: float) -> float:
    return first_lane(exp(splat_f32(x)))


# ---- states: maximum and sum of each row, and the weighted sum of its values ---------------


@inline
def _state_bytes(problem: int) -> int:
    return word(problem, MAX_ROWS) * (word(problem, VALUE_DIM) + 2) * 4


@inline
def _tiles(problem: int, scratch: int) -> int:
    """What a tile is worked on with: behind two states and the rows of the query."""
    query_bytes = word(problem, MAX_ROWS) * word(problem, HEAD_DIM) * 4
    return scratch + 2 * _state_bytes(problem) + query_bytes


@inline
def _maxima(problem: int, state: int) -> int:
    return state + word(problem, MAX_ROWS) * word(problem, VALUE_DIM) * 4


@inline
def _totals(problem: int, state: int) -> int:
    return _maxima(problem, state) + word(problem, MAX_ROWS) * 4


@jit
def _clear(problem: int, state: int, rows: int) -> None:
    maxima, totals = _maxima(problem, state), _totals(problem, state)
    for row in range(rows):
        store_f32(maxima + 4 * row, EMPTY_MAXIMUM)
        store_f32(totals + 4 * row, 0.0)
    for i in range(rows * word(problem, VALUE_DIM) // 8):
        store_f32x8(state + 32 * i, zero_f32x8())


@jit
def _rescale(values: int, factor: float, dim: int) -> None:
    factors = splat_f32(factor)
    for i in range(dim // 8):
        store_f32x8(values + 32 * i, mul(load_f32x8(values + 32 * i), factors))


@jit
def _merge(problem: int, into: int, state: int, rows: int) -> None:
    """Add a segment's state to that of the segments before it."""
    dim = word(problem, VALUE_DIM)
    for row in range(rows):
        maximum_at, total_at = _maxima(problem, into) + 4 * row, _totals(problem, into) + 4 * row
        mine, other = load_f32(maximum_at), load_f32(_maxima(problem, state) + 4 * row)
        larger = other if other > mine else mine
        keep, take = _exp(mine - larger), _exp(other - larger)
        other_total = load_f32(_totals(problem, state) + 4 * row)
        store_f32(maximum_at, larger)
        store_f32(total_at, load_f32(total_at) * keep + other_total * take)
        keeps, takes = splat_f32(keep), splat_f32(take)
        for i in range(dim // 8):
            at = row * dim * 4 + 32 * i
            kept = mul(load_f32x8(into + at), keeps)
            store_f32x8(into + at, fma(load_f32x8(state + at), takes, kept))


@jit
def _finish(problem: int, unit: int, state: int) -> None:
    """Divide by the sums, and write the unit's rows of the output."""
    dim, num_heads = word(problem, VALUE_DIM), word(problem, NUM_HEADS)
    group = num_heads // word(problem, NUM_KV_HEADS)
    first_head = word(unit, KV_HEAD) * group
    sinks = word(problem, SINKS)
    for row in range(word(unit, NUM_TOKENS) * group):
        head = first_head + row % group
        total = load_f32(_totals(problem, state) + 4 * row)
        factor = 1.0 / total
        if sinks:
            highest, sink = load_f32(_maxima(problem, state) + 4 * row), load_f32(sinks + 4 * head)
            larger = sink if sink > highest else highest
            keep = _exp(highest - larger)
            factor = keep / (total * keep + _exp(sink - larger))
        index = word(word(unit, FIRST_TOKEN) + row // group * TOKEN_BYTES, INDEX)
        output = word(problem, OUTPUT) + (index * num_heads + head) * dim * 4
        factors = splat_f32(factor)
        for i in range(dim // 8):
            values = load_f32x8(state + row * dim * 4 + 32 * i)
            store_f32x8(output + 32 * i, mul(values, factors))


# ---- one tile of positions ----------------------------------------------------------------


@jit
def _find_places(
    problem: int, table: int, head: int, first: int, last: int, places: int, kind: int
) -> None:
    """Note where the keys and values of some positions of a tile are, for every 8 of them."""
    key_step, value_step = _key_step(problem, kind), _value_step(problem, kind)
    block_size = word(problem, BLOCK_SIZE)
    index, offset = first // block_size, first % block_size
    for position in range(first, last, 8):
        block = load_i32(table + index * 4)
        slot = (block * word(problem, NUM_KV_HEADS) + head) * block_size + offset
        at = places + position % TILE
        store_i64(at + KEY_PLACES, word(problem, KEYS) + slot * key_step)
        store_i64(at + VALUE_PLACES, word(problem, VALUES) + slot * value_step)
        offset += 8
        if offset == block_size:
            index, offset = index + 1, 0


@inline
def _key_step(problem: int, kind: int) -> int:
    return word(problem, HEAD_DIM) * item_bytes(kind)


@inline
def _value_step(problem: int, kind: int) -> int:
    return word(problem, VALUE_STRIDE) * item_bytes(kind)


@jit
def _find_later_places(
    problem: int, unit: int, next_unit: int, token: int, tile: int, places: int, kind: int
) -> None:
    """Note where that is which is read after `tile` of the tokens before the token number `token`.

    `places` is where the places of what is read now are; the others are behind them. It is that
    tile of the next request, or the first one's next tile; behind the unit's last tile comes the
    next unit, if that is known and not 0. Blocks lie anywhere, so the CPU can't guess where they
    are. 0 is the place of nothing.
    """
    for at in range(places + LATER_PLACES, places + 2 * LATER_PLACES, 32):
        store_f32x8(at, zero_f32x8())
    store_i64(places + LATER_TABLE, 0)
    tokens, head = word(unit, FIRST_TOKEN), word(unit, KV_HEAD)
    if token == word(unit, NUM_TOKENS):
        token, tile = 0, tile + TILE
    later = tokens + token * TOKEN_BYTES
    if tile > word(later, POSITION) or tile == word(unit, LAST_SEGMENT) * SEGMENT:
        if not next_unit:
            return
        later, head = word(next_unit, FIRST_TOKEN), word(next_unit, KV_HEAD)
        first_seen = max(word(later, POSITION) - word(problem, WINDOW) + 1, 0)
        tile = max(word(next_unit, FIRST_SEGMENT) * SEGMENT, first_seen // TILE * TILE)
    last = min(tile + TILE, word(later, POSITION) + 1)
    _find_places(problem, word(later, TABLE), head, tile, last, places + LATER_PLACES, kind)
    store_i64(places + LATER_TABLE, word(later, TABLE))
    store_i64(places + LATER_HEAD, head)
    store_i64(places + LATER_FIRST, tile)
    store_i64(places + LATER_LAST, last)


@inline
def _are_later_places(places: int, table: int, head: int, first: int, last: int) -> bool:
    """Whether the places of what is read later are of these positions of a tile."""
    first_known = load_i64(places + LATER_FIRST)
    if load_i64(places + LATER_TABLE) != table or load_i64(places + LATER_HEAD) != head:
        return False
    return first_known <= first and last <= load_i64(places + LATER_LAST)


@inline
def _ask_for(places: int, at: int, num_bytes: int) -> None:
    """Ask for 8 keys or values, given how many bytes from the first on, if there are any."""
    first = load_i64(places + at)
    if first:
        for line in range(first, first + num_bytes, LINE):
            prefetch(line)


@jit
def _score_keys(
    problem: int,
    query: int,
    places: int,
    first: int,
    last: int,
    scores: int,
    rows: int,
    kind: int,
    later: int,
    later_bytes: int,
) -> None:
    """Score all rows against keys `first` to `last` of a tile, a few at a time.

    Along the way the keys at `later` are asked for, if it is not 0, a few lines at a time: a CPU
    waits where it is asked for more lines than it can keep track of (some 20).
    """
    dim, key_step = word(problem, HEAD_DIM), _key_step(problem, kind)
    row = 0
    while row < rows:
        step = min(rows - row, ROWS_AT_ONCE)
        q, s = query + row * dim * 4, scores + row * TILE * 4
        for i in range(first, last, KEYS_AT_ONCE):
            if later and row == 0 and i % 8 == 0:
                _ask_for(later, i, later_bytes)
            k = load_i64(places + (i & ~7)) + (i & 7) * key_step
            score(step, q, dim * 4, k, key_step, dim // 8, s + 4 * i, TILE * 4, kind)
        row += step
    if later:
        for i in range(last, TILE, 8):
            _ask_for(later, i, later_bytes)


@jit
def _weigh_values(
    problem: int,
    weights: int,
    places: int,
    first: int,
    last: int,
    output: int,
    rows: int,
    kind: int,
    step: int,
    later: int,
) -> None:
    """Add weighted values `first` to `last` of a tile to all rows, some components at a time.

    Values lie `step` bytes apart. Along the way those at `later` are asked for, if it is not 0.
    """
    dim, column = word(problem, VALUE_DIM), 0
    while column < dim:
        offset, left, row = column * item_bytes(kind), dim - column, 0
        while row < rows:
            count = min(rows - row, ROWS_AT_ONCE)
            w, out = weights + row * TILE * 4, output + (row * dim + column) * 4
            ask = 0 if row else later
            if left >= COLUMNS_AT_ONCE:
                weigh(count, w, places, offset, step, first, last, out, dim * 4, ask, kind)
            elif left >= 32:
                weigh_32(count, w, places, offset, step, first, last, out, dim * 4, ask, kind)
            else:
                weigh_8(count, w, places, offset, step, first, last, out, dim * 4, ask, kind)
            row += count
        column += COLUMNS_AT_ONCE if left >= COLUMNS_AT_ONCE else 32 if left >= 32 else 8


@jit
def _copy_rows(source: int, source_step: int, target: int, dim: int, kind: int) -> None:
    """Convert 8 rows of a cache to float32 rows side by side."""
    for row in range(8):
        for i in range(0, dim, 8):
            numbers = load_kv(source + row * source_step + i * item_bytes(kind), kind)
            store_f32x8(target + (row * dim + i) * 4, numbers)


@jit
def _copy_tile(problem: int, places: int, first: int, last: int, copies: int, kind: int) -> None:
    """Convert keys and values of a tile to float32, and note that as their places.

    Along the way the later ones are asked for.
    """
    dim, value_dim = word(problem, HEAD_DIM), word(problem, VALUE_DIM)
    key_step, value_step = _key_step(problem, kind), _value_step(problem, kind)
    later = places + LATER_PLACES
    for i in range(first, last, 8):
        at, target = places + i, copies + i * dim * 4
        _ask_for(later + KEY_PLACES, i, 8 * key_step)
        _copy_rows(load_i64(at + KEY_PLACES), key_step, target, dim, kind)
        store_i64(at + KEY_PLACES, target)
        target = copies + (TILE * dim + i * value_dim) * 4
        _ask_for(later + VALUE_PLACES, i, 8 * value_step)
        _copy_rows(load_i64(at + VALUE_PLACES), value_step, target, value_dim, kind)
        store_i64(at + VALUE_PLACES, target)


@jit
def _copy_scales(problem: int, places: int, first: int, last: int, copies: int, kind: int) -> None:
    """Bring the scales of keys and values of a tile together."""
    key_step = _key_step(problem, kind)
    for i in range(first, last, 8):
        slot = (load_i64(places + i + KEY_PLACES) - word(problem, KEYS)) // key_step
        store_f32x8(copies + 4 * i, load_f32x8(word(problem, KEY_SCALE) + 4 * slot))
        scales = load_f32x8(word(problem, VALUE_SCALE) + 4 * slot)
        store_f32x8(copies + 4 * (TILE + i), scales)


@jit
def _soften(
    problem: int, scores: int, first: int, last: int, state: int, row: int, scales: int
) -> None:
    """Turn a row's scores of the positions that it sees into weights, and bring its state along.

    `first` and `last` count from the start of the tile; scales of values go into the weights.
    What lies beside the scores that were computed is read as well, and dropped.
    """
    scale, soft_cap = splat_f32x16(load_f32(problem + SCALE)), load_f32(problem + SOFT_CAP)
    highest = splat_f32x16(EMPTY_MAXIMUM)
    for at in range(first & ~15, last, 16):
        score = load_f32x16(scores + 4 * at)
        if scales:
            score = mul(score, load_f32x16(scales + 4 * at))
        score = mul(score, scale)
        if soft_cap > 0:
            score = _cap(score, soft_cap)
        if at < first or at + 16 > last:
            score = keep_lanes(score, first - at, last - at)
        store_f32x16(scores + 4 * at, score)
        highest = maximum(highest, score)
    maximum_at, total_at = _maxima(problem, state) + 4 * row, _totals(problem, state) + 4 * row
    before, after = load_f32(maximum_at), hmax_f32x16(highest)
    if before > after:
        after = before
    shift, total = splat_f32x16(after), zero_f32x8()
    for at in range(first & ~15, last, 16):
        weight = exp(sub(load_f32x16(scores + 4 * at), shift))
        total = add(add(total, low_half(weight)), high_half(weight))
        if scales:
            weight = mul(weight, load_f32x16(scales + (TILE + at) * 4))
        store_f32x16(scores + 4 * at, weight)
    keep = _exp(before - after)
    store_f32(maximum_at, after)
    store_f32(total_at, load_f32(total_at) * keep + hsum(total))
    if keep != 1.0:
        dim = word(problem, VALUE_DIM)
        _rescale(state + row * dim * 4, keep, dim)


@inline
def _cap(score: object, soft_cap: float) -> object:
    """``soft_cap * tanh(score / soft_cap)``, as 1 - 2 / (exp(2 x) + 1)."""
    one, two = splat_f32x16(1.0), splat_f32x16(2.0)
    doubled = mul(score, splat_f32x16(2.0 / soft_cap))
    return mul(splat_f32x16(soft_cap), sub(one, div(two, add(exp(doubled), one))))


@jit
def _attend_tile(
    problem: int,
    unit: int,
    next_unit: int,
    tile: int,
    query: int,
    state: int,
    scratch: int,
    kind: int,
) -> None:
    """Bring the state of a unit's rows over one tile of positions."""
    tokens, num_tokens = word(unit, FIRST_TOKEN), word(unit, NUM_TOKENS)
    first = 0
    while first < num_tokens:
        last = first + 1
        while last < num_tokens and word(tokens + last * TOKEN_BYTES, SHARED) >= tile + TILE:
            last += 1
        _attend_shared(problem, unit, next_unit, first, last, tile, query, state, scratch, kind)
        first = last


@jit
def _attend_shared(
    problem: int,
    unit: int,
    next_unit: int,
    first_token: int,
    last_token: int,
    tile: int,
    query: int,
    state: int,
    scratch: int,
    kind: int,
) -> None:
    """Do it for some of its tokens, which have the tile's keys in common."""
    group = word(problem, NUM_HEADS) // word(problem, NUM_KV_HEADS)
    dim, value_dim = word(problem, HEAD_DIM), word(problem, VALUE_DIM)
    window = word(problem, WINDOW)
    tokens = word(unit, FIRST_TOKEN) + first_token * TOKEN_BYTES
    num_tokens, first_row = last_token - first_token, first_token * group
    rows = num_tokens * group
    lowest_position, highest_position = positions(tokens, num_tokens)
    first, last = max(tile, lowest_position - window + 1), min(tile + TILE, highest_position + 1)
    if first >= last:
        return
    # Whole vectors of 8 positions are scored: of the same block, and dropped again.
    whole_first, whole_last = first & ~7, (last + 7) & ~7
    table, head = word(tokens, TABLE), word(unit, KV_HEAD)
    places, later = scratch, scratch + LATER_PLACES
    if _are_later_places(places, table, head, whole_first, last):
        for at in range(places, places + LATER_PLACES, 32):
            store_f32x8(at, load_f32x8(at + LATER_PLACES))
    else:
        _find_places(problem, table, head, whole_first, whole_last, places, kind)
    _find_later_places(problem, unit, next_unit, last_token, tile, places, kind)
    whole_first, whole_last = whole_first - tile, whole_last - tile
    scales, scores = 0, scratch + PLACES_BYTES + 2 * TILE * 4
    if word(problem, KEY_SCALE):
        scales = scratch + PLACES_BYTES
        _copy_scales(problem, places, whole_first, whole_last, scales, kind)
    gathered = rows > GATHERED_ROWS
    query += first_row * dim * 4
    if gathered:
        copies = scores + word(problem, MAX_ROWS) * TILE * 4
        _copy_tile(problem, places, whole_first, whole_last, copies, kind)
        _score_keys(
            problem,
            query,
            places + KEY_PLACES,
            whole_first,
            whole_last,
            scores,
            rows,
            F32,
            0,
            0,
        )
    else:
        later_bytes = 8 * _key_step(problem, kind)
        _score_keys(
            problem,
            query,
            places + KEY_PLACES,
            whole_first,
            whole_last,
            scores,
            rows,
            kind,
            later + KEY_PLACES,
            later_bytes,
        )
    for row in range(rows):
        own = word(tokens + row // group * TOKEN_BYTES, POSITION)
        row_first, row_last = max(first, own - window + 1) - tile, min(last, own + 1) - tile
        if row_first < row_last:
            at = scores + row * TILE * 4
            _soften(problem, at, row_first, row_last, state, first_row + row, scales)
    # Rows of a token see the same positions; where all tokens do, all rows go together.
    together = lowest_position + 1 >= last and highest_position - window + 1 <= first
    step = num_tokens if together else 1
    for token in range(0, num_tokens, step):
        own = word(tokens + token * TOKEN_BYTES, POSITION)
        seen_first, seen_last = max(first, own - window + 1) - tile, min(last, own + 1) - tile
        if together:
            seen_first, seen_last = first - tile, last - tile
        if seen_first >= seen_last:
            continue
        weights = scores + token * group * TILE * 4
        output = state + (first_row + token * group) * value_dim * 4
        if gathered:
            _weigh_values(
                problem,
                weights,
                places + VALUE_PLACES,
                seen_first,
                seen_last,
                output,
                step * group,
                F32,
                4 * value_dim,
                0,
            )
        else:
            _weigh_values(
                problem,
                weights,
                places + VALUE_PLACES,
                seen_first,
                seen_last,
                output,
                step * group,
                kind,
                _value_step(problem, kind),
                later + VALUE_PLACES,
            )


# ---- units --------------------------------------------------------------------------------


@jit
def _copy_queries(problem: int, unit: int, copies: int) -> int:
    """Return where the unit's rows lie one after the other: a single token's do already."""
    num_heads, dim = word(problem, NUM_HEADS), word(problem, HEAD_DIM)
    group = num_heads // word(problem, NUM_KV_HEADS)
    tokens, num_tokens = word(unit, FIRST_TOKEN), word(unit, NUM_TOKENS)
    for token in range(num_tokens):
        first_head = word(tokens + token * TOKEN_BYTES, INDEX) * num_heads
        first_head += word(unit, KV_HEAD) * group
        query = word(problem, QUERY) + first_head * dim * 4
        if num_tokens == 1:
            return query
        for i in range(group * dim // 8):
            numbers = load_f32x8(query + 32 * i)
            store_f32x8(copies + token * group * dim * 4 + 32 * i, numbers)
    return copies


@jit
def _attend_unit(problem: int, index: int, next_index: int, scratch: int, kind: int) -> None:
    """Compute a unit, and ask for what the next one reads first, if that is known and not 0."""
    unit = word(problem, UNITS) + index * UNIT_BYTES
    next_unit = word(problem, UNITS) + next_index * UNIT_BYTES if next_index else 0
    rows = word(unit, NUM_TOKENS) * word(problem, NUM_HEADS) // word(problem, NUM_KV_HEADS)
    merged, tiles = scratch, _tiles(problem, scratch)
    state = merged + _state_bytes(problem)
    queries = state + _state_bytes(problem)
    query = _copy_queries(problem, unit, queries)
    first, last = word(unit, FIRST_SEGMENT), word(unit, LAST_SEGMENT)
    split = word(problem, IS_SPLIT)
    if split:
        state = word(problem, PARTIALS) + index * _state_bytes(problem)
    elif last - first > 1:
        _clear(problem, merged, rows)
    for segment in range(first, last):
        _clear(problem, state, rows)
        for tile in range(segment * SEGMENT, segment * SEGMENT + SEGMENT, TILE):
            _attend_tile(problem, unit, next_unit, tile, query, state, tiles, kind)
        if last - first > 1:
            _merge(problem, merged, state, rows)
    if not split:
        _finish(problem, unit, merged if last - first > 1 else state)


@jit
def _merge_task(problem: int, index: int, scratch: int) -> None:
    """Merge the partial results of the task that begins with a unit, if one does."""
    unit = word(problem, UNITS) + index * UNIT_BYTES
    task = word(unit, TASK)
    if index > 0 and word(unit - UNIT_BYTES, TASK) == task:
        return
    rows = word(unit, NUM_TOKENS) * word(problem, NUM_HEADS) // word(problem, NUM_KV_HEADS)
    _clear(problem, scratch, rows)
    at = index
    while at < word(problem, NUM_UNITS):
        if word(word(problem, UNITS) + at * UNIT_BYTES, TASK) != task:
            break
        _merge(problem, scratch, word(problem, PARTIALS) + at * _state_bytes(problem), rows)
        at += 1
    _finish(problem, unit, scratch)


@jit
def attend(thread: int, problem: int, kind: int) -> None:
    """Do this thread's part of a step's attention; a barrier has to follow.

    Args:
        thread: Whose part.
        problem: Address of the words `QUERY` to `IS_SPLIT`, planned.
        kind: Type of the caches, see `octavo_kernels.cpu.kv_types`.
    """
    num_units = word(problem, NUM_UNITS)
    scratch = word(problem, SCRATCH) + rank(thread) * word(problem, SCRATCH_BYTES)
    # What the memory says of later places may be of another layer, or of another use of it.
    store_i64(_tiles(problem, scratch) + LATER_TABLE, 0)
    enough = UNITS_TO_TAKE_AHEAD * num_threads(thread)
    is_ahead = num_units >= enough
    # All heads of some tokens lie side by side, so one thread should read them.
    step = word(problem, NUM_KV_HEADS)
    if num_units < enough * step:
        step = 1
    first = next_chunk(thread) * step
    while first < num_units:
        following = next_chunk(thread) * step if is_ahead else 0
        last = min(first + step, num_units)
        for index in range(first, last):
            next_index = index + 1 if index + 1 < last else following
            next_index = next_index if next_index < num_units else 0
            _attend_unit(problem, index, next_index, scratch, kind)
        first = following if is_ahead else next_chunk(thread) * step
    if word(problem, IS_SPLIT):
        barrier(thread)
        index = next_chunk(thread)
        while index < num_units:
            _merge_task(problem, index, scratch)
            index = next_chunk(thread)


@jit
def attend_f32(thread: int, problem: int) -> None:
    attend(thread, problem, F32)


@jit
def attend_bf16(thread: int, problem: int) -> None:
    attend(thread, problem, BF16)


@jit
def attend_f16(thread: int, problem: int) -> None:
    attend(thread, problem, F16)


@jit
def attend_int8(thread: int, problem: int) -> None:
    attend(thread, problem, INT8)


@jit
def attend_e4m3(thread: int, problem: int) -> None:
    attend(thread, problem, E4M3)


@jit
def attend_e5m2(thread: int, problem: int) -> None:
    attend(thread, problem, E5M2)
