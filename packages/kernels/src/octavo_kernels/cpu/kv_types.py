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
from octavo_kernels.cpu.simd import (
    I8,
    I16,
    bf16_to_f32,
    e4m3_to_f32,
    e5m2_to_f32,
    f32x8,
    load,
)

F32, BF16, F16 = np.float32(0), np.uint16(0), np.int16(0)
INT8, E4M3, E5M2 = np.int8(0), np.uint8(0), np.uint32(0)

_CONVERSIONS: dict[Any, tuple[Any, int, Callable[[Any, Any], Any]]] = {
    types.float32: (ir.FloatType(), 4, lambda _, x: x),
    types.uint16: (I16, 2, bf16_to_f32),
    types.int16: (HALF, 2, lambda b, x: b.fpext(x, f32x8.ir)),
    types.int8: (I8, 1, lambda b, x: b.sitofp(x, f32x8.ir)),
    types.uint8: (I8, 1, e4m3_to_f32),
    types.uint32: (I8, 1, e5m2_to_f32),
}


def emit_load(builder: Any, where: Any, kind: Any) -> Any:
    """Load 8 numbers of a cache as float32."""
    element, _, convert = _CONVERSIONS[kind]
    return convert(builder, load(builder, where, ir.VectorType(element, 8)))


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
