"""Gated activations of rows of float32: ``activation(gate) * up``."""

from __future__ import annotations

from typing import Any

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    absolute,
    add,
    copy_sign,
    div,
    exp,
    fma,
    load_f32x16,
    load_first_of_16,
    mul,
    negative,
    splat_f32x16,
    store_f32x16,
    store_first,
    sub,
)
from octavo_kernels.cpu.team import next_chunk

SILU, GELU, GELU_TANH = 0, 1, 2


@inline
def constant_f32(value: float) -> Any:
    return splat_f32x16(value)


@inline
def silu(x: Any) -> Any:
    """``x / (1 + exp(-x))``."""
    return div(x, add(constant_f32(1.0), exp(negative(x))))


@inline
def gelu_tanh(x: Any) -> Any:
    """``x * sigmoid(2 y)`` with ``y = sqrt(2 / pi) * (x + 0.044715 x ** 3)``."""
    cube = mul(mul(x, x), x)
    y = mul(fma(cube, constant_f32(0.044715), x), constant_f32(0.7978845608028654))
    return div(x, add(constant_f32(1.0), exp(mul(y, constant_f32(-2.0)))))


@inline
def gelu(x: Any) -> Any:
    """``x / 2 * (1 + erf(x / sqrt(2)))``, erf by Abramowitz and Stegun 7.1.26 (1.5e-7)."""
    z = absolute(mul(x, constant_f32(0.7071067811865476)))
    t = div(constant_f32(1.0), fma(z, constant_f32(0.3275911), constant_f32(1.0)))
    p = fma(t, constant_f32(1.061405429), constant_f32(-1.453152027))
    p = fma(p, t, constant_f32(1.421413741))
    p = fma(p, t, constant_f32(-0.284496736))
    p = mul(fma(p, t, constant_f32(0.254829592)), t)
    erf = sub(constant_f32(1.0), mul(p, exp(negative(mul(z, z)))))
    return mul(mul(x, constant_f32(0.5)), add(constant_f32(1.0), copy_sign(erf, x)))


@inline
def activate(x: Any, kind: int) -> Any:
    if kind == SILU:
        return silu(x)
    if kind == GELU:
        return gelu(x)
    return gelu_tanh(x)


@jit
def gated_row(gate: int, up: int, n: int, kind: int, out: int) -> None:
    """Write ``activation(gate) * up`` of `n` numbers."""
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        at = 4 * i
        store_f32x16(out + at, mul(activate(load_f32x16(gate + at), kind), load_f32x16(up + at)))
    if whole < n:
        at, rest = 4 * whole, n - whole
        left = activate(load_first_of_16(gate + at, rest), kind)
        store_first(out + at, mul(left, load_first_of_16(up + at, rest)), rest)


@jit
def activate_and_mul(thread: int, x: int, x_row: int, m: int, n: int, kind: int, out: int) -> None:
    """Compute ``out[m, n]`` from rows of a gate and an up projection, ``[m, 2 n]``."""
    i = next_chunk(thread)
    while i < m:
        row = x + i * x_row
        gated_row(row, row + 4 * n, n, kind, out + 4 * n * i)
        i = next_chunk(thread)
