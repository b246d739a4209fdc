"""The sums of a tile: 16 rows of weights with some rows of x.

They are a tuple with a vector for each row of x, in which lane r belongs to row r of the
weights. How many rows of x are in a tile is known when a kernel is compiled; `rows` is how many
bytes each is from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from octavo_kernels.cpu.jit import inline
from octavo_kernels.cpu.simd import (
    F32,
    I64,
    LOWERING,
    Vector,
    address,
    constant,
    emit_fma,
    f32x8,
    f32x16,
    i64,
    join,
    load,
    operation,
    splat,
)

IS_WIDE = LOWERING == "avx512"
TILE_ROWS = (8, 4, 3, 2, 1) if IS_WIDE else (4, 3, 2, 1)
"""Rows of x in a tile: with 32 registers of 16 lanes there is room for eight."""


def cover_with(make_step: Callable[[int], Any], sizes: Sequence[int] = TILE_ROWS) -> Any:
    """Make ``cover(start, end, x, x_row, out, out_row, others)``.

    It goes over rows of x and of the result, which are so many bytes apart, with the largest
    tiles that fit. `make_step(rows)` makes ``step(x, x_row, out, out_row, others)``, which does
    one of them.
    """
    if not sizes:
        return _nothing_is_left
    rows, step, rest = sizes[0], make_step(sizes[0]), cover_with(make_step, sizes[1:])

    @inline
    def cover(
        start: int, end: int, x: int, x_row: int, out: int, out_row: int, others: Any
    ) -> None:
        i = start
        while i + rows <= end:
            step(x + i * x_row, x_row, out + i * out_row, out_row, others)
            i += rows
        rest(i, end, x, x_row, out, out_row, others)

    return cover


@inline
def _nothing_is_left(
    start: int, end: int, x: int, x_row: int, out: int, out_row: int, others: Any
) -> None:
    pass


def distances_to(rows: int) -> Any:
    """Make the operation that tells how far each row of x is from the first."""

    def emit(builder: Any, row: Any) -> Any:
        # Nothing that LLVM sees through: it would make each address of a tile from the one
        # before it, 60 additions in a row.
        opaque = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0")
        return [I64(0), *(builder.call(opaque, [builder.mul(row, I64(i))]) for i in range(1, rows))]

    return operation(types.UniTuple(i64, rows), (i64,), emit)


def _spread(builder: Any, x: Any, rows: Any, lanes: int) -> list[Any]:
    """One float32 of each row of x, in all lanes."""
    numbers = [load(builder, builder.add(x, row), F32) for row in rows]
    return [splat(builder, number, lanes) for number in numbers]


def zeros_of(rows: int, vector: Vector = f32x16) -> Any:
    """Make the operation that begins the sums of a tile."""
    zeros = [constant(F32, vector.ir.count, 0.0)] * rows
    return operation(types.UniTuple(vector, rows), (), lambda b: zeros)


def join_of(rows: int) -> Any:
    """Make the operation that joins the sums of two tiles of 8 rows of weights."""
    half = types.UniTuple(f32x8, rows)

    def emit(builder: Any, low: Any, high: Any) -> Any:
        return [join(builder, *pair) for pair in zip(low, high, strict=True)]

    return operation(types.UniTuple(f32x16, rows), (half, half), emit)


def _add_products(builder: Any, sums: Any, weight: Any, x: Any, rows: Any) -> Any:
    factors = _spread(builder, x, rows, weight.type.count)
    return [emit_fma(builder, weight, y, c) for y, c in zip(factors, sums, strict=True)]


add_products = operation(None, (None, None, address, None), _add_products)
"""``add_products(sums, weight, x, rows)``: add ``weight * x``, with one float32 x of each row."""


def _add_dots(builder: Any, sums: Any, dots: Any, scale: Any, x: Any, rows: Any) -> Any:
    factors = _spread(builder, x, rows, scale.type.count)
    return [
        emit_fma(builder, builder.sitofp(dot, scale.type), builder.fmul(scale, y), c)
        for dot, y, c in zip(dots, factors, sums, strict=True)
    ]


add_dots = operation(None, (None, None, None, address, None), _add_dots)
"""``add_dots(sums, dots, scale, x, rows)``: add ``dots * (scale * x)``, likewise."""
