"""SIMD values for numba: vector types and the one-line operations that kernels are made of.

An operation is an LLVM instruction or a few of them, so a kernel stays Python source
and runs what a C++ author would get from intrinsics. Addresses are int64, in bytes,
and need no alignment. Vectors have 8 lanes of 32 bits; LLVM splits them where
registers are narrower (SSE, NEON).

All of it is portable IR but one thing, the dot product of bytes, which no plain IR
turns into the right instruction: `LOWERING` names how it is done here. Its results are
integers and equal in every lowering.

No operation carries fast-math flags: what is summed in which order is what the source
says, so a row's result does not depend on the batch around it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


f32x8, i32x8, f32x16 = Vector(F32, 8), Vector(I32, 8), Vector(F32, 16)
i16x16, i8x32 = Vector(I16, 16), Vector(I8, 32)
address, i64, i32, f32 = types.int64, types.int64, types.int32, types.float32


LOWERINGS = ("vnni", "avx2", "generic")


def _lowering() -> str:
    forced = os.environ.get("OCTAVO_CPU_LOWERING", "")
    features = binding.get_host_cpu_features()
    if forced:
        if forced not in LOWERINGS:
            raise ValueError(
                f"OCTAVO_CPU_LOWERING is {forced!r}; it must be one of {', '.join(LOWERINGS)}"
            )
        return forced
    if features.get("avxvnni") or (features.get("avx512vnni") and features.get("avx512vl")):
        return "vnni"
    return "avx2" if features.get("avx2") else "generic"


LOWERING = _lowering()
"""``vnni``, ``avx2`` or ``generic``; ``OCTAVO_CPU_LOWERING`` forces one (for tests)."""


def _most_lanes() -> int:
    features = binding.get_host_cpu_features()
    return 16 if LOWERING == "vnni" and features.get("avx512vl") else 8


MOST_LANES = _most_lanes()
"""Lanes of a register: 8, or 16 where there are 32 registers of 512 bits. Vectors of 16 lanes work
everywhere; this says how many of them a kernel can hold."""


# ---- building blocks of the operations ----------------------------------------------------


def operation(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Any:
    """Make a numba function of up to five arguments out of a function that emits IR.

    Args:
        result: numba type of the result.
        arguments: numba types of the arguments.
        emit: Takes the IR builder and the arguments' values, returns the result's value (or
            values, where the result is a tuple).
    """
    signature = result(*arguments)

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        value = emit(builder, *values)
        if result is types.void:
            return context.get_dummy_value()
        if isinstance(result, types.UniTuple):
            return context.make_tuple(builder, result, value)
        return value

    # numba reads the number of arguments off the function, so there is one for each.
    def of_0(typing: Any) -> Any:
        return signature, generate

    def of_1(typing: Any, a: Any) -> Any:
        return signature, generate

    def of_2(typing: Any, a: Any, b: Any) -> Any:
        return signature, generate

    def of_3(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return signature, generate

    def of_4(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return signature, generate

    def of_5(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return signature, generate

    return intrinsic((of_0, of_1, of_2, of_3, of_4, of_5)[len(arguments)])


def lanewise(num_arguments: int, emit: Callable[..., Any]) -> Any:
    """Make a numba function of one or two vectors of any one type, whose result has it as well."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit(builder, *values)

    def of_1(typing: Any, a: Any) -> Any:
        return a(a), generate

    def of_2(typing: Any, a: Any, b: Any) -> Any:
        return a(a, b), generate

    return intrinsic((of_1, of_2)[num_arguments - 1])


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


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """Put one value into all lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, constant(I32, lanes, 0))


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
load_i16 = operation(i32, (address,), lambda b, p: b.sext(load(b, p, I16), I32))
load_f16 = operation(f32, (address,), lambda b, p: b.fpext(load(b, p, F16), F32))
load_bf16 = operation(
    f32, (address,), lambda b, p: b.bitcast(b.shl(b.zext(load(b, p, I16), I32), I32(16)), F32)
)
store_f32 = operation(types.void, (address, f32), store)
store_i32 = operation(types.void, (address, i32), store)
store_i64 = operation(types.void, (address, i64), store)
store_i8 = operation(types.void, (address, i32), lambda b, p, x: store(b, p, b.trunc(x, I8)))
store_i16 = operation(types.void, (address, i32), lambda b, p, x: store(b, p, b.trunc(x, I16)))
store_f16 = operation(types.void, (address, f32), lambda b, p, x: store(b, p, b.fptrunc(x, F16)))


def emit_prefetch(builder: Any, where: Any) -> None:
    pointer = builder.inttoptr(where, BYTES)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))


prefetch = operation(types.void, (address,), emit_prefetch)
"""Ask for the cache line of an address, to be read soon."""


# ---- float32 ------------------------------------------------------------------------------


def bf16_to_f32(builder: Any, bits: Any) -> Any:
    lanes = bits.type.count
    wide = builder.zext(bits, ir.VectorType(I32, lanes))
    shifted = builder.shl(wide, constant(I32, lanes, 16))
    return builder.bitcast(shifted, ir.VectorType(F32, lanes))


def f32_to_bf16(builder: Any, value: Any) -> Any:
    """Round to the nearest, ties to even; a NaN stays one."""
    bits = builder.bitcast(value, i32x8.ir)
    odd = builder.and_(builder.lshr(bits, constant(I32, 8, 16)), constant(I32, 8, 1))
    rounded = builder.add(builder.add(bits, constant(I32, 8, 0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(bits, constant(I32, 8, 0x400000))
    kept = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(kept, constant(I32, 8, 16)), ir.VectorType(I16, 8))


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


def _convert(element: ir.Type, to_f32: Callable[[Any, Any], Any]) -> Any:
    kind = ir.VectorType(element, 8)
    return operation(f32x8, (address,), lambda b, p: to_f32(b, load(b, p, kind)))


load_f32x8 = operation(f32x8, (address,), lambda b, p: load(b, p, f32x8.ir))
load_f16x8 = _convert(F16, lambda b, x: b.fpext(x, f32x8.ir))
load_bf16x8 = _convert(I16, bf16_to_f32)
load_e4m3x8 = _convert(I8, e4m3_to_f32)
load_e5m2x8 = _convert(I8, e5m2_to_f32)
load_i8x8 = _convert(I8, lambda b, x: b.sitofp(x, f32x8.ir))
load_u8x8 = _convert(I8, lambda b, x: b.uitofp(b.zext(x, i32x8.ir), f32x8.ir))
broadcast_f32 = operation(f32x8, (address,), lambda b, p: splat(b, load(b, p, F32), 8))
"""One float32 of memory in all lanes."""

store_f32x8 = operation(types.void, (address, f32x8), store)
store_f16x8 = operation(
    types.void,
    (address, f32x8),
    lambda b, p, x: store(b, p, b.fptrunc(x, ir.VectorType(F16, 8))),
)
store_bf16x8 = operation(
    types.void, (address, f32x8), lambda b, p, x: store(b, p, f32_to_bf16(b, x))
)

bits_of_f32 = operation(i32, (f32,), lambda b, x: b.bitcast(x, I32))
splat_f32 = operation(f32x8, (f32,), lambda b, x: splat(b, x, 8))
zero_f32x8 = operation(f32x8, (), lambda b: constant(F32, 8, 0.0))
add = lanewise(2, lambda b, x, y: b.fadd(x, y))
sub = lanewise(2, lambda b, x, y: b.fsub(x, y))
mul = lanewise(2, lambda b, x, y: b.fmul(x, y))
div = lanewise(2, lambda b, x, y: b.fdiv(x, y))
negative = operation(f32x8, (f32x8,), lambda b, x: b.fneg(x))
maximum = lanewise(2, _larger)
minimum = lanewise(2, _smaller)
fma = operation(
    f32x8,
    (f32x8, f32x8, f32x8),
    lambda b, x, y, z: call(b, "llvm.fma.v8f32", f32x8.ir, x, y, z),
)
"""``x * y + z``, rounded once."""

fma_f32 = operation(f32, (f32, f32, f32), lambda b, x, y, z: call(b, "llvm.fma.f32", F32, x, y, z))
sqrt_f32 = operation(f32, (f32,), lambda b, x: call(b, "llvm.sqrt.f32", F32, x))
absolute = operation(f32x8, (f32x8,), lambda b, x: call(b, "llvm.fabs.v8f32", f32x8.ir, x))
copy_sign = operation(
    f32x8, (f32x8, f32x8), lambda b, x, y: call(b, "llvm.copysign.v8f32", f32x8.ir, x, y)
)
"""``|x|`` with the sign of ``y``."""

hsum = operation(f32, (f32x8,), lambda b, x: reduce(b, x, b.fadd))
"""Sum of the lanes, always as the same tree."""

hmax = operation(f32, (f32x8,), lambda b, x: reduce(b, x, lambda y, z: _larger(b, y, z)))
first_lane = operation(f32, (f32x8,), lambda b, x: b.extract_element(x, I32(0)))

load_f32x16 = operation(f32x16, (address,), lambda b, p: load(b, p, f32x16.ir))
store_f32x16 = operation(types.void, (address, f32x16), store)
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


def _store_first(builder: Any, where: Any, value: Any, count: Any) -> None:
    lanes = constant(I32, 8, range(8))
    mask = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32), 8))
    pointer = builder.inttoptr(where, value.type.as_pointer())
    name, void = "llvm.masked.store.v8f32.p0", ir.VoidType()
    call(builder, name, void, value, pointer, I32(1), mask)


def _load_first(builder: Any, where: Any, count: Any) -> Any:
    lanes = constant(I32, 8, range(8))
    mask = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32), 8))
    pointer = builder.inttoptr(where, f32x8.ir.as_pointer())
    zeros = constant(F32, 8, 0.0)
    return call(builder, "llvm.masked.load.v8f32.p0", f32x8.ir, pointer, I32(1), mask, zeros)


load_first = operation(f32x8, (address, i64), _load_first)
"""Load the first `count` lanes only; the others are zero."""

store_first = operation(types.void, (address, f32x8, i64), _store_first)
"""Store the first `count` lanes only."""


def _first_lanes(builder: Any, value: Any, count: Any) -> Any:
    lanes = constant(I32, 8, range(8))
    kept = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32), 8))
    return builder.select(kept, value, constant(F32, 8, 0.0))


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

    def madd(p: Any, q: Any, r: Any) -> Any:
        return call(b, f"llvm.fma.v{lanes}f32", x.type, p, q, r)

    clamped = _smaller(b, _larger(b, x, f(EXP_SMALLEST)), f(EXP_LARGEST))
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


exp = lanewise(1, emit_exp)

# ---- integers -----------------------------------------------------------------------------

load_i8x32 = operation(i8x32, (address,), lambda b, p: load(b, p, i8x32.ir))
load_i32x8 = operation(i32x8, (address,), lambda b, p: load(b, p, i32x8.ir))
load_u8x8_i32 = operation(
    i32x8, (address,), lambda b, p: b.zext(load(b, p, ir.VectorType(I8, 8)), i32x8.ir)
)
load_i8x8_i32 = operation(
    i32x8, (address,), lambda b, p: b.sext(load(b, p, ir.VectorType(I8, 8)), i32x8.ir)
)
store_i32x8 = operation(types.void, (address, i32x8), store)
store_i8x8 = operation(
    types.void, (address, i32x8), lambda b, p, x: store(b, p, b.trunc(x, ir.VectorType(I8, 8)))
)
splat_i32 = operation(i32x8, (i32,), lambda b, x: splat(b, x, 8))
zero_i32x8 = operation(i32x8, (), lambda b: constant(I32, 8, 0))
add_i32 = operation(i32x8, (i32x8, i32x8), lambda b, x, y: b.add(x, y))
mul_i32 = operation(i32x8, (i32x8, i32x8), lambda b, x, y: b.mul(x, y))
and_i32 = operation(i32x8, (i32x8, i32x8), lambda b, x, y: b.and_(x, y))
or_i32 = operation(i32x8, (i32x8, i32x8), lambda b, x, y: b.or_(x, y))
shl_i32 = operation(i32x8, (i32x8, i32), lambda b, x, n: b.shl(x, splat(b, n, 8)))
shr_i32 = operation(i32x8, (i32x8, i32), lambda b, x, n: b.lshr(x, splat(b, n, 8)))
hsum_i32 = operation(i32, (i32x8,), lambda b, x: reduce(b, x, b.add))
to_f32 = operation(f32x8, (i32x8,), lambda b, x: b.sitofp(x, f32x8.ir))


def _round_to_i32(builder: Any, value: Any) -> Any:
    # Near 1.5 * 2**23 the floats are the whole numbers, so the sum rounds, and the last bits
    # of its pattern are the integer. LLVM's own conversion that takes a NaN goes lane by lane.
    shift = constant(F32, 8, ROUNDING_SHIFT)
    bits = builder.bitcast(builder.fadd(value, shift), i32x8.ir)
    return builder.sub(bits, builder.bitcast(shift, i32x8.ir))


round_to_i32 = operation(i32x8, (f32x8,), _round_to_i32)
"""The nearest integers, ties to even, of numbers between -2**22 and 2**22; any for others."""

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


# ---- dot products of bytes ----------------------------------------------------------------
# A dot product takes 32 weights of 8 rows, as eight vectors of 4 weights of each row, and
# 32 activations; lane r of the result belongs to row r.


def broadcast_bytes(builder: Any, where: Any) -> Any:
    """Four bytes of memory, eight times."""
    return builder.bitcast(splat(builder, load(builder, where, I32), 8), i8x32.ir)


def at(builder: Any, where: Any, offset: int) -> Any:
    """An address `offset` bytes on."""
    return builder.add(where, ir.Constant(I64, offset)) if offset else where


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


def dot_vnni(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Add four neighbouring products to each i32."""
    vector = i32x8.ir
    a, b = builder.bitcast(unsigned, vector), builder.bitcast(signed, vector)
    # LLVM has one name for the AVX-512 and the AVX encoding.
    return call(builder, "llvm.x86.avx512.vpdpbusd.256", vector, total, a, b)


