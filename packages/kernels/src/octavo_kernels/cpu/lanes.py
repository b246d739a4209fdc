"""Operations on the lanes of a vector that attention and sampling need."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from octavo_kernels.cpu.simd import (
    F32,
    I1,
    I8,
    I32,
    I64,
    LN2_HIGH,
    LN2_LOW,
    call,
    constant,
    f32,
    f32x8,
    f32x16,
    i32x8,
    i64,
    operation,
    splat,
)

NEGATIVE_INFINITY = float("-inf")


def _keep_lanes(builder: Any, value: Any, first: Any, last: Any) -> Any:
    lanes = constant(I32, 16, range(16))
    first = splat(builder, builder.trunc(first, I32), 16)
    last = splat(builder, builder.trunc(last, I32), 16)
    inside = builder.and_(
        builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, last)
    )
    return builder.select(inside, value, constant(F32, 16, NEGATIVE_INFINITY))


keep_lanes = operation(f32x16, (f32x16, i64, i64), _keep_lanes)
"""Lanes from `first` to before `last`, minus infinity in the others."""

lowest = operation(f32x8, (), lambda b: constant(F32, 8, NEGATIVE_INFINITY))


def _finite_or_zero(builder: Any, value: Any, largest: Any) -> Any:
    """Hold within a range; NaN becomes 0."""
    is_nan = builder.fcmp_unordered("uno", value, value)
    value = builder.select(is_nan, constant(F32, 8, 0.0), value)
    high = splat(builder, largest, 8)
    low = builder.fneg(high)
    value = builder.select(builder.fcmp_ordered(">", value, high), high, value)
    return builder.select(builder.fcmp_ordered("<", value, low), low, value)


finite_or_zero = operation(f32x8, (f32x8, f32), _finite_or_zero)

# ---- natural logarithm ---------------------------------------------------------------------

SQRT_HALF = 0.70710678118654752
# Minimax coefficients of (log(1 + x) - x + x**2 / 2) / x**3 between sqrt(1/2) - 1 and
# sqrt(2) - 1, highest first; the numbers are those of the Cephes library's logf.
LOG_POLYNOMIAL = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)


def emit_log(b: Any, x: Any) -> Any:
    """``log`` of positive normal numbers, to 2 units in the last place."""

    def f(value: float) -> Any:
        return constant(F32, 8, value)

    def i(value: int) -> Any:
        return constant(I32, 8, value)

    def madd(p: Any, q: Any, r: Any) -> Any:
        return call(b, "llvm.fma.v8f32", f32x8.ir, p, q, r)

    bits = b.bitcast(x, i32x8.ir)
    exponent = b.sub(b.lshr(bits, i(23)), i(126))
    mantissa = b.bitcast(b.or_(b.and_(bits, i(0x7FFFFF)), i(0x3F000000)), f32x8.ir)
    is_low = b.fcmp_ordered("<", mantissa, f(SQRT_HALF))
    n = b.sitofp(b.select(is_low, b.sub(exponent, i(1)), exponent), f32x8.ir)
    y = b.fsub(b.select(is_low, b.fadd(mantissa, mantissa), mantissa), f(1.0))
    square = b.fmul(y, y)
    p = f(LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        p = madd(p, y, f(coefficient))
    p = madd(n, f(LN2_LOW), b.fmul(b.fmul(p, y), square))
    p = madd(square, f(-0.5), p)
    return madd(n, f(LN2_HIGH), b.fadd(y, p))


log = operation(f32x8, (f32x8,), emit_log)


# ---- sampling noise -------------------------------------------------------------------------


def _mix32(b: Any, x: Any) -> Any:
    """lowbias32, see `octavo_kernels.sample_noise`."""

    def i(value: int) -> Any:
        return constant(I32, 8, value)

    x = b.mul(b.xor(x, b.lshr(x, i(16))), i(0x7FEB352D))
    x = b.mul(b.xor(x, b.lshr(x, i(15))), i(0x846CA68B))
    return b.xor(x, b.lshr(x, i(16)))


def _uniform(b: Any, first: Any, key: Any) -> Any:
    """Numbers in (0, 1) of eight tokens from `first` on, from a row's key of 64 bits."""

    def f(value: float) -> Any:
        return constant(F32, 8, value)

    tokens = b.add(splat(b, b.trunc(first, I32), 8), constant(I32, 8, range(8)))
    low = splat(b, b.trunc(key, I32), 8)
    high = splat(b, b.trunc(b.lshr(key, I64(32)), I32), 8)
    word = _mix32(b, b.xor(_mix32(b, b.xor(tokens, low)), high))
    whole = b.sitofp(b.lshr(word, constant(I32, 8, 1)), f32x8.ir)
    uniform = b.fmul(b.fadd(whole, f(0.5)), f(2.0**-31))
    most = f(1.0 - 2.0**-24)
    return b.select(b.fcmp_ordered(">", uniform, most), most, uniform)


def _gumbel(b: Any, uniform: Any) -> Any:
    """Noise ``-log(-log(1 - u))``."""

    def f(value: float) -> Any:
        return constant(F32, 8, value)

    # log(1 - u) from the rounded difference, and what the rounding left out.
    rest = b.fsub(f(1.0), uniform)
    lost = b.fdiv(b.fadd(b.fsub(rest, f(1.0)), uniform), rest)
    exponential = b.fsub(lost, emit_log(b, rest))
    return b.fneg(emit_log(b, exponential))


uniform = operation(f32x8, (i64, i64), _uniform)
gumbel = operation(f32x8, (f32x8,), _gumbel)


# ---- which lanes ----------------------------------------------------------------------------


def _mask_bits(b: Any, mask: Any) -> Any:
    return b.zext(b.bitcast(mask, ir.IntType(8)), I64)


at_least = operation(i64, (f32x8, f32x8), lambda b, x, y: _mask_bits(b, b.fcmp_ordered(">=", x, y)))
"""One bit for each lane where ``x >= y``, the lowest for the first."""

count_at_least = operation(
    i32x8,
    (i32x8, f32x8, f32x8),
    lambda b, n, x, y: b.sub(n, b.sext(b.fcmp_ordered(">=", x, y), i32x8.ir)),
)
"""Counts, one more in each lane where ``x >= y``."""

count_greater_than = operation(
    i32x8,
    (i32x8, f32x8, f32x8),
    lambda b, n, x, y: b.sub(n, b.sext(b.fcmp_ordered(">", x, y), i32x8.ir)),
)

keep_at_least = operation(
    f32x8,
    (f32x8, f32x8, f32x8),
    lambda b, value, x, y: b.select(b.fcmp_ordered(">=", x, y), value, constant(F32, 8, 0.0)),
)
"""`value` where ``x >= y``, else 0."""


def _keep_bits(b: Any, value: Any, bits: Any) -> Any:
    mask = b.bitcast(b.trunc(bits, I8), ir.VectorType(I1, 8))
    return b.select(mask, value, constant(F32, 8, NEGATIVE_INFINITY))


keep_bits = operation(f32x8, (f32x8, i64), _keep_bits)
"""Lanes whose bit is set, minus infinity in the others."""

lowest_bit = operation(i64, (i64,), lambda b, x: call(b, "llvm.cttz.i64", I64, x, I1(0)))
"""Number of the lowest bit that is set."""
