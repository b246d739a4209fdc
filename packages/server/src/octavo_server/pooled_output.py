"""Pooled vectors as numbers. The front has no torch, and needs none for this."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence

from octavo_core.errors import RequestFailedError
from octavo_core.pooling_params import PooledOutput


def to_numbers(pooled: PooledOutput) -> list[float]:
    """Return all numbers of an output, row by row.

    Raises:
        RequestFailedError: One is NaN or infinite, for which JSON has no word.
    """
    values = array("f")
    values.frombytes(pooled.data)
    if sys.byteorder == "big":
        values.byteswap()
    numbers = values.tolist()
    if not all(map(math.isfinite, numbers)):
        raise RequestFailedError("the model computed a number that is NaN or infinite")
    return numbers


def to_rows(pooled: PooledOutput) -> list[list[float]]:
    """Return the vectors of an output that has one for each token.

    Raises:
        RequestFailedError: As in `to_numbers`.
    """
    numbers, width = to_numbers(pooled), pooled.shape[-1]
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one has no length."""
    lengths = math.hypot(*first) * math.hypot(*second)
    product = math.fsum(a * b for a, b in zip(first, second, strict=True))
    # Rounding may bring equal ones an ulp past 1.
    return max(-1.0, min(product / lengths, 1.0)) if lengths else 0.0