@dataclass(frozen=True)
class Bytes:
    """What the dot products of one kind of weight are made of.

    Attributes:
        vectors: Emits IR that unpacks i8x32 number 0 to 7 of 4 weights of 8 rows each.
        signed: Whether weights may be negative.
        pairs_that_fit: How many sums of two products an i16 holds: for unsigned weights
            8 below 16 (16 * 15 * 127 = 30,480) and 4 below 32, for signed ones 1 from -128
            and 4 from -32. Activations are between -127 and 127.
    """

    vectors: Callable[[Any, Any], list[Callable[[], Any]]]
    signed: bool
    pairs_that_fit: int


def emit_dots(
    builder: Any,
    kind: Bytes,
    groups: Sequence[Any],
    activations: Sequence[Any],
    chosen: Sequence[int] = range(8),
) -> list[Any]:
    """Dot products of some vectors of weights of each group with each row of activations.

    The loop over vectors is the outer one: a vector is unpacked once for all rows, four bytes
    of activations are spread over a vector once for all groups, and both are dropped, which
    leaves registers for the sums. They come group by group, row by row.
    """
    count = len(groups) * len(activations)
    zeros = constant(I32, 8, 0)
    totals: list[Any] = [zeros if LOWERING == "vnni" else None] * count
    pairs: list[Any] = [None] * count

    def plus(total: Any, part: Any) -> Any:
        return part if total is None else builder.add(total, part)

    def add_product(n: int, weight: Any, size: Any, activation: Any, is_last: bool) -> None:
        if LOWERING == "generic":
            part = dot_generic(builder, weight, activation, first_signed=kind.signed)
            totals[n] = plus(totals[n], part)
            return
        if kind.signed:
            # |w| * (a with the sign of w): 128 * 127 * 2 still fits an i16.
            activation = call(builder, "llvm.x86.avx2.psign.b", i8x32.ir, activation, weight)
        if LOWERING == "vnni":
            totals[n] = dot_vnni(builder, totals[n], size, activation)
            return
        pairs[n] = plus(pairs[n], multiply_pairs(builder, size, activation))
        if is_last:
            totals[n] = plus(totals[n], add_pairs(builder, pairs[n]))
            pairs[n] = None

    for done, i in enumerate(chosen, 1):
        weights = [kind.vectors(builder, group)[i]() for group in groups]
        sizes = weights
        if kind.signed and LOWERING != "generic":
            sizes = [call(builder, "llvm.abs.v32i8", i8x32.ir, w, I1(0)) for w in weights]
        is_last = done % kind.pairs_that_fit == 0
        for row, where in enumerate(activations):
            activation = broadcast_bytes(builder, at(builder, where, 4 * i))
            for group, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
                n = len(activations) * group + row
                add_product(n, weight, size, activation, is_last)
        if len(groups) > 1 and done < len(chosen):
            for sums in (pairs, totals):
                sums[:] = [one if one is None else compute_now(builder, one) for one in sums]
    return totals


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


