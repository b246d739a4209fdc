"""The two products of attention, in tiles of registers.

Scores: a few query rows times four keys; each dot product is 8 partial sums, lane by lane
along the head, and one tree over them. Weighted sums: a few query rows times 32 components
of the values, position by position. Neither order depends on how many rows or keys a tile
has, which is why a query's result is the same in every batch.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo_kernels.cpu.kv_types import bytes_of, emit_load
from octavo_kernels.cpu.simd import F32, I32, I64, call, constant, f32x8, load, splat, store

MAX_ROWS = 3
"""Query rows of a tile: 3 x 4 sums and 3 + 1 operands just fit 16 registers."""
KEYS = 4
VECTOR_BYTES = 32


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return call(builder, "llvm.fma.v8f32", f32x8.ir, x, y, z)


def _pair_sums(builder: Any, x: Any, y: Any) -> Any:
    """Sums of neighbouring lanes, those of `x` and of `y` side by side in each half."""
    even = builder.shuffle_vector(x, y, constant(I32, 8, [0, 2, 8, 10, 4, 6, 12, 14]))
    odd = builder.shuffle_vector(x, y, constant(I32, 8, [1, 3, 9, 11, 5, 7, 13, 15]))
    return builder.fadd(even, odd)


def _sum_each(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four sums over the lanes of four vectors, in the time of two."""
    halves = _pair_sums(builder, _pair_sums(builder, a, b), _pair_sums(builder, c, d))
    low = builder.shuffle_vector(halves, halves, constant(I32, 4, range(4)))
    high = builder.shuffle_vector(halves, halves, constant(I32, 4, range(4, 8)))
    return builder.fadd(low, high)


def _offset(builder: Any, where: Any, stride: Any, count: int) -> Any:
    return builder.add(where, builder.mul(stride, I64(count))) if count else where


def _sums(builder: Any, count: int) -> list[Any]:
    """Accumulators; LLVM keeps them in registers."""
    found = [cgutils.alloca_once(builder, f32x8.ir) for _ in range(count)]
    for one in found:
        builder.store(constant(F32, 8, 0.0), one)
    return found


def _score_tile(rows: int) -> Any:
    """Make a function that scores `rows` queries against `KEYS` keys.

    ``(query, query_stride, key, key_stride, num_vectors, scores, scores_stride, kind)``:
    strides in bytes, float32 queries, `num_vectors` times 8 numbers in a head; `KEYS`
    scores are written for each row.
    """

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> None:
        query, query_stride, key, key_stride, num_vectors, scores, scores_stride = values[:7]
        kind = signature.args[7]
        queries = [_offset(builder, query, query_stride, row) for row in range(rows)]
        keys = [_offset(builder, key, key_stride, i) for i in range(KEYS)]
        sums = _sums(builder, rows * KEYS)
        with cgutils.for_range(builder, num_vectors) as loop:
            at = builder.mul(loop.index, I64(VECTOR_BYTES))
            at_key = builder.mul(loop.index, I64(8 * bytes_of(kind)))
            q = [load(builder, builder.add(one, at), f32x8.ir) for one in queries]
            for i, one in enumerate(keys):
                k = emit_load(builder, builder.add(one, at_key), kind)
                for row in range(rows):
                    total = sums[row * KEYS + i]
                    builder.store(_fma(builder, q[row], k, builder.load(total)), total)
        for row in range(rows):
            four = [builder.load(total) for total in sums[row * KEYS : (row + 1) * KEYS]]
            store(builder, _offset(builder, scores, scores_stride, row), _sum_each(builder, *four))

    @intrinsic  # type: ignore[untyped-decorator]
    def score(
        _typing: Any, q: Any, qs: Any, k: Any, ks: Any, n: Any, s: Any, ss: Any, kind: Any
    ) -> Any:
        return types.void(*[types.int64] * 7, kind), generate

    return score


def _weigh_tile(rows: int, vectors: int) -> Any:
    """Make a function that adds weighted values to `rows` outputs, 8 `vectors` components wide.

    ``(weights, weights_stride, value, value_stride, count, output, output_stride, kind)``:
    strides in bytes, `count` float32 weights for each row.
    """

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> None:
        weights, weights_stride, value, value_stride, count, output, output_stride = values[:7]
        kind = signature.args[7]
        weight_rows = [_offset(builder, weights, weights_stride, row) for row in range(rows)]
        places = [
            builder.add(_offset(builder, output, output_stride, row), I64(VECTOR_BYTES * i))
            for row in range(rows)
            for i in range(vectors)
        ]
        sums = _sums(builder, rows * vectors)
        for place, total in zip(places, sums, strict=True):
            builder.store(load(builder, place, f32x8.ir), total)
        with cgutils.for_range(builder, count) as loop:
            row_at = builder.add(value, builder.mul(loop.index, value_stride))
            at = builder.mul(loop.index, I64(4))
            w = [splat(builder, load(builder, builder.add(one, at), F32), 8) for one in weight_rows]
            for i in range(vectors):
                v = emit_load(builder, builder.add(row_at, I64(8 * i * bytes_of(kind))), kind)
                for row in range(rows):
                    total = sums[row * vectors + i]
                    builder.store(_fma(builder, w[row], v, builder.load(total)), total)
        for place, total in zip(places, sums, strict=True):
            store(builder, place, builder.load(total))

    @intrinsic  # type: ignore[untyped-decorator]
    def weigh(
        _typing: Any, w: Any, ws: Any, v: Any, vs: Any, n: Any, o: Any, os: Any, kind: Any
    ) -> Any:
        return types.void(*[types.int64] * 7, kind), generate

    return weigh


score_1, score_2, score_3 = (_score_tile(rows) for rows in range(1, MAX_ROWS + 1))
weigh_1x4, weigh_2x4, weigh_3x4 = (_weigh_tile(rows, 4) for rows in range(1, MAX_ROWS + 1))
weigh_1x1 = _weigh_tile(1, 1)
