"""SIMD values for numba: vector types and the one-line operations that kernels are made of.

An operation is an LLVM instruction or a few of them, so a kernel stays Python source
and runs what a C++ author would get from intrinsics. Addresses are int64, in bytes,
and need no alignment. Vectors have 8 or 16 lanes of 32 bits; LLVM splits them where
registers are narrower.

All of it is portable IR but one thing, the dot product of bytes, which no plain IR
turns into the right instruction: `LOWERING` names how it is done here. Its results are
integers and equal in every lowering.

No operation carries fast-math flags: what is summed in which order is what the source
says, so a row's result does not depend on the batch around it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic, models, register_model

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
BYTES = I8.as_pointer()


class Vector(types.Type):
    """A numba type for `lanes` values of an LLVM type, held in registers."""

    def __init__(self, element: ir.Type, lanes: int) -> None:
        self.ir = ir.VectorType(element, lanes)
        super().__init__(name=f"Vector({element} x {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.ir)


f32x8, i32x8 = Vector(F32, 8), Vector(I32, 8)
f32x16, i32x16 = Vector(F32, 16), Vector(I32, 16)
i16x16, i8x32 = Vector(I16, 16), Vector(I8, 32)
address, i64, i32, f32 = types.int64, types.int64, types.int32, types.float32


def _lowerings() -> tuple[str, ...]:
    features = binding.get_host_cpu_features()

    def has(*names: str) -> bool:
        return all(features.get(name) for name in names)

    found = {
        "avx512": has("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"),
        "vnni": has("avxvnni") or has("avx512vnni", "avx512vl"),
        "avx2": has("avx2"),
        "generic": True,
    }
    return tuple(name for name, can_be_done in found.items() if can_be_done)


LOWERINGS = _lowerings()
"""What this CPU can do, the best first."""


def _lowering() -> str:
    forced = os.environ.get("OCTAVO_CPU_LOWERING", "")
    if forced and forced not in LOWERINGS:
        raise ValueError(
            f"OCTAVO_CPU_LOWERING is {forced!r}; on this CPU it can be {', '.join(LOWERINGS)}"
        )
    return forced or LOWERINGS[0]


LOWERING = _lowering()
"""``avx512``, ``vnni``, ``avx2`` or ``generic``; ``OCTAVO_CPU_LOWERING`` forces one (for tests)."""


MOST_LANES = 16 if LOWERING == "avx512" else 8
"""Lanes of a register: 8, or 16 where there are 32 registers of 512 bits. Vectors of 16 lanes work
everywhere; this says how many of them a kernel can hold."""


# ---- building blocks of the operations ----------------------------------------------------


def operation(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Any:
    """Make a numba function of up to five arguments out of a function that emits IR.

    Args:
        result: numba type of the result; None for that of the first argument.
        arguments: numba types of the arguments; None for any type.
        emit: Takes the IR builder and the arguments' values, returns the result's value. The
            value of a tuple is the list of its values.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        taken = [
            [builder.extract_value(value, i) for i in range(len(kind))]
            if isinstance(kind, types.UniTuple)
            else value
            for kind, value in zip(signature.args, values, strict=True)
        ]
        value = emit(builder, *taken)
        if signature.return_type is types.void:
            return context.get_dummy_value()
        if isinstance(signature.return_type, types.UniTuple):
            return context.make_tuple(builder, signature.return_type, value)
        return value

    def of(*found: Any) -> Any:
        kinds = [kind or given for kind, given in zip(arguments, found, strict=True)]
        return (result or kinds[0])(*kinds), generate

    # numba reads the number of arguments off the function, so there is one for each.
    def of_0(typing: Any) -> Any:
        return of()

    def of_1(typing: Any, a: Any) -> Any:
        return of(a)

    def of_2(typing: Any, a: Any, b: Any) -> Any:
        return of(a, b)

    def of_3(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return of(a, b, c)

    def of_4(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return of(a, b, c, d)

    def of_5(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return of(a, b, c, d, e)

    return intrinsic((of_0, of_1, of_2, of_3, of_4, of_5)[len(arguments)])


def constant(element: ir.Type, lanes: int, values: Any) -> ir.Constant:
    """Make a vector constant of one value, or of a sequence of them."""
    values = list(values) if isinstance(values, Sequence | range) else [values] * lanes
    return ir.Constant(ir.VectorType(element, lanes), values)


def call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Call an LLVM intrinsic or a C function by name."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [value.type for value in values])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, values)


def load(builder: Any, where: Any, kind: ir.Type) -> Any:
    """Load a value of any type from any address."""
    return builder.load(builder.inttoptr(where, kind.as_pointer()), align=1)


def store(builder: Any, where: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(where, value.type.as_pointer()), align=1)


def at(builder: Any, where: Any, offset: int) -> Any:
    """An address `offset` bytes on."""
    return builder.add(where, ir.Constant(I64, offset)) if offset else where


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """Put one value into all lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, constant(I32, lanes, 0))


def join(builder: Any, low: Any, high: Any) -> Any:
    """One vector of the lanes of two."""
    lanes = 2 * low.type.count
    return builder.shuffle_vector(low, high, constant(I32, lanes, range(lanes)))


def reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes of a vector as a tree: halves, quarters, eighths."""
    lanes = vector.type.count
    width = lanes // 2
    while width:
        order = [lane + width if lane < width else 0 for lane in range(lanes)]
        shifted = builder.shuffle_vector(vector, vector, constant(I32, lanes, order))
        vector = combine(vector, shifted)
        width //= 2
    return builder.extract_element(vector, I32(0))


def emit_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return call(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """Lane by lane maximum; a NaN in `a` stays, one in `b` does not."""
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), b, a)


# ---- scalars ------------------------------------------------------------------------------

load_f32 = operation(f32, (address,), lambda b, p: load(b, p, F32))
load_i32 = operation(i32, (address,), lambda b, p: load(b, p, I32))
load_i64 = operation(i64, (address,), lambda b, p: load(b, p, I64))
load_i8 = operation(i32, (address,), lambda b, p: b.sext(load(b, p, I8), I32))
load_u8 = operation(i32, (address,), lambda b, p: b.zext(load(b, p, I8), I32))
load_f16 = operation(f32, (address,), lambda b, p: b.fpext(load(b, p, F16), F32))
load_bf16 = operation(
    f32, (address,), lambda b, p: b.bitcast(b.shl(b.zext(load(b, p, I16), I32), I32(16)), F32)
)
store_f32 = operation(types.void, (address, f32), store)
store_i32 = operation(types.void, (address, i32), store)
store_i64 = operation(types.void, (address, i64), store)
store_i8 = operation(types.void, (address, i32), lambda b, p, x: store(b, p, b.trunc(x, I8)))


def emit_prefetch(builder: Any, where: Any) -> None:
    pointer = builder.inttoptr(where, BYTES)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))


