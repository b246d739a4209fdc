"""The two products of attention, in tiles of registers.

Scores: a few query rows times some keys; each dot product is 8 partial sums, lane by lane
along the head, and one tree over them. Registers of 16 lanes hold the sums of two keys.
Weighted sums: a few query rows times some components of the values, position by position.
Neither order depends on how many rows, keys or lanes a tile has, which is why a query's
result is the same in every batch and on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo_kernels.cpu.kv_types import bytes_of, emit_load, emit_load_pair
from octavo_kernels.cpu.simd import (
    F32,
    I32,
    I64,
    MOST_LANES,
    call,
    constant,
    emit_prefetch,
    f32x8,
    load,
    splat,
    store,
)

ROWS_AT_ONCE = 3 if MOST_LANES == 8 else 4
"""Query rows of a tile: 3 x 4 sums and 3 + 1 operands just fit 16 registers. With 32 registers a
group of 4 heads is done at once."""

TILE = 64
"""Positions of a tile: its keys and values of a head of 64 in float32 are 16 KiB each."""

LINE = 64
"""Bytes of a cache line."""

VECTORS = 4
"""Vectors of sums for each row."""

KEYS_AT_ONCE = VECTORS * MOST_LANES // 8
COLUMNS_AT_ONCE = VECTORS * MOST_LANES


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return call(builder, f"llvm.fma.v{z.type.count}f32", z.type, x, y, z)


def _pair_sums(builder: Any, x: Any, y: Any) -> Any:
    """Sums of neighbouring lanes, those of `x` and of `y` side by side in each four."""
    lanes = x.type.count
    even = [lane for four in range(0, lanes, 4) for lane in _from_both(four, lanes)]
    odd = [lane + 1 for lane in even]
    return builder.fadd(
        builder.shuffle_vector(x, y, constant(I32, lanes, even)),
        builder.shuffle_vector(x, y, constant(I32, lanes, odd)),
    )


def _from_both(four: int, lanes: int) -> list[int]:
    return [four, four + 2, lanes + four, lanes + four + 2]


def _sum_each(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Sums over each 8 lanes of four vectors, in the time of two: first of all first lanes."""
    fours = _pair_sums(builder, _pair_sums(builder, a, b), _pair_sums(builder, c, d))
    low = [lane for lane in range(fours.type.count) if lane % 8 < 4]
    high = [lane + 4 for lane in low]
    return builder.fadd(
        builder.shuffle_vector(fours, fours, constant(I32, len(low), low)),
        builder.shuffle_vector(fours, fours, constant(I32, len(high), high)),
    )


def _offset(builder: Any, where: Any, stride: Any, count: int) -> Any:
    return builder.add(where, builder.mul(stride, I64(count))) if count else where


def _sums(builder: Any, count: int, lanes: int) -> list[Any]:
    """Accumulators; LLVM keeps them in registers."""
    zeros = constant(F32, lanes, 0.0)
    found = [cgutils.alloca_once(builder, zeros.type) for _ in range(count)]
    for one in found:
        builder.store(zeros, one)
    return found


def _load_query(builder: Any, where: Any) -> Any:
    """8 numbers, in both halves of 16 lanes."""
    numbers = load(builder, where, f32x8.ir)
    lanes = [lane % 8 for lane in range(MOST_LANES)]
    return builder.shuffle_vector(numbers, numbers, constant(I32, MOST_LANES, lanes))


def _load_keys(builder: Any, keys: list[Any], offset: Any, kind: Any) -> Any:
    """8 numbers of one key, or of each of two."""
    places = [builder.add(key, offset) for key in keys]
    if len(places) == 1:
        return emit_load(builder, places[0], kind)
    return emit_load_pair(builder, places[0], places[1], kind)


