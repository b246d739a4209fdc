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
    [(simd.store_as_f16, torch.float16), (simd.store_as_bf16, torch.bfloat16)],
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


def test_a_lowering_that_the_cpu_cannot_do_is_refused():
    environment = {**os.environ, "OCTAVO_CPU_LOWERING": "avx9"}
    command = [sys.executable, "-c", "import octavo_kernels.cpu.simd"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    possible = ", ".join(simd.LOWERINGS)
    assert f"OCTAVO_CPU_LOWERING is 'avx9'; on this CPU it can be {possible}" in done.stderr


def test_two_vectors_joined():
    @numba.njit
    def run(source, target, count):
        x = simd.join_f32(simd.load_f32x8(source), simd.load_f32x8(source + 64))
        x = simd.add(x, simd.load_first_of_16(source, count))
        simd.store_first(target, simd.mul(x, x), count)

    x, out = np.arange(24, dtype=np.float32), np.full(16, -1, np.float32)
    run(x.ctypes.data, out.ctypes.data, 11)
    joined = np.concatenate((x[:8], x[16:]))
    np.testing.assert_array_equal(out[:11], (joined + x[:16])[:11] ** 2)
    assert (out[11:] == -1).all()