def _stay_apart(builder: Any) -> None:
    builder.function.attributes.add("noinline")
    # Vectors that don't fit the registers lie in whole cache lines: LLVM leaves the stack as it
    # is, and a product over Q5_K took half as long again where they didn't.
    builder.function.attributes.alignstack = 64


stay_apart = operation(types.void, (), _stay_apart)
"""Have the function that calls this never made part of another one."""

prefetch = operation(types.void, (address,), emit_prefetch)
"""Ask for the cache line of an address, to be read soon."""


# ---- float32 ------------------------------------------------------------------------------


def bf16_to_f32(builder: Any, bits: Any) -> Any:
    lanes = bits.type.count
    wide = builder.zext(bits, ir.VectorType(I32, lanes))
    return builder.bitcast(builder.shl(wide, constant(I32, lanes, 16)), ir.VectorType(F32, lanes))


def f32_to_bf16(builder: Any, value: Any) -> Any:
    """Round to the nearest, ties to even; a NaN stays one."""
    lanes = value.type.count

    def i(value: int) -> Any:
        return constant(I32, lanes, value)

    bits = builder.bitcast(value, ir.VectorType(I32, lanes))
    odd = builder.and_(builder.lshr(bits, i(16)), i(1))
    rounded = builder.add(builder.add(bits, i(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, builder.or_(bits, i(0x400000)), rounded)
    return builder.trunc(builder.lshr(kept, i(16)), ir.VectorType(I16, lanes))


def f32_to_f16(builder: Any, value: Any) -> Any:
    return builder.fptrunc(value, ir.VectorType(F16, value.type.count))


def e4m3_to_f32(builder: Any, bits: Any) -> Any:
    """As halves: the fields fit when shifted by 7, and the exponents differ by 8.

    A subnormal becomes a subnormal half, so it is exact too. 0x7F and 0xFF are NaN.
    """
    lanes = bits.type.count

    def i(value: int) -> Any:
        return constant(I16, lanes, value)

    wide = builder.zext(bits, ir.VectorType(I16, lanes))
    sign = builder.shl(builder.and_(wide, i(0x80)), i(8))
    rest = builder.and_(wide, i(0x7F))
    half = builder.bitcast(builder.or_(sign, builder.shl(rest, i(7))), ir.VectorType(F16, lanes))
    value = builder.fpext(half, ir.VectorType(F32, lanes))
    scaled = builder.fmul(value, constant(F32, lanes, 256.0))
    is_nan = builder.icmp_unsigned("==", rest, i(0x7F))
    return builder.select(is_nan, constant(F32, lanes, float("nan")), scaled)


def e5m2_to_f32(builder: Any, bits: Any) -> Any:
    """The upper byte of a half."""
    lanes = bits.type.count
    wide = builder.zext(bits, ir.VectorType(I16, lanes))
    half = builder.bitcast(builder.shl(wide, constant(I16, lanes, 8)), ir.VectorType(F16, lanes))
    return builder.fpext(half, ir.VectorType(F32, lanes))


def _convert(element: ir.Type, to_f32: Callable[[Any, Any], Any], result: Vector = f32x8) -> Any:
    kind = ir.VectorType(element, result.ir.count)
    return operation(result, (address,), lambda b, p: to_f32(b, load(b, p, kind)))


load_f32x8 = operation(f32x8, (address,), lambda b, p: load(b, p, f32x8.ir))
load_f32x16 = operation(f32x16, (address,), lambda b, p: load(b, p, f32x16.ir))
load_f16x8 = _convert(F16, lambda b, x: b.fpext(x, f32x8.ir))
load_f16x16 = _convert(F16, lambda b, x: b.fpext(x, f32x16.ir), f32x16)
load_bf16x8, load_bf16x16 = _convert(I16, bf16_to_f32), _convert(I16, bf16_to_f32, f32x16)
load_e4m3x8, load_e4m3x16 = _convert(I8, e4m3_to_f32), _convert(I8, e4m3_to_f32, f32x16)
load_e5m2x8 = _convert(I8, e5m2_to_f32)
broadcast_f32 = operation(f32x8, (address,), lambda b, p: splat(b, load(b, p, F32), 8))
"""One float32 of memory in all lanes."""

store_f32x8 = operation(types.void, (address, f32x8), store)
store_f32x16 = operation(types.void, (address, f32x16), store)
# Of 8 lanes or 16:
store_lanes = operation(types.void, (address, None), store)
store_as_f16 = operation(types.void, (address, None), lambda b, p, x: store(b, p, f32_to_f16(b, x)))
store_as_bf16 = operation(
    types.void, (address, None), lambda b, p, x: store(b, p, f32_to_bf16(b, x))
)

splat_f32 = operation(f32x8, (f32,), lambda b, x: splat(b, x, 8))
zero_f32x8 = operation(f32x8, (), lambda b: constant(F32, 8, 0.0))
# Of vectors with 8 lanes or 16:
add = operation(None, (None, None), lambda b, x, y: b.fadd(x, y))
sub = operation(None, (None, None), lambda b, x, y: b.fsub(x, y))
mul = operation(None, (None, None), lambda b, x, y: b.fmul(x, y))
div = operation(None, (None, None), lambda b, x, y: b.fdiv(x, y))
maximum = operation(None, (None, None), _larger)
minimum = operation(None, (None, None), _smaller)

negative = operation(None, (None,), lambda b, x: b.fneg(x))
fma = operation(None, (None, None, None), emit_fma)
"""``x * y + z``, rounded once."""

join_f32 = operation(f32x16, (f32x8, f32x8), join)

fma_f32 = operation(f32, (f32, f32, f32), lambda b, x, y, z: call(b, "llvm.fma.f32", F32, x, y, z))
sqrt_f32 = operation(f32, (f32,), lambda b, x: call(b, "llvm.sqrt.f32", F32, x))
absolute = operation(
    None, (None,), lambda b, x: call(b, f"llvm.fabs.v{x.type.count}f32", x.type, x)
)
copy_sign = operation(
    None,
    (None, None),
    lambda b, x, y: call(b, f"llvm.copysign.v{x.type.count}f32", x.type, x, y),
)
"""``|x|`` with the sign of ``y``."""

hsum = operation(f32, (f32x8,), lambda b, x: reduce(b, x, b.fadd))
"""Sum of the lanes, always as the same tree."""

hmax = operation(f32, (f32x8,), lambda b, x: reduce(b, x, lambda y, z: _larger(b, y, z)))
first_lane = operation(f32, (f32x8,), lambda b, x: b.extract_element(x, I32(0)))

splat_f32x16 = operation(f32x16, (f32,), lambda b, x: splat(b, x, 16))
hmax_f32x16 = operation(f32, (f32x16,), lambda b, x: reduce(b, x, lambda y, z: _larger(b, y, z)))
low_half = operation(
    f32x8, (f32x16,), lambda b, x: b.shuffle_vector(x, x, constant(I32, 8, range(8)))
)
high_half = operation(
    f32x8, (f32x16,), lambda b, x: b.shuffle_vector(x, x, constant(I32, 8, range(8, 16)))
)


to_scalar_f32 = operation(f32, (i64,), lambda b, x: b.sitofp(x, F32))
"""An int as a float32: what Python's own conversion would make a float64."""


def _is_first(builder: Any, count: Any, lanes: int) -> Any:
    """A mask of the first `count` lanes."""
    wanted = splat(builder, builder.trunc(count, I32), lanes)
    return builder.icmp_signed("<", constant(I32, lanes, range(lanes)), wanted)


def _store_first(builder: Any, where: Any, value: Any, count: Any) -> None:
    lanes = value.type.count
    pointer = builder.inttoptr(where, value.type.as_pointer())
    name, mask = f"llvm.masked.store.v{lanes}f32.p0", _is_first(builder, count, lanes)
    call(builder, name, ir.VoidType(), value, pointer, I32(1), mask)


def _load_first(builder: Any, where: Any, count: Any, lanes: int) -> Any:
    kind, zeros = ir.VectorType(F32, lanes), constant(F32, lanes, 0.0)
    pointer = builder.inttoptr(where, kind.as_pointer())
    name, mask = f"llvm.masked.load.v{lanes}f32.p0", _is_first(builder, count, lanes)
    return call(builder, name, kind, pointer, I32(1), mask, zeros)


load_first = operation(f32x8, (address, i64), partial(_load_first, lanes=8))
load_first_of_16 = operation(f32x16, (address, i64), partial(_load_first, lanes=16))
"""Load the first `count` lanes only; the others are zero."""

store_first = operation(types.void, (address, None, i64), _store_first)
"""Store the first `count` lanes only, of 8 or 16."""


def _first_lanes(builder: Any, value: Any, count: Any) -> Any:
    return builder.select(_is_first(builder, count, 8), value, constant(F32, 8, 0.0))


first_lanes = operation(f32x8, (f32x8, i64), _first_lanes)
"""The first `count` lanes, and zero in the others."""

LOG2_E = 1.4426950408889634
# ln 2 in two parts, so that n * ln 2 is exact to 2**-33 for every n that occurs.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
# Minimax coefficients of (exp(r) - 1 - r) / r**2 on [-ln 2 / 2, ln 2 / 2], highest first.
# Cody and Waite 1980; the numbers are those of the Cephes library's expf.
EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2)
EXP_POLYNOMIAL_END = (1.6666665459e-1, 5.0000001201e-1)
ROUNDING_SHIFT = 1.5 * 2.0**23
EXP_LARGEST, EXP_SMALLEST = 88.3762626647949, -87.3365447504


def emit_exp(b: Any, x: Any) -> Any:
    """``exp`` to 2 units in the last place; 0 below -87.3, 2.4e38 above 88.4, NaN of NaN."""

    lanes = x.type.count

    def f(value: float) -> Any:
        return constant(F32, lanes, value)

    madd = partial(emit_fma, b)
    # Not from below: whatever the rest makes of less, the last line drops it.
    clamped = _smaller(b, x, f(EXP_LARGEST))
    # Near 1.5 * 2**23 the floats are the whole numbers, so the sum rounds, and the last bits
    # of its pattern are the integer: AVX2 has no conversion that takes a NaN, and LLVM's own
    # (fptosi.sat) goes lane by lane, which made exp four times as slow.
    shifted = madd(clamped, f(LOG2_E), f(ROUNDING_SHIFT))
    n = b.fsub(shifted, f(ROUNDING_SHIFT))
    r = madd(n, f(-LN2_LOW), madd(n, f(-LN2_HIGH), clamped))
    p = f(EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:] + EXP_POLYNOMIAL_END:
        p = madd(p, r, f(coefficient))
    p = b.fadd(madd(b.fmul(r, r), p, r), f(1.0))
    # Whatever the bits of a NaN give here, the product is NaN.
    whole = ir.VectorType(I32, lanes)
    bits = b.sub(b.bitcast(shifted, whole), b.bitcast(f(ROUNDING_SHIFT), whole))
    power = b.shl(b.add(bits, constant(I32, lanes, 127)), constant(I32, lanes, 23))
    result = b.fmul(p, b.bitcast(power, x.type))
    return b.select(b.fcmp_ordered("<", x, f(EXP_SMALLEST)), f(0.0), result)


exp = operation(None, (None,), emit_exp)
"""Of vectors with 8 lanes or 16."""

# ---- integers -----------------------------------------------------------------------------

load_u8x8_i32 = operation(
    i32x8, (address,), lambda b, p: b.zext(load(b, p, ir.VectorType(I8, 8)), i32x8.ir)
)
store_i32x8 = operation(types.void, (address, i32x8), store)
store_i32x16 = operation(types.void, (address, i32x16), store)
splat_i32 = operation(i32x8, (i32,), lambda b, x: splat(b, x, 8))
zero_i32x8 = operation(i32x8, (), lambda b: constant(I32, 8, 0))
and_i32 = operation(i32x8, (i32x8, i32x8), lambda b, x, y: b.and_(x, y))
or_i32 = operation(i32x8, (i32x8, i32x8), lambda b, x, y: b.or_(x, y))
shl_i32 = operation(i32x8, (i32x8, i32), lambda b, x, n: b.shl(x, splat(b, n, 8)))
shr_i32 = operation(i32x8, (i32x8, i32), lambda b, x, n: b.lshr(x, splat(b, n, 8)))
hsum_i32 = operation(i32, (i32x8,), lambda b, x: reduce(b, x, b.add))
to_f32 = operation(f32x8, (i32x8,), lambda b, x: b.sitofp(x, f32x8.ir))

abs_bits = operation(
    i32x8, (f32x8,), lambda b, x: b.and_(b.bitcast(x, i32x8.ir), constant(I32, 8, 0x7FFFFFFF))
)
"""The bits of ``|x|``: as integers they order like the numbers, and a NaN is the largest."""

max_i32 = operation(i32x8, (i32x8, i32x8), lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y))
hmax_bits = operation(
    f32,
    (i32x8,),
    lambda b, x: b.bitcast(
        reduce(b, x, lambda y, z: b.select(b.icmp_signed(">", y, z), y, z)), F32
    ),
)
"""The largest of some `abs_bits`, as a number again."""