def _each_count(builder: Any, count: Any, most: int, emit: Callable[[int], None]) -> None:
    """Emit a tile for each number of rows from 1 to `most`, and have `count` choose."""
    end = builder.append_basic_block("rows_end")
    choice = builder.switch(count, end)
    for rows in range(1, most + 1):
        block = builder.append_basic_block(f"rows_{rows}")
        choice.add_case(I64(rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(end)
    builder.position_at_end(end)


def _emit_score(builder: Any, rows: int, values: Sequence[Any], kind: Any) -> None:
    query, query_stride, key, key_stride, num_vectors, scores, scores_stride = values
    queries = [_offset(builder, query, query_stride, row) for row in range(rows)]
    keys = [_offset(builder, key, key_stride, i) for i in range(KEYS_AT_ONCE)]
    sums = _sums(builder, rows * VECTORS, MOST_LANES)
    with cgutils.for_range(builder, num_vectors) as loop:
        at = builder.mul(loop.index, I64(4 * 8))
        at_key = builder.mul(loop.index, I64(8 * bytes_of(kind)))
        q = [_load_query(builder, builder.add(one, at)) for one in queries]
        for i in range(VECTORS):
            k = _load_keys(builder, keys[i::VECTORS], at_key, kind)
            for row in range(rows):
                total = sums[row * VECTORS + i]
                builder.store(_fma(builder, q[row], k, builder.load(total)), total)
    for row in range(rows):
        four = [builder.load(total) for total in sums[row * VECTORS : (row + 1) * VECTORS]]
        store(builder, _offset(builder, scores, scores_stride, row), _sum_each(builder, *four))


@intrinsic  # type: ignore[untyped-decorator]
def score(
    _typing: Any, rows: Any, q: Any, qs: Any, k: Any, ks: Any, n: Any, s: Any, ss: Any, kind: Any
) -> Any:
    """Score 1 to `ROWS_AT_ONCE` queries against `KEYS_AT_ONCE` keys.

    ``(rows, query, query_stride, key, key_stride, num_vectors, scores, scores_stride, kind)``:
    strides in bytes, float32 queries, `num_vectors` times 8 numbers in a head; `KEYS_AT_ONCE`
    scores are written for each row.
    """

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> None:
        def emit(rows: int) -> None:
            _emit_score(builder, rows, values[1:8], signature.args[8])

        _each_count(builder, values[0], ROWS_AT_ONCE, emit)

    return types.void(*[types.int64] * 8, kind), generate


def _ask_for(builder: Any, place: Any, offset: Any, num_bytes: int) -> None:
    """Ask for some bytes of what is `offset` bytes from a place on, unless that is 0."""
    first = load(builder, place, I64)
    with builder.if_then(builder.icmp_signed("!=", first, I64(0))):
        for line in range(0, num_bytes, LINE):
            emit_prefetch(builder, builder.add(builder.add(first, offset), I64(line)))


def _emit_weigh(
    builder: Any, rows: int, vectors: int, lanes: int, values: Sequence[Any], kind: Any
) -> None:
    weights, places, offset, step, first, last, output, output_stride, later = values
    weight_rows = [_offset(builder, weights, I64(4 * TILE), row) for row in range(rows)]
    asks = builder.icmp_signed("!=", later, I64(0))
    targets = [
        builder.add(_offset(builder, output, output_stride, row), I64(4 * lanes * i))
        for row in range(rows)
        for i in range(vectors)
    ]
    sums = _sums(builder, rows * vectors, lanes)
    for target, total in zip(targets, sums, strict=True):
        builder.store(load(builder, target, ir.VectorType(F32, lanes)), total)
    with cgutils.for_range_slice(builder, first, last, I64(1), I64) as (index, _):
        eight = builder.and_(index, I64(~7))
        inside = builder.add(offset, builder.mul(builder.and_(index, I64(7)), step))
        row_at = builder.add(load(builder, builder.add(places, eight), I64), inside)
        with builder.if_then(asks):
            _ask_for(builder, builder.add(later, eight), inside, vectors * lanes * bytes_of(kind))
        at = builder.mul(index, I64(4))
        each = [load(builder, builder.add(one, at), F32) for one in weight_rows]
        w = [splat(builder, one, lanes) for one in each]
        for i in range(vectors):
            v = emit_load(
                builder, builder.add(row_at, I64(lanes * i * bytes_of(kind))), kind, lanes
            )
            for row in range(rows):
                total = sums[row * vectors + i]
                builder.store(_fma(builder, w[row], v, builder.load(total)), total)
    for target, total in zip(targets, sums, strict=True):
        store(builder, target, builder.load(total))


def _weigh_tile(vectors: int, lanes: int) -> Any:
    """Make a function that adds weighted values to 1 to `ROWS_AT_ONCE` outputs, some vectors wide.

    ``(rows, weights, places, offset, step, first, last, output, output_stride, later, kind)``:
    `TILE` float32 weights for each row, the values from `first` to before `last`; `places` has
    the address of every eighth value's numbers, of which those `offset` bytes on are taken, and
    the next value is `step` bytes further; with `later`, not 0, as many values are asked for there.
    """

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> None:
        def emit(rows: int) -> None:
            _emit_weigh(builder, rows, vectors, lanes, values[1:10], signature.args[10])

        _each_count(builder, values[0], ROWS_AT_ONCE, emit)

    @intrinsic  # type: ignore[untyped-decorator]
    def weigh(
        _typing: Any,
        rows: Any,
        w: Any,
        places: Any,
        offset: Any,
        step: Any,
        first: Any,
        last: Any,
        o: Any,
        os: Any,
        later: Any,
        kind: Any,
    ) -> Any:
        return types.void(*[types.int64] * 10, kind), generate

    return weigh


weigh, weigh_32, weigh_8 = _weigh_tile(VECTORS, MOST_LANES), _weigh_tile(4, 8), _weigh_tile(1, 8)
"""`COLUMNS_AT_ONCE`, 32 and 8 components wide."""
