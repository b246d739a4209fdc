"""Operations on the lanes of a vector that attention and sampling need."""

from __future__ import annotations

from typing import Any

from octavo_kernels.cpu.simd import F32, I32, constant, f32x8, i64, operation, splat

NEGATIVE_INFINITY = float("-inf")


def _keep_lanes(builder: Any, value: Any, first: Any, last: Any) -> Any:
    lanes = constant(I32, 8, range(8))
    first = splat(builder, builder.trunc(first, I32), 8)
    last = splat(builder, builder.trunc(last, I32), 8)
    inside = builder.and_(
        builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, last)
    )
    return builder.select(inside, value, constant(F32, 8, NEGATIVE_INFINITY))


keep_lanes = operation(f32x8, (f32x8, i64, i64), _keep_lanes)
"""Lanes from `first` to before `last`, minus infinity in the others."""

lowest = operation(f32x8, (), lambda b: constant(F32, 8, NEGATIVE_INFINITY))
