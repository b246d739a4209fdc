"""From logits to tokens: temperature, min-p, top-k, top-p and noise, without sorting.

Every filter keeps a *prefix* of the tokens in the order of falling logits, ties by id. A
prefix is a pair: tokens above the floor are kept, and of those that equal it, ids up to the
last. Where a prefix ends is found by bisection over logits: one pass over the vocabulary
counts the tokens above a value and adds up their probabilities, which takes 4 us for 49,152
tokens, until few tokens are left to be sorted.
"""

from __future__ import annotations

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.lanes import (
    NEGATIVE_INFINITY,
    at_least,
    count_at_least,
    count_greater_than,
    gumbel,
    keep_at_least,
    keep_bits,
    log,
    lowest,
    lowest_bit,
    uniform,
)
from octavo_kernels.cpu.simd import (
    add,
    div,
    exp,
    first_lane,
    hmax,
    hsum,
    hsum_i32,
    load_f32,
    load_f32x8,
    load_i32,
    load_i64,
    maximum,
    mul,
    splat_f32,
    store_f32,
    store_f32x8,
    store_i32,
    store_i64,
    sub,
    zero_f32x8,
    zero_i32x8,
)
from octavo_kernels.cpu.team import next_chunk, rank

# Byte offsets of the words of a call.
LOGITS, ROW_STRIDE, NUM_ROWS, VOCAB_SIZE, TOKENS = range(0, 40, 8)
TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, SEEDS, POSITIONS = range(40, 88, 8)
SCRATCH, SCRATCH_BYTES = range(88, 104, 8)

ANY_ID = 1 << 40
LOWEST = -3.0e38
"""Below all that is not minus infinity."""

MAX_SORTED = 64
"""Bisection ends when no more tokens than this are between its two ends."""

BLOCK_VECTORS = 64
"""Sums are float32 for so many vectors, and float64 over them."""

OUT_OF_REACH = 25.1
"""A token so far below the best can't win: noise lies between -2.82 and 22.19."""

# SplitMix64, see `octavo_kernels.sample_noise`; as signed numbers with the same bits.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


@inline
def _word(problem: int, offset: int) -> int:
    return load_i64(problem + offset)


@inline
def _f32(x: float) -> float:
    """Round to float32: Python's arithmetic on them is float64."""
    return first_lane(splat_f32(x))


@jit
def argmax(row: int, count: int) -> int:
    """Index of the largest of `count` numbers, the first of equals; NaN is never chosen."""
    best = lowest()
    whole = count & ~7
    for i in range(0, whole, 8):
        best = maximum(load_f32x8(row + 4 * i), best)
    highest = hmax(best)
    for i in range(whole, count):
        x = load_f32(row + 4 * i)
        if x > highest:
            highest = x
    wanted = splat_f32(highest)
    for i in range(0, whole, 8):
        bits = at_least(load_f32x8(row + 4 * i), wanted)
        if bits:
            return i + lowest_bit(bits)
    for i in range(whole, count):
        if load_f32(row + 4 * i) >= highest:
            return i
    return 0


@jit
def scale_row(row: int, count: int, divisor: float, target: int) -> float:
    """Divide, fill up to whole vectors with minus infinity, and return the largest."""
    divisors, best = splat_f32(divisor), lowest()
    whole = count & ~7
    for i in range(0, whole, 8):
        x = div(load_f32x8(row + 4 * i), divisors)
        store_f32x8(target + 4 * i, x)
        best = maximum(x, best)
    if whole < count:
        store_f32x8(target + 4 * whole, lowest())
        for i in range(whole, count):
            store_f32(target + 4 * i, load_f32(row + 4 * i) / divisor)
        best = maximum(load_f32x8(target + 4 * whole), best)
    return hmax(best)


@jit
def weigh_row(
    row: int, count: int, highest: float, floor: float, last_id: int, target: int
) -> float:
    """Exponentials of the logits less the largest, 0 outside of a prefix; return their sum."""
    shift, floors, total = splat_f32(highest), splat_f32(floor), 0.0
    for start in range(0, count, 8 * BLOCK_VECTORS):
        part = zero_f32x8()
        for i in range(start, min(start + 8 * BLOCK_VECTORS, count), 8):
            x = load_f32x8(row + 4 * i)
            weight = keep_at_least(exp(sub(x, shift)), x, floors)
            store_f32x8(target + 4 * i, weight)
            part = add(part, weight)
        total += hsum(part)
    if last_id < count:
        for i in range(last_id + 1, count):
            if load_f32(row + 4 * i) == floor:
                total -= load_f32(target + 4 * i)
                store_f32(target + 4 * i, 0.0)
    return total


