"""Repairs of Triton's interpreter, in 3.6.0 and 3.9.0.

Unpatched, it multiplies and adds the raw bits of bfloat16 numbers and cuts digits off where a
GPU rounds to nearest even, so a test in bfloat16 would compare with nonsense and might pass.
`repair` has to be called after triton is imported and before a kernel runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_TYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Conversions to these saturate on the GPU; torch's overflow to NaN or infinity.
_LIMITS = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}


def repair() -> None:
    """Replace the parts of the interpreter that are wrong. A second call does nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired", False):
        return
    builder.repaired = True
    _repair_casts(builder)
    _repair_arithmetic(builder)
    _repair_dot(builder)


def _repair_casts(builder: Any) -> None:
    convert = interpreter._convert_float
    cast = builder.cast_impl

    def convert_float(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        toward_zero = rounding is not None and "RTZ" in str(rounding)
        if toward_zero or source not in _TORCH_TYPES or target not in _TORCH_TYPES:
            return convert(x, source, target, rounding)
        wide = _to_torch(x, source).float()
        if target in _LIMITS:
            wide = wide.clamp(-_LIMITS[target], _LIMITS[target])
        return _from_torch(wide.to(_TORCH_TYPES[target]), np.shape(x))

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        old, new = source.dtype.scalar, target_type.scalar
        if new == tl.bfloat16 and old.is_int():
            return interpreter.TensorHandle(_narrow(source.data.astype(np.float32)), new)
        if old == tl.bfloat16 and new.is_int():
            numbers = _wide(source).astype(interpreter._get_np_dtype(target_type))
            return interpreter.TensorHandle(numbers, new)
        return cast(self, source, target_type)

    interpreter._convert_float = convert_float
    builder.cast_impl = cast_impl


def _repair_arithmetic(builder: Any) -> None:
    binary, unary = builder.binary_op, builder.unary_op

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, operation)
        result = operation(_wide(left), _wide(right))
        if result.dtype == np.bool_:
            return interpreter.TensorHandle(result, tl.int1)
        return interpreter.TensorHandle(_narrow(result), tl.bfloat16)

    def unary_op(self: Any, argument: Any, operation: Any) -> Any:
        if argument.dtype.scalar != tl.bfloat16:
            return unary(self, argument, operation)
        return interpreter.TensorHandle(_narrow(operation(_wide(argument))), tl.bfloat16)

    builder.binary_op = binary_op
    builder.unary_op = unary_op


def _repair_dot(builder: Any) -> None:
    dot = builder.create_dot

    def create_dot(
        self: Any, a: Any, b: Any, addend: Any, precision: Any, max_imprecise: Any
    ) -> Any:
        # float16 is right as it is; through float32 it adds up as a GPU does, and is not slow.
        if {a.dtype.scalar, b.dtype.scalar} & {tl.bfloat16, tl.float16}:
            product = (_wide(a) @ _wide(b)).astype(addend.data.dtype)
            return interpreter.TensorHandle(product + addend.data, addend.dtype.scalar)
        return dot(self, a, b, addend, precision, max_imprecise)

    builder.create_dot = create_dot


def dot_row_by_row(monkeypatch: Any) -> None:
    """Replace matrix products by ones that add up every row in the same order.

    Numpy's take other code for the last rows of a matrix, so bits depend on a row's place.
    """

    def create_dot(
        self: Any, a: Any, b: Any, addend: Any, precision: Any, max_imprecise: Any
    ) -> Any:
        product = np.zeros_like(addend.data)
        for index in range(a.data.shape[1]):
            product += _wide(a)[:, index, None] * _wide(b)[None, index]
        return interpreter.TensorHandle(product + addend.data, addend.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _to_torch(x: Any, kind: Any) -> torch.Tensor:
    size = kind.primitive_bitwidth // 8
    bits = np.ascontiguousarray(x).view(_UNSIGNED[size]).reshape(-1).copy()
    signed = bits if size == 1 else bits.view(f"int{8 * size}")
    return torch.from_numpy(signed).view(_TORCH_TYPES[kind])


def _from_torch(x: torch.Tensor, shape: Any) -> Any:
    bits = x.view(_BITS[x.itemsize]).numpy().view(_UNSIGNED[x.itemsize]).reshape(shape)
    return (
        bits.view(np.float16)
        if x.dtype == torch.float16
        else (bits.view(np.float32) if x.dtype == torch.float32 else bits)
    )


def _wide(handle: Any) -> Any:
    """Return the numbers of a handle as float32."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _narrow(numbers: Any) -> Any:
    """Round float32 to the bits of bfloat16, to nearest even."""
    wide = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(np.shape(numbers))
