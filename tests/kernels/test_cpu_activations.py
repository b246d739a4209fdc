"""Rows of float32 as int8, against the layout written out in numpy."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")
from octavo_kernels.cpu.activations import (  # noqa: E402 - it needs numba
    BLOCK,
    BLOCK_BYTES,
    quantize_row,
)

BEHIND = 64
"""Bytes behind a row that have to stay as they are."""


@numba.njit
def _quantize(source, k, target):
    quantize_row(source, k, target)


def _quantized(x):
    out = np.full(x.size // BLOCK * BLOCK_BYTES + BEHIND, 0xA5, np.uint8)
    _quantize(x.ctypes.data, x.size, out.ctypes.data)
    assert (out[-BEHIND:] == 0xA5).all()
    return out[:-BEHIND].reshape(-1, BLOCK_BYTES)


def _expected(x):
    blocks = x.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    factor = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    integers = np.rint(blocks * factor[:, None]).astype(np.int8)
    scale = largest / np.float32(127)
    total = scale * integers.sum(axis=1, dtype=np.int32).astype(np.float32)
    halves = integers.reshape(-1, 2, BLOCK // 2).sum(axis=2, dtype=np.int16)
    parts = (integers, scale[:, None], total[:, None], halves)
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 8, 18, 23])
def test_each_block_has_its_integers_scale_and_sums(blocks):
    rng = np.random.default_rng(blocks)
    x = rng.standard_normal(BLOCK * blocks, np.float32)
    x *= np.repeat(10.0 ** rng.integers(-30, 30, blocks), BLOCK).astype(np.float32)
    x[-BLOCK:] = rng.integers(-127, 128, BLOCK) / 2  # some are between two integers
    x[-1] = 127
    np.testing.assert_array_equal(_quantized(x), _expected(x))


def test_a_block_of_zeros_is_zero():
    x = np.zeros(3 * BLOCK, np.float32)
    x[BLOCK : 2 * BLOCK] = -0.0
    x[-1] = 1
    np.testing.assert_array_equal(_quantized(x), _expected(x))
    assert not _quantized(x)[:2].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_the_scale_of_its_block_alone(value):
    x = np.random.default_rng(0).standard_normal(6 * BLOCK).astype(np.float32)
    before = _quantized(x)
    x[70] = value
    after = _quantized(x)
    scale = after[2, BLOCK : BLOCK + 4].copy().view(np.float32)[0]
    assert np.isnan(scale) if np.isnan(value) else np.isposinf(scale)
    np.testing.assert_array_equal(np.delete(after, 2, axis=0), np.delete(before, 2, axis=0))