@jit
def count_above(row: int, count: int, value: float) -> int:
    """How many numbers are at least `value`."""
    values, found = splat_f32(value), zero_i32x8()
    for i in range(0, count, 8):
        found = count_at_least(found, load_f32x8(row + 4 * i), values)
    return int(hsum_i32(found))


@jit
def count_greater(row: int, count: int, value: float) -> int:
    """How many numbers are greater than `value`."""
    values, found = splat_f32(value), zero_i32x8()
    for i in range(0, count, 8):
        found = count_greater_than(found, load_f32x8(row + 4 * i), values)
    return int(hsum_i32(found))


@jit
def weight_above(row: int, weights: int, count: int, value: float) -> float:
    """Sum of the weights of the numbers that are at least `value`."""
    values, total = splat_f32(value), 0.0
    for start in range(0, count, 8 * BLOCK_VECTORS):
        part = zero_f32x8()
        for i in range(start, min(start + 8 * BLOCK_VECTORS, count), 8):
            weight = load_f32x8(weights + 4 * i)
            part = add(part, keep_at_least(weight, load_f32x8(row + 4 * i), values))
        total += hsum(part)
    return total


@jit
def _amount(row: int, weights: int, count: int, value: float) -> float:
    """Weight, or number where there are no weights, of what is at least `value`."""
    if weights:
        return weight_above(row, weights, count, value)
    return float(count_above(row, count, value))


@jit
def find_prefix(
    row: int, weights: int, count: int, highest: float, enough: float, sorted_at: int, prefix: int
) -> None:
    """Find the shortest prefix whose weight (or number of tokens) reaches `enough`.

    Args:
        row: ``[count]`` float32, `count` a multiple of 8.
        weights: ``[count]`` float32, 0 for what may not be kept; or 0 to count tokens.
        count: Numbers in the row.
        highest: The largest of them.
        enough: What has to be reached; if all of them don't, nothing is written.
        sorted_at: Room for ``2 * MAX_SORTED`` words of 4 bytes.
        prefix: Where to write the floor (float32) and, 8 bytes on, the last id (int64).
    """
    # Amounts of what is at least `low`: enough; at least `high`: not enough.
    low, high = highest, highest
    step, none_above = 1.0, True
    while _amount(row, weights, count, low) < enough:
        if low <= LOWEST:
            return
        high, none_above = low, False
        # What is 128 below the largest has no weight.
        low = LOWEST if weights and step > 128 else max(_f32(highest - step), LOWEST)
        step *= 2.0
    if none_above:
        _walk(row, weights, count, low, 0.0, enough, prefix)
        return
    while count_above(row, count, low) - count_above(row, count, high) > MAX_SORTED:
        # Neighbours have nothing between them, and then all below `high` are equal.
        middle = _f32(low + (high - low) * 0.5)
        if middle <= low or middle >= high:
            break
        if _amount(row, weights, count, middle) < enough:
            high = middle
        else:
            low = middle
    above = _amount(row, weights, count, high)
    _sort_between(row, count, low, high, sorted_at)
    at = 0
    store_f32(prefix, high)
    store_i64(prefix + 8, ANY_ID)
    num_sorted = load_i32(sorted_at)
    if num_sorted > MAX_SORTED:
        _walk(row, weights, count, low, above, enough, prefix)
        return
    while at < num_sorted and above < enough:
        token = load_i32(sorted_at + 4 + 4 * at)
        above += load_f32(weights + 4 * token) if weights else 1.0
        store_f32(prefix, load_f32(row + 4 * token))
        store_i64(prefix + 8, token)
        at += 1


@jit
def _walk(
    row: int, weights: int, count: int, value: float, above: float, enough: float, prefix: int
) -> None:
    """End a prefix among many equal numbers: the lowest ids first."""
    store_f32(prefix, value)
    for token in range(count):
        if load_f32(row + 4 * token) == value:
            above += load_f32(weights + 4 * token) if weights else 1.0
            store_i64(prefix + 8, token)
            if above >= enough:
                return


