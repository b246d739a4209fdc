"""RMS and layer normalization of rows of float32.

A row is summed in four chains of 8 lanes, two to a vector, joined at its end: the order depends
on nothing but the row's length.
"""

from __future__ import annotations

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    add,
    first_lanes,
    fma,
    high_half,
    hsum,
    load_f32x8,
    load_f32x16,
    load_first,
    load_first_of_16,
    low_half,
    mul,
    splat_f32,
    splat_f32x16,
    sqrt_f32,
    store_f32x8,
    store_f32x16,
    store_first,
    sub,
    to_scalar_f32,
    zero_f32x8,
)
from octavo_kernels.cpu.team import next_chunk


@jit
def add_row(x: int, residual: int, k: int) -> None:
    """Add the row at `x` to that at `residual`, in place."""
    whole = k // 8 * 8
    for i in range(0, whole, 8):
        at = residual + 4 * i
        store_f32x8(at, add(load_f32x8(x + 4 * i), load_f32x8(at)))
    if whole < k:
        at = residual + 4 * whole
        total = add(load_first(x + 4 * whole, k - whole), load_first(at, k - whole))
        store_first(at, total, k - whole)


@inline
def sum_of_squares(x: int, k: int, center: float) -> float:
    """Sum of ``(x - center) ** 2`` of a row."""
    ab = cd = splat_f32x16(to_scalar_f32(0))
    shift = splat_f32x16(center)
    i = 0
    while i + 32 <= k:
        p = sub(load_f32x16(x + 4 * i), shift)
        q = sub(load_f32x16(x + 4 * i + 64), shift)
        ab = fma(p, p, ab)
        cd = fma(q, q, cd)
        i += 32
    a = low_half(ab)
    while i < k:
        rest = min(8, k - i)
        r = first_lanes(sub(load_first(x + 4 * i, rest), low_half(shift)), rest)
        a = fma(r, r, a)
        i += 8
    return hsum(add(add(a, high_half(ab)), add(low_half(cd), high_half(cd))))


@inline
def sum_of_row(x: int, k: int) -> float:
    a = b = zero_f32x8()
    i = 0
    while i + 16 <= k:
        a = add(a, load_f32x8(x + 4 * i))
        b = add(b, load_f32x8(x + 4 * i + 32))
        i += 16
    while i < k:
        a = add(a, load_first(x + 4 * i, min(8, k - i)))
        i += 8
    return hsum(add(a, b))


@jit
def rms_norm_row(x: int, weight: int, k: int, eps: float, out: int) -> None:
    """Write ``x / rms(x) * weight``; `out` may be `x`."""
    zero, one = to_scalar_f32(0), to_scalar_f32(1)
    mean = sum_of_squares(x, k, zero) / to_scalar_f32(k)
    scale = splat_f32x16(one / sqrt_f32(mean + eps))
    whole = k // 16 * 16
    for i in range(0, whole, 16):
        scaled = mul(load_f32x16(x + 4 * i), scale)
        store_f32x16(out + 4 * i, mul(scaled, load_f32x16(weight + 4 * i)))
    if whole < k:
        at, rest = 4 * whole, k - whole
        scaled = mul(load_first_of_16(x + at, rest), scale)
        store_first(out + at, mul(scaled, load_first_of_16(weight + at, rest)), rest)


@jit
def layer_norm_row(x: int, weight: int, bias: int, k: int, eps: float, out: int) -> None:
    """Write ``(x - mean) / deviation * weight + bias``; `bias` may be 0."""
    mean = sum_of_row(x, k) / to_scalar_f32(k)
    variance = sum_of_squares(x, k, mean) / to_scalar_f32(k)
    scale = splat_f32(to_scalar_f32(1) / sqrt_f32(variance + eps))
    shift = splat_f32(mean)
    i = 0
    while i < k:
        at, rest = 4 * i, min(8, k - i)
        scaled = mul(sub(load_first(x + at, rest), shift), scale)
        offset = load_first(bias + at, rest) if bias else zero_f32x8()
        store_first(out + at, fma(scaled, load_first(weight + at, rest), offset), rest)
        i += 8


@jit
def rms_norm(
    thread: int,
    x: int,
    x_row: int,
    residual: int,
    weight: int,
    m: int,
    k: int,
    eps: float,
    out: int,
) -> None:
    """Normalize `m` rows, `x_row` bytes apart, to ``out[m, k]``.

    With a `residual` (``[m, k]``, or 0), x is added to it in place, and the sum normalized.
    """
    i = next_chunk(thread)
    while i < m:
        row = x + i * x_row
        if residual:
            add_row(row, residual + 4 * k * i, k)
            row = residual + 4 * k * i
        rms_norm_row(row, weight, k, eps, out + 4 * k * i)
        i = next_chunk(thread)


@jit
def layer_norm(
    thread: int,
    x: int,
    x_row: int,
    residual: int,
    weight: int,
    bias: int,
    m: int,
    k: int,
    eps: float,
    out: int,
) -> None:
    """Like `rms_norm`, for layer normalization."""
    i = next_chunk(thread)
    while i < m:
        row = x + i * x_row
        if residual:
            add_row(row, residual + 4 * k * i, k)
            row = residual + 4 * k * i
        layer_norm_row(row, weight, bias, k, eps, out + 4 * k * i)
        i = next_chunk(thread)
