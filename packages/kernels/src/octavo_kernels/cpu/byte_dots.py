"""Dot products of bytes: packed weights with activations of a block.

A dot product takes 32 weights of each of 8 rows, as eight vectors of 4 weights of each row,
and 32 activations; lane r of the result belongs to row r. Two groups of 8 rows are one vector
of 16 lanes with AVX-512, and two vectors in the other lowerings.

Weights are unsigned bytes less an offset. ``vpdpbusd`` takes them unsigned, and the sum begins
with minus the offset times the sum of activations; AVX2's ``vpmaddubsw`` takes their size, and
the activations with their sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from octavo_kernels.cpu.activations import HALVES
from octavo_kernels.cpu.simd import (
    I1,
    I8,
    I16,
    I32,
    LOWERING,
    address,
    at,
    call,
    constant,
    i8x32,
    i16x16,
    i32x8,
    i32x16,
    i64,
    join,
    load,
    operation,
    splat,
)
from octavo_kernels.cpu.tiles import IS_WIDE

HAS_VNNI = LOWERING in ("avx512", "vnni")
IN_ORDER = range(8)
BY_BYTE = (0, 4, 1, 5, 2, 6, 3, 7)
"""Vectors of nibbles so ordered that both halves of a byte follow each other."""

Loader = Callable[[int], Any]
"""Loads the 32 bytes of each group that lie an offset on."""


@dataclass(frozen=True)
class Bytes:
    """What the dot products of one kind of weight are made of.

    Attributes:
        unpack: Emits IR for vector 0 to 7, of 4 weights of each row, as unsigned bytes.
        offset: What is subtracted from them.
        pairs_that_fit: How many sums of two products an i16 holds: for weights without an
            offset 8 below 16 (16 * 15 * 127 = 30,480) and 4 below 32, for others 1 from -128
            and 4 from -32. Activations are between -127 and 127.
        has_scales: Whether each 16 inputs have an int8 scale.
    """

    unpack: Callable[[Any, Loader, int], Any]
    offset: int
    pairs_that_fit: int
    has_scales: bool = False

    @property
    def is_joint(self) -> bool:
        """Whether registers suffice for two groups at once: AVX2 needs two more for signs."""
        return HAS_VNNI or not self.offset


def _each(vector: Any, value: int) -> Any:
    """A constant for every byte of a vector."""
    return constant(I8, vector.type.count, value)


def _nibbles(builder: Any, loaded: Loader, i: int) -> Any:
    """128 bytes: the low halves of the first 32 are vector 0, the high halves vector 4."""
    packed = loaded(32 * (i % 4))
    if i < 4:
        return builder.and_(packed, _each(packed, 15))
    return builder.lshr(packed, _each(packed, 4))


def _fives(builder: Any, loaded: Loader, i: int) -> Any:
    """Nibbles and 32 bytes of fifth bits: bit i of each belongs to vector i."""
    fifths = loaded(128)
    bit = builder.and_(builder.lshr(fifths, _each(fifths, i)), _each(fifths, 1))
    return builder.or_(_nibbles(builder, loaded, i), builder.shl(bit, _each(bit, 4)))


def _sixes(builder: Any, loaded: Loader, i: int) -> Any:
    """Nibbles and 64 bytes of upper pairs of bits."""
    pairs = loaded(128 + 32 * (i // 4))
    shifted = builder.lshr(pairs, _each(pairs, 2 * (i % 4)))
    upper = builder.shl(builder.and_(shifted, _each(pairs, 3)), _each(pairs, 4))
    return builder.or_(_nibbles(builder, loaded, i), upper)


def _bytes(builder: Any, loaded: Loader, i: int) -> Any:
    """256 signed bytes."""
    packed = loaded(32 * i)
    return builder.xor(packed, _each(packed, 0x80))


NIBBLES = Bytes(_nibbles, offset=0, pairs_that_fit=8)
FIVES = Bytes(_fives, offset=0, pairs_that_fit=4)
SIXES = Bytes(_sixes, offset=32, pairs_that_fit=4, has_scales=True)
BYTES_OF_8 = Bytes(_bytes, offset=128, pairs_that_fit=1)


def broadcast_bytes(builder: Any, where: Any, lanes: int) -> Any:
    """Four bytes of memory in each lane."""
    spread = splat(builder, load(builder, where, I32), lanes)
    return builder.bitcast(spread, ir.VectorType(I8, 4 * lanes))


def load_groups(builder: Any, groups: Sequence[Any], offset: int, size: int = 32) -> Any:
    """Load `size` bytes of one group or of two, as one vector."""
    parts = [load(builder, at(builder, p, offset), ir.VectorType(I8, size)) for p in groups]
    return parts[0] if len(parts) == 1 else join(builder, *parts)


def multiply_pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    """i16 sums of two neighbouring products (AVX2's vpmaddubsw, which saturates)."""
    return call(builder, "llvm.x86.avx2.pmadd.ub.sw", i16x16.ir, unsigned, signed)


def add_pairs(builder: Any, pairs: Any) -> Any:
    """i32 sums of two neighbouring i16."""
    ones = constant(I16, 16, 1)
    return call(builder, "llvm.x86.avx2.pmadd.wd", i32x8.ir, pairs, ones)


def dot_generic(builder: Any, first: Any, second: Any, first_signed: bool) -> Any:
    """i32 sums of four neighbouring products, in plain IR."""
    wide = ir.VectorType(I32, 32)
    first = builder.sext(first, wide) if first_signed else builder.zext(first, wide)
    products = builder.mul(first, builder.sext(second, wide))
    total = None
    for offset in range(4):
        order = constant(I32, 8, range(offset, 32, 4))
        quarter = builder.shuffle_vector(products, products, order)
        total = quarter if total is None else builder.add(total, quarter)
    return total


def dot_vnni(builder: Any, name: str, total: Any, first: Any, second: Any) -> Any:
    """Add four products of bytes (vpdpbusd) or two of i16 (vpdpwssd) to each i32."""
    vector = total.type
    a, b = builder.bitcast(first, vector), builder.bitcast(second, vector)
    # LLVM has one name for the AVX-512 and the AVX encoding.
    return call(builder, f"llvm.x86.avx512.{name}.{32 * vector.count}", vector, total, a, b)


def minus_offset(builder: Any, kind: Bytes, where: Any, lanes: int, chosen: Sequence[int]) -> Any:
    """What the sum of products with unsigned bytes has too much, negative."""
    # A half's activations have one sum. It counts if the half's vectors are chosen.
    factors = [-kind.offset if 4 * half in chosen else 0 for half in range(2)]
    halves = broadcast_bytes(builder, at(builder, where, HALVES), lanes)
    zeros = constant(I32, lanes, 0)
    return dot_vnni(builder, "vpdpwssd", zeros, constant(I16, 2 * lanes, factors * lanes), halves)


def emit_dots(
    builder: Any,
    kind: Bytes,
    groups: Sequence[Any],
    activations: Sequence[Any],
    chosen: Sequence[int] = IN_ORDER,
) -> list[Any]:
    """Dot products of some vectors of weights of each group with each row of activations.

    The loop over vectors is the outer one: a vector is unpacked once for all rows, four bytes
    of activations are spread over a vector once for all groups, and both are dropped, which
    leaves registers for the sums.

    Returns:
        A vector for each row of activations, with the lanes of all groups.
    """
    units = [groups] if IS_WIDE else [[group] for group in groups]
    lanes, rows = 8 * len(units[0]), len(activations)
    totals: list[Any] = [None] * (len(units) * rows)
    pairs: list[Any] = [None] * (len(units) * rows)
    if HAS_VNNI and kind.offset:
        totals = [minus_offset(builder, kind, a, lanes, chosen) for a in activations] * len(units)

    def plus(total: Any, part: Any) -> Any:
        return part if total is None else builder.add(total, part)

    def add_product(n: int, weight: Any, size: Any, activation: Any, is_last: bool) -> None:
        if HAS_VNNI:
            total = constant(I32, lanes, 0) if totals[n] is None else totals[n]
            totals[n] = dot_vnni(builder, "vpdpbusd", total, weight, activation)
            return
        if LOWERING == "generic":
            part = dot_generic(builder, weight, activation, first_signed=bool(kind.offset))
            totals[n] = plus(totals[n], part)
            return
        if kind.offset:
            # |w| * (a with the sign of w): 128 * 127 * 2 still fits an i16.
            activation = call(builder, "llvm.x86.avx2.psign.b", i8x32.ir, activation, weight)
        pairs[n] = plus(pairs[n], multiply_pairs(builder, size, activation))
        if is_last:
            totals[n] = plus(totals[n], add_pairs(builder, pairs[n]))
            pairs[n] = None

    for done, i in enumerate(chosen, 1):
        weights = [kind.unpack(builder, partial(load_groups, builder, unit), i) for unit in units]
        if kind.offset and not HAS_VNNI:
            weights = [builder.sub(weight, _each(weight, kind.offset)) for weight in weights]
        sizes = weights
        if kind.offset and LOWERING == "avx2":
            sizes = [call(builder, "llvm.abs.v32i8", i8x32.ir, w, I1(0)) for w in weights]
        is_last = done % kind.pairs_that_fit == 0
        for row, where in enumerate(activations):
            activation = broadcast_bytes(builder, at(builder, where, 4 * i), lanes)
            for unit, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
                add_product(rows * unit + row, weight, size, activation, is_last)
        if not IS_WIDE and len(totals) > 1 and done < len(chosen):
            for sums in (pairs, totals):
                sums[:] = [one if one is None else compute_now(builder, one) for one in sums]
    if len(units) == 1:
        return totals
    return [join(builder, *both) for both in zip(totals[:rows], totals[rows:], strict=True)]


def compute_now(builder: Any, value: Any) -> Any:
    """Have a vector computed here: nothing that stands behind this point moves before it.

    Left alone, LLVM unpacks all of a block's weights first, and then has no registers for the
    sums: 94 of 400 instructions of a tile went to the stack, and it ran at half the speed.
    """
    if LOWERING == "generic":
        return value
    kind = ir.FunctionType(value.type, [value.type])
    nothing = ir.InlineAsm(kind, "", "=x,0,~{memory}", side_effect=True)
    return builder.call(nothing, [value])


def emit_scaled_halves(
    builder: Any, kind: Bytes, groups: Sequence[Any], scales: Sequence[Any], activations: Any
) -> list[Any]:
    """Dot products of 16 weights, twice, each times its int8 scale (8 bytes for 8 rows)."""
    halves = []
    for half in range(2):
        scale = load_groups(builder, scales, 8 * half, 8)
        scale = builder.sext(scale, ir.VectorType(I32, scale.type.count))
        dots = emit_dots(builder, kind, groups, activations, range(4 * half, 4 * half + 4))
        halves.append([builder.mul(dot, scale) for dot in dots])
    return [builder.add(first, second) for first, second in zip(*halves, strict=True)]


def dots_of(kind: Bytes, rows: int, groups: int) -> Any:
    """Make ``dots(weights, scales, group, activations, rows)``.

    Its result is a tuple with a vector for each of `rows` rows of activations: of 8 lanes for
    one group, of 16 for two that lie `group` bytes apart. `scales` is the address of int8
    scales, where the kind has them.
    """

    def emit(builder: Any, weights: Any, scales: Any, group: Any, where: Any, rows: Any) -> Any:
        at_weights = [weights, builder.add(weights, group)][:groups]
        activations = [builder.add(where, row) for row in rows]
        if kind.has_scales:
            at_scales = [scales, builder.add(scales, group)][:groups]
            return emit_scaled_halves(builder, kind, at_weights, at_scales, activations)
        order = BY_BYTE if groups == 2 else IN_ORDER
        return emit_dots(builder, kind, at_weights, activations, order)

    result = types.UniTuple(i32x8 if groups == 1 else i32x16, rows)
    return operation(result, (address, address, i64, address, None), emit)