@jit
def _sort_between(row: int, count: int, low: float, high: float, target: int) -> None:
    """Write the number of tokens from `low` to below `high`, and their ids in order.

    Of more than `MAX_SORTED` only the number is written.
    """
    lows, found = splat_f32(low), 0
    for i in range(0, count, 8):
        bits = at_least(load_f32x8(row + 4 * i), lows)
        while bits:
            token = i + lowest_bit(bits)
            bits &= bits - 1
            x = load_f32(row + 4 * token)
            if x >= high:
                continue
            if found == MAX_SORTED:
                store_i32(target, found + 1)
                return
            at = found
            while at > 0 and load_f32(row + 4 * load_i32(target + 4 * at)) < x:
                store_i32(target + 4 + 4 * at, load_i32(target + 4 * at))
                at -= 1
            store_i32(target + 4 + 4 * at, token)
            found += 1
    store_i32(target, found)


@jit
def _filter(
    row: int, weights: int, count: int, highest: float, top_k: int, top_p: float,
    log_min_p: float, sorted_at: int, prefix: int,
) -> None:  # fmt: skip
    """Write the prefix that min-p, top-k and top-p leave, in this order."""
    store_f32(prefix, max(highest + log_min_p, LOWEST))
    store_i64(prefix + 8, ANY_ID)
    if 0 < top_k < count and count_above(row, count, load_f32(prefix)) > top_k:
        find_prefix(row, 0, count, highest, float(top_k), sorted_at, prefix)
    if top_p < 1:
        floor, last_id = load_f32(prefix), load_i64(prefix + 8)
        total = weigh_row(row, count, highest, floor, last_id, weights)
        find_prefix(row, weights, count, highest, top_p * total, sorted_at, prefix)


@inline
def _shift_right(x: int, bits: int) -> int:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@inline
def _mix64(x: int) -> int:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


@jit
def _noisiest(row: int, count: int, highest: float, prefix: int, key: int) -> int:
    """Index of the largest sum of a kept logit and its noise.

    Noise is at most ``-log(u)``, so a token beats the best sum so far only if `u` is below
    ``exp(logit - best)``: one exponential tells that nearly all need no logarithm. The best
    begins with the likeliest token's, so that it is high from the start.
    """
    floor, last_id = load_f32(prefix), load_i64(prefix + 8)
    reach = highest - OUT_OF_REACH
    if floor < reach:
        floor, last_id = reach, ANY_ID
    floors, token = splat_f32(floor), argmax(row, count)
    start = token & ~7
    noisy = add(load_f32x8(row + 4 * start), gumbel(uniform(start, key)))
    best = hmax(keep_bits(noisy, 1 << (token - start)))
    # What the rounding of a sum may add: half a unit in the last place of the logit.
    slack = splat_f32(1.001 + abs(highest) * 2.0**-22)
    for i in range(0, count, 8):
        x = load_f32x8(row + 4 * i)
        bits = at_least(x, floors)
        if bits == 0:
            continue
        drawn = uniform(i, key)
        bits &= at_least(mul(exp(sub(x, splat_f32(best))), slack), drawn)
        if bits == 0:
            continue
        if i + 7 > last_id:
            bits = _without_late_ties(row, i, bits, floor, last_id)
        noisy = keep_bits(add(x, gumbel(drawn)), bits)
        largest = hmax(noisy)
        if largest > best or (largest == best and i < token):
            best = largest
            token = i + lowest_bit(at_least(noisy, splat_f32(largest)))
    return token


@jit
def _without_late_ties(row: int, first: int, bits: int, floor: float, last_id: int) -> int:
    for lane in range(8):
        if first + lane > last_id and load_f32(row + 4 * (first + lane)) == floor:
            bits &= ~(1 << lane)
    return bits


@jit
def _sample_row(problem: int, row: int, scratch: int) -> int:
    count = _word(problem, VOCAB_SIZE)
    logits = _word(problem, LOGITS) + row * _word(problem, ROW_STRIDE)
    temperature = load_f32(_word(problem, TEMPERATURE) + 4 * row)
    if not temperature > 0:
        return argmax(logits, count)
    padded = (count + 7) & ~7
    prefix, sorted_at, scaled = scratch, scratch + 64, scratch + 64 + 8 * MAX_SORTED
    weights = scaled + 4 * padded
    highest = scale_row(logits, count, temperature, scaled)
    if not highest > LOWEST:
        return 0
    top_k = load_i32(_word(problem, TOP_K) + 4 * row)
    top_p = load_f32(_word(problem, TOP_P) + 4 * row)
    log_min_p = load_f32(_word(problem, LOG_MIN_P) + 4 * row)
    if top_k >= count:
        top_k = 0
    _filter(scaled, weights, padded, highest, top_k, top_p, log_min_p, sorted_at, prefix)
    seed = load_i64(_word(problem, SEEDS) + 8 * row)
    position = load_i64(_word(problem, POSITIONS) + 8 * row)
    key = _mix64(_mix64(seed) + position * GOLDEN)
    return _noisiest(scaled, padded, highest, prefix, key)


