"""Rows of float32 as int8, in blocks of 32 with a scale each.

A block of a quantized row takes `BLOCK_BYTES`: 32 int8, their scale as float32, their sum as
float32 (the scale included), which a weight's minimum is multiplied with, and the sum of each
half as int16, for weights that are unsigned bytes less an offset. All of it lies together, so
that a kernel needs one address for each row, not four: with four rows at once, twelve of them
did not fit the registers.

Four blocks are quantized together, a half of a block being a vector: what is reduced over a
block is a quarter of a vector then, with half the instructions. All of a row gets its scales
first: in one pass with the rounding it took half as long again, as the way from a block's
numbers to its scale is long, and a CPU's window holds little else meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    F32,
    I1,
    I8,
    I16,
    I32,
    ROUNDING_SHIFT,
    address,
    at,
    constant,
    f32x8,
    f32x16,
    i32x16,
    join,
    load,
    operation,
    splat,
    store,
)

BLOCK, BLOCK_BYTES = 32, 44
SCALE, TOTAL, HALVES = 32, 36, 40
"""Where in a block its scale, its sum and the sums of its halves are."""

GROUP = 4
"""Blocks that are quantized together."""


@inline
def quantized_bytes(k: int) -> int:
    """Bytes of a quantized row."""
    return k // BLOCK * BLOCK_BYTES


def _pick(builder: Any, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, constant(I32, len(lanes), lanes))


def _swap(builder: Any, vector: Any, distance: int) -> Any:
    """The lanes of a vector, each at its neighbour's place."""
    return _pick(builder, vector, vector, [lane ^ distance for lane in range(16)])


def _quarters(builder: Any, vectors: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Combine lanes of four vectors: the lanes of quarter i are what is left of vector i."""
    for width in (8, 4):
        low = [lane for lane in range(32) if lane // width % 2 == 0]
        high = [lane + width for lane in low]
        vectors = [
            combine(_pick(builder, a, b, low), _pick(builder, a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _load_halves(builder: Any, blocks: Sequence[Any]) -> list[list[Any]]:
    return [[load(builder, at(builder, x, half), f32x16.ir) for half in (0, 64)] for x in blocks]


def _emit_scales(b: Any, blocks: Sequence[Any], q: Any) -> None:
    def larger(x: Any, y: Any) -> Any:
        return b.select(b.icmp_signed(">", x, y), x, y)

    def size(x: Any) -> Any:
        # As integers the bits of |x| order like the numbers, and a NaN is the largest.
        return b.and_(b.bitcast(x, i32x16.ir), constant(I32, 16, 0x7FFFFFFF))

    sizes = [larger(size(x), size(y)) for x, y in _load_halves(b, blocks)]
    largest = _quarters(b, sizes, larger)
    for distance in (2, 1):
        largest = larger(largest, _swap(b, largest, distance))
    largest = b.bitcast(_pick(b, largest, largest, [0, 4, 8, 12] * 2), f32x8.ir)
    limit, zero = constant(F32, 8, 127.0), constant(F32, 8, 0.0)
    crossed = [0, 1, 2, 3, 12, 13, 14, 15]
    ratios = b.fdiv(_pick(b, limit, largest, crossed), _pick(b, largest, limit, crossed))
    is_scale = constant(I1, 8, [0, 0, 0, 0, 1, 1, 1, 1])
    is_kept = b.or_(b.fcmp_ordered(">", largest, zero), is_scale)
    store(b, q, b.select(is_kept, ratios, zero))


find_scales = operation(types.void, (None, address), _emit_scales)
"""Write the factors that four blocks are to be multiplied with, and then their scales, to `q`.

The arguments are a tuple of the blocks' addresses, and `q`. A block of zeros has the factor 0.
"""


def _emit_rounding(b: Any, blocks: Sequence[Any], targets: Sequence[Any]) -> None:
    # Near 1.5 * 2**23 the floats are the whole numbers, so the sum rounds, to even, and the last
    # bits of its pattern are the integer. LLVM's conversion that takes a NaN goes lane by lane.
    shift = constant(F32, 16, ROUNDING_SHIFT)
    factors = [splat(b, load(b, at(b, targets[0], 4 * i), F32), 16) for i in range(GROUP)]
    scales = load(b, at(b, targets[0], 4 * GROUP), ir.VectorType(F32, GROUP))
    scales = _pick(b, scales, scales, [lane // 4 for lane in range(16)])
    rounded = [
        [b.bitcast(b.fadd(b.fmul(x, factor), shift), i32x16.ir) for x in halves]
        for factor, halves in zip(factors, _load_halves(b, blocks), strict=True)
    ]
    first, second = (_quarters(b, halves, b.add) for halves in zip(*rounded, strict=True))
    # Two lanes of a quarter for each half of its block.
    low = [lane + 14 * (lane % 4 // 2) for lane in range(16)]
    sums = b.add(_pick(b, first, second, low), _pick(b, first, second, [n + 2 for n in low]))
    sums = b.add(sums, _swap(b, sums, 1))
    sums = b.sub(sums, b.mul(constant(I32, 16, 16), b.bitcast(shift, i32x16.ir)))
    wholes = b.sitofp(sums, f32x16.ir)
    totals = b.fmul(b.fadd(wholes, _swap(b, wholes, 2)), scales)
    words = b.bitcast(sums, ir.VectorType(I16, 32))
    order = [lane // 8 * 8 + 4 * (lane % 2) for lane in range(32)]
    halves = b.bitcast(_pick(b, words, words, order), f32x16.ir)
    # A quarter ends with scale, sum and sums of halves; what is before them is overwritten.
    tails = _pick(b, scales, totals, [lane + 16 * (lane % 4 == 2) for lane in range(16)])
    tails = _pick(b, tails, halves, [lane + 16 * (lane % 4 == 3) for lane in range(16)])
    for i, q in enumerate(targets):
        store(b, at(b, q, SCALE - 4), _pick(b, tails, tails, range(4 * i, 4 * i + 4)))
    for q, integers in zip(targets, rounded, strict=True):
        store(b, q, join(b, *(b.trunc(x, ir.VectorType(I8, 16)) for x in integers)))


round_blocks = operation(types.void, (None, None), _emit_rounding)
"""Quantize four blocks to four places, at the first of which `find_scales` has written.

A block may be there twice, together with its place.
"""


@inline
def group_of(row: int, block: int, last: int, size: int) -> Any:
    """Addresses of four blocks; behind the last one comes the last one again."""
    second, third, fourth = min(block + 1, last), min(block + 2, last), min(block + 3, last)
    return row + size * block, row + size * second, row + size * third, row + size * fourth


@jit
def quantize_row(x: int, k: int, q: int) -> None:
    """Quantize one row of `k` float32 at `x` to `q`.

    A block with a NaN or an infinity gets a scale like it.
    """
    last = k // BLOCK - 1
    for block in range(0, last + 1, GROUP):
        find_scales(group_of(x, block, last, 4 * BLOCK), q + BLOCK_BYTES * block)
    for block in range(0, last + 1, GROUP):
        targets = group_of(q, block, last, BLOCK_BYTES)
        round_blocks(group_of(x, block, last, 4 * BLOCK), targets)
