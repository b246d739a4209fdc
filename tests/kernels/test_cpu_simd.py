"""SIMD operations one by one, against numpy and torch."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")
from octavo_kernels.cpu import simd  # noqa: E402 - it needs numba


def _convert(load, size):
    @numba.njit
    def run(source, target, count):
        for i in range(0, count, 8):
            simd.store_f32x8(target + 4 * i, load(source + size * i))

    return run


def _through(load, bits):
    out = np.empty(bits.size, np.float32)
    _convert(load, bits.itemsize)(bits.ctypes.data, out.ctypes.data, bits.size)
    return out


@pytest.mark.parametrize(
    ("load", "dtype", "bits"),
    [
        (simd.load_f16x8, torch.float16, np.arange(1 << 16, dtype=np.uint16)),
        (simd.load_bf16x8, torch.bfloat16, np.arange(1 << 16, dtype=np.uint16)),
        (simd.load_e4m3x8, torch.float8_e4m3fn, np.arange(256, dtype=np.uint8)),
        (simd.load_e5m2x8, torch.float8_e5m2, np.arange(256, dtype=np.uint8)),
    ],
    ids=["f16", "bf16", "e4m3", "e5m2"],
)
def test_every_bit_pattern_converts_like_torch(load, dtype, bits):
    expected = torch.from_numpy(bits.copy()).view(dtype).float().numpy()
    np.testing.assert_array_equal(_through(load, bits), expected)


@pytest.mark.parametrize(
    ("store", "dtype"),
    [(simd.store_f16x8, torch.float16), (simd.store_bf16x8, torch.bfloat16)],
    ids=["f16", "bf16"],
)
def test_rounding_is_torchs(store, dtype):
    @numba.njit
    def run(source, target, count):
        for i in range(0, count, 8):
            store(target + 2 * i, simd.load_f32x8(source + 4 * i))

    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[:6] = 0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000, 0x80000000, 0x33000000
    values = bits.view(np.float32)
    values = values[~np.isnan(values)][: values.size // 16 * 8]
    values = np.concatenate((values, np.full(8, np.nan, np.float32)))
    out = np.empty(values.size, np.uint16)
    run(values.ctypes.data, out.ctypes.data, values.size)
    expected = torch.from_numpy(values).to(dtype)
    result = torch.from_numpy(out).view(dtype)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_exp_is_good_to_two_units_in_the_last_place():
    @numba.njit
    def run(source, target, count):
        for i in range(0, count, 8):
            simd.store_f32x8(target + 4 * i, simd.exp(simd.load_f32x8(source + 4 * i)))

    x = np.linspace(-87.3, 88.3, 80_000, dtype=np.float32)
    out = np.empty_like(x)
    run(x.ctypes.data, out.ctypes.data, x.size)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / np.spacing(exact.astype(np.float32))) < 2
    special = np.array([-np.inf, -100, -88, 0, 100, np.inf, np.nan, -0.0], np.float32)
    run(special.ctypes.data, out.ctypes.data, 8)
    assert out[:4].tolist() == [0, 0, 0, 1]
    assert np.all(out[4:6] > 2e38)
    assert np.isnan(out[6])
    assert out[7] == 1


def test_sums_and_maxima_of_lanes():
    @numba.njit
    def run(source, target):
        x = simd.load_f32x8(source)
        simd.store_f32(target, simd.hsum(x))
        simd.store_f32(target + 4, simd.hmax(x))
        simd.store_f32(target + 8, simd.hmax_bits(simd.abs_bits(x)))
        simd.store_f32(target + 12, simd.hsum(simd.first_lanes(x, 3)))

    x = np.array([1, -20, 3, 4, 5, 6, 7, 8.5], np.float32)
    out = np.empty(4, np.float32)
    run(x.ctypes.data, out.ctypes.data)
    assert out.tolist() == [14.5, 8.5, 20, -16]
    x[3] = np.nan
    run(x.ctypes.data, out.ctypes.data)
    assert np.isnan(out[[0, 2]]).all()


DOT_PRODUCTS = """
import numba, numpy as np
from octavo_kernels.cpu import simd

@numba.njit
def run(weights, activations, out):
    simd.store_i32x8(out, simd.dot_nibbles(weights, activations))
    simd.store_i32x8(out + 32, simd.dot_bytes(weights + 128, activations))

rng = np.random.default_rng(0)
out = np.empty(16, np.int32)
for case in range(50):
    nibbles = rng.integers(0, 256, 128, dtype=np.uint8)
    signed = rng.integers(-128, 128, 256, dtype=np.int8)
    activations = rng.integers(-127, 128, 32, dtype=np.int8)
    if case == 0:
        nibbles[:], signed[:], activations[:] = 255, -128, -127
    if case == 1:
        nibbles[:], signed[:], activations[:] = 255, 127, 127
    weights = np.concatenate((nibbles, signed.view(np.uint8)))
    run(weights.ctypes.data, activations.ctypes.data, out.ctypes.data)
    packed = nibbles.reshape(4, 8, 4)  # [vector, row, weight]
    unpacked = np.concatenate((packed & 15, packed >> 4)).astype(np.int64)
    expected = np.einsum("vrw,vw->r", unpacked, activations.reshape(8, 4).astype(np.int64))
    assert np.array_equal(out[:8], expected), (case, out[:8], expected)
    expected = np.einsum(
        "vrw,vw->r", signed.reshape(8, 8, 4).astype(np.int64), activations.reshape(8, 4)
    )
    assert np.array_equal(out[8:], expected), (case, out[8:], expected)
print(simd.LOWERING)
"""


@pytest.mark.parametrize("lowering", ["", "generic"])
def test_dot_products_are_exact_in_every_lowering(lowering):
    environment = {**os.environ, "OCTAVO_CPU_LOWERING": lowering}
    command = [sys.executable, "-c", DOT_PRODUCTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (lowering or simd.LOWERING)