def _nibbles(builder: Any, where: Any) -> list[Callable[[], Any]]:
    """128 bytes: the low halves of the first 32 are vector 0, the high halves vector 4."""

    def vector(i: int) -> Any:
        packed = load(builder, at(builder, where, 32 * (i % 4)), i8x32.ir)
        if i < 4:
            return builder.and_(packed, constant(I8, 32, 15))
        return builder.lshr(packed, constant(I8, 32, 4))

    return [partial(vector, i) for i in range(8)]


def _fives(builder: Any, where: Any) -> list[Callable[[], Any]]:
    """Nibbles and 32 bytes of fifth bits: bit i of each belongs to vector i."""

    def vector(i: int) -> Any:
        fifths = load(builder, at(builder, where, 128), i8x32.ir)
        bit = builder.and_(builder.lshr(fifths, constant(I8, 32, i)), constant(I8, 32, 1))
        return builder.or_(_nibbles(builder, where)[i](), builder.shl(bit, constant(I8, 32, 4)))

    return [partial(vector, i) for i in range(8)]


def _sixes(builder: Any, where: Any) -> list[Callable[[], Any]]:
    """Nibbles and 64 bytes of upper pairs of bits, less 32."""

    def vector(i: int) -> Any:
        pairs = load(builder, at(builder, where, 128 + 32 * (i // 4)), i8x32.ir)
        shifted = builder.lshr(pairs, constant(I8, 32, 2 * (i % 4)))
        upper = builder.shl(builder.and_(shifted, constant(I8, 32, 3)), constant(I8, 32, 4))
        value = builder.or_(_nibbles(builder, where)[i](), upper)
        return builder.sub(value, constant(I8, 32, 32))

    return [partial(vector, i) for i in range(8)]


def _bytes(builder: Any, where: Any) -> list[Callable[[], Any]]:
    """256 bytes."""
    return [partial(load, builder, at(builder, where, 32 * i), i8x32.ir) for i in range(8)]


NIBBLES = Bytes(_nibbles, signed=False, pairs_that_fit=8)
FIVES = Bytes(_fives, signed=False, pairs_that_fit=4)
SIXES = Bytes(_sixes, signed=True, pairs_that_fit=4)
BYTES_OF_8 = Bytes(_bytes, signed=True, pairs_that_fit=1)


BY_BYTE = (0, 4, 1, 5, 2, 6, 3, 7)
"""Vectors of nibbles so ordered that both halves of a byte follow each other."""


def _four(builder: Any, where: Any, row: Any) -> list[Any]:
    """Addresses of four rows of activations, `row` bytes apart."""
    rows = [where]
    for _ in range(3):
        rows.append(builder.add(rows[-1], row))
    return rows


def _dot(kind: Bytes) -> Any:
    """``dot(weights, activations)`` of 8 rows of 32 weights."""

    def emit(builder: Any, weights: Any, where: Any) -> Any:
        return emit_dots(builder, kind, [weights], [where])[0]

    return operation(i32x8, (address, address), emit)


def _dot_4(kind: Bytes) -> Any:
    """``dot(weights, activations, row)`` with four rows of activations, `row` bytes apart."""

    def emit(builder: Any, weights: Any, where: Any, row: Any) -> Any:
        return emit_dots(builder, kind, [weights], _four(builder, where, row))

    return operation(types.UniTuple(i32x8, 4), (address, address, i64), emit)


def _dot_2x4(kind: Bytes) -> Any:
    """``dot(weights, group, activations, row)`` of two groups `group` bytes apart."""

    def emit(builder: Any, weights: Any, group: Any, where: Any, row: Any) -> Any:
        groups = [weights, builder.add(weights, group)]
        return emit_dots(builder, kind, groups, _four(builder, where, row), BY_BYTE)

    return operation(types.UniTuple(i32x8, 8), (address, i64, address, i64), emit)


def emit_scaled_halves(
    builder: Any, kind: Bytes, weights: Any, scales: Any, activations: Sequence[Any]
) -> list[Any]:
    """Dot products of 16 weights, twice, each times its int8 scale (8 bytes for 8 rows)."""
    halves = []
    for half in range(2):
        raw = load(builder, at(builder, scales, 8 * half), ir.VectorType(I8, 8))
        scale = builder.sext(raw, i32x8.ir)
        chosen = range(4 * half, 4 * half + 4)
        dots = emit_dots(builder, kind, [weights], activations, chosen)
        halves.append([builder.mul(dot, scale) for dot in dots])
    return [builder.add(first, second) for first, second in zip(*halves, strict=True)]


# Signed products need two registers more, so the sums of two groups at once don't fit.
dot_nibbles, dot_nibbles_2x4 = _dot(NIBBLES), _dot_2x4(NIBBLES)
dot_fives, dot_fives_2x4 = _dot(FIVES), _dot_2x4(FIVES)
dot_bytes, dot_bytes_4 = _dot(BYTES_OF_8), _dot_4(BYTES_OF_8)
dot_sixes = operation(
    i32x8,
    (address, address, address),
    lambda b, w, s, a: emit_scaled_halves(b, SIXES, w, s, [a])[0],
)
dot_sixes_4 = operation(
    types.UniTuple(i32x8, 4),
    (address, address, address, i64),
    lambda b, w, s, a, row: emit_scaled_halves(b, SIXES, w, s, _four(b, a, row)),
)