@jit
def sample_rows(thread: int, problem: int) -> None:
    """Do this thread's part of a step's sampling, a row at a time; a barrier has to follow."""
    scratch = _word(problem, SCRATCH) + rank(thread) * _word(problem, SCRATCH_BYTES)
    row = next_chunk(thread)
    while row < _word(problem, NUM_ROWS):
        store_i64(_word(problem, TOKENS) + 8 * row, _sample_row(problem, row, scratch))
        row = next_chunk(thread)


# ---- log-probabilities -----------------------------------------------------------------------

# Byte offsets of the words of a call, after `VOCAB_SIZE` of the one above. `TOKENS` are given.
NUM_TOP, SAMPLED, RANKS, TOP_IDS, TOP_VALUES = range(40, 80, 8)


@jit
def log_total(row: int, count: int, highest: float) -> float:
    """Logarithm of the sum of the exponentials of ``[count]`` logits less the largest."""
    shift, total = splat_f32(highest), 0.0
    whole = count & ~7
    for start in range(0, whole, 8 * BLOCK_VECTORS):
        part = zero_f32x8()
        for i in range(start, min(start + 8 * BLOCK_VECTORS, whole), 8):
            part = add(part, exp(sub(load_f32x8(row + 4 * i), shift)))
        total += hsum(part)
    for i in range(whole, count):
        total += first_lane(exp(splat_f32(load_f32(row + 4 * i) - highest)))
    return first_lane(log(splat_f32(total)))


@jit
def _logprobs_row(problem: int, row: int, scratch: int) -> None:
    count, num_top = _word(problem, VOCAB_SIZE), _word(problem, NUM_TOP)
    logits = _word(problem, LOGITS) + row * _word(problem, ROW_STRIDE)
    padded = (count + 7) & ~7
    prefix, sorted_at, copied = scratch, scratch + 64, scratch + 64 + 8 * MAX_SORTED
    highest = scale_row(logits, count, 1.0, copied)
    shift = highest + log_total(copied, padded, highest)
    sampled = load_f32(logits + 4 * load_i64(_word(problem, TOKENS) + 8 * row))
    store_f32(_word(problem, SAMPLED) + 4 * row, sampled - shift)
    store_i64(_word(problem, RANKS) + 8 * row, count_greater(copied, padded, sampled) + 1)
    if num_top == 0:
        return
    store_f32(prefix, LOWEST)
    store_i64(prefix + 8, ANY_ID)
    find_prefix(copied, 0, padded, highest, float(num_top), sorted_at, prefix)
    _write_top(problem, row, copied, padded, shift, prefix)


@jit
def _write_top(problem: int, row: int, logits: int, count: int, shift: float, prefix: int) -> None:
    """Write a prefix in order, filled up with what is minus infinity."""
    num_top = _word(problem, NUM_TOP)
    ids = _word(problem, TOP_IDS) + 8 * num_top * row
    values = _word(problem, TOP_VALUES) + 4 * num_top * row
    floor, last_id = load_f32(prefix), load_i64(prefix + 8)
    floors, found = splat_f32(floor), 0
    for i in range(0, count, 8):
        bits = at_least(load_f32x8(logits + 4 * i), floors)
        while bits:
            token = i + lowest_bit(bits)
            bits &= bits - 1
            x = load_f32(logits + 4 * token)
            if (x == floor and token > last_id) or found == num_top:
                continue
            at = found
            while at > 0 and load_f32(values + 4 * at - 4) < x - shift:
                store_i64(ids + 8 * at, load_i64(ids + 8 * at - 8))
                store_f32(values + 4 * at, load_f32(values + 4 * at - 4))
                at -= 1
            store_i64(ids + 8 * at, token)
            store_f32(values + 4 * at, x - shift)
            found += 1
    token = 0
    while found < num_top:
        if not load_f32(logits + 4 * token) >= LOWEST:
            store_i64(ids + 8 * found, token)
            store_f32(values + 4 * found, NEGATIVE_INFINITY)
            found += 1
        token += 1


@jit
def logprobs_rows(thread: int, problem: int) -> None:
    """Do this thread's part of a step's log-probabilities; a barrier has to follow."""
    scratch = _word(problem, SCRATCH) + rank(thread) * _word(problem, SCRATCH_BYTES)
    row = next_chunk(thread)
    while row < _word(problem, NUM_ROWS):
        _logprobs_row(problem, row, scratch)
        row = next_chunk(thread)
