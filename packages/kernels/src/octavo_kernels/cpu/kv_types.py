"""Numbers of a KV cache as kernels read and write them.

A kernel is compiled for each type of cache. Which one is said by the numba type of a
constant that is passed along, one of `F32` to `E5M2`; its value is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo_kernels.cpu.simd import F16 as HALF
from octavo_kernels.cpu.simd import F32 as F32_TYPE
from octavo_kernels.cpu.simd import (
    I8,
    I16,
    I32,
    ROUNDING_SHIFT,
    bf16_to_f32,
    constant,
    e4m3_to_f32,
    e5m2_to_f32,
    f32_to_bf16,
    f32x8,
    i32x8,
    load,
    store,
)

F32, BF16, F16 = np.float32(0), np.uint16(0), np.int16(0)
INT8, E4M3, E5M2 = np.int8(0), np.uint8(0), np.uint32(0)

_CONVERSIONS: dict[Any, tuple[Any, int, Callable[[Any, Any], Any]]] = {
    types.float32: (ir.FloatType(), 4, lambda _, x: x),
    types.uint16: (I16, 2, bf16_to_f32),
    types.int16: (HALF, 2, lambda b, x: b.fpext(x, ir.VectorType(F32_TYPE, x.type.count))),
    types.int8: (I8, 1, lambda b, x: b.sitofp(x, ir.VectorType(F32_TYPE, x.type.count))),
    types.uint8: (I8, 1, e4m3_to_f32),
    types.uint32: (I8, 1, e5m2_to_f32),
}


def emit_load(builder: Any, where: Any, kind: Any, lanes: int = 8) -> Any:
    """Load some numbers of a cache as float32."""
    element, _, convert = _CONVERSIONS[kind]
    return convert(builder, load(builder, where, ir.VectorType(element, lanes)))


def emit_load_pair(builder: Any, first: Any, second: Any, kind: Any) -> Any:
    """Load 8 numbers each from two places of a cache, as 16 float32."""
    element, _, convert = _CONVERSIONS[kind]
    halves = [load(builder, where, ir.VectorType(element, 8)) for where in (first, second)]
    return convert(builder, builder.shuffle_vector(*halves, constant(I32, 16, range(16))))


def bytes_of(kind: Any) -> int:
    """Bytes of one number, given the numba type of a kind."""
    return _CONVERSIONS[kind][1]


@intrinsic  # type: ignore[untyped-decorator]
def load_kv(_typing: Any, where: Any, kind: Any) -> Any:
    """Load 8 numbers of a cache as float32."""

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return emit_load(builder, values[0], signature.args[1])

    return f32x8(types.int64, kind), generate


@intrinsic  # type: ignore[untyped-decorator]
def item_bytes(_typing: Any, kind: Any) -> Any:
    """Bytes of one number of a cache."""

    def generate(_context: Any, _builder: Any, signature: Any, _values: Any) -> Any:
        return ir.Constant(ir.IntType(64), bytes_of(signature.args[0]))

    return types.int64(kind), generate


# ---- stores -------------------------------------------------------------------------------


def _to_float8(builder: Any, value: Any, mantissa_bits: int, bias: int) -> Any:
    """Round to the nearest float8, ties to even; `value` is in its range, or NaN.

    Normal numbers are rounded in their bit pattern. Below them, adding a number whose last
    bit is the smallest subnormal rounds, and leaves the result in the last bits.
    """

    def i(number: int) -> Any:
        return constant(I32, 8, number)

    bits = builder.bitcast(value, i32x8.ir)
    size, sign = builder.and_(bits, i(0x7FFFFFFF)), builder.lshr(bits, i(31))
    dropped = 23 - mantissa_bits
    odd = builder.and_(builder.lshr(size, i(dropped)), i(1))
    rounded = builder.add(builder.add(size, i((1 << (dropped - 1)) - 1)), odd)
    normal = builder.sub(builder.lshr(rounded, i(dropped)), i((127 - bias) << mantissa_bits))
    shift = constant(F32_TYPE, 8, 2.0 ** (1 - bias - mantissa_bits + 23))
    shifted = builder.fadd(builder.bitcast(size, f32x8.ir), shift)
    subnormal = builder.sub(builder.bitcast(shifted, i32x8.ir), builder.bitcast(shift, i32x8.ir))
    is_small = builder.icmp_unsigned("<", size, i((128 - bias) << 23))
    code = builder.select(is_small, subnormal, normal)
    is_nan = builder.icmp_unsigned(">", size, i(0x7F800000))
    code = builder.select(is_nan, i(0x7F), code)
    code = builder.or_(code, builder.shl(sign, i(7)))
    return builder.trunc(code, ir.VectorType(I8, 8))


def _to_int8(builder: Any, value: Any) -> Any:
    """Round numbers between -127 and 127 to the nearest, ties to even."""
    shift = constant(F32_TYPE, 8, ROUNDING_SHIFT)
    shifted = builder.bitcast(builder.fadd(value, shift), i32x8.ir)
    whole = builder.sub(shifted, builder.bitcast(shift, i32x8.ir))
    return builder.trunc(whole, ir.VectorType(I8, 8))


_STORES: dict[Any, Callable[[Any, Any], Any]] = {
    types.float32: lambda _, x: x,
    types.uint16: f32_to_bf16,
    types.int16: lambda b, x: b.fptrunc(x, ir.VectorType(HALF, 8)),
    types.int8: _to_int8,
    types.uint8: lambda b, x: _to_float8(b, x, 3, 7),
    types.uint32: lambda b, x: _to_float8(b, x, 2, 15),
}

_LARGEST = {types.int8: 127.0, types.uint8: 448.0, types.uint32: 57344.0}


@intrinsic  # type: ignore[untyped-decorator]
def store_kv(_typing: Any, where: Any, value: Any, kind: Any) -> Any:
    """Store 8 float32 as numbers of a cache; those of 8 bits are in their range."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        store(builder, values[0], _STORES[signature.args[2]](builder, values[1]))
        return context.get_dummy_value()

    return types.void(types.int64, f32x8, kind), generate


@intrinsic  # type: ignore[untyped-decorator]
def largest_of(_typing: Any, kind: Any) -> Any:
    """Largest number of an 8-bit type; 0 for the types that are never out of range."""

    def generate(_context: Any, _builder: Any, signature: Any, _values: Any) -> Any:
        return ir.Constant(F32_TYPE, _LARGEST.get(signature.args[0], 0.0))

    return types.float32(kind), generate
