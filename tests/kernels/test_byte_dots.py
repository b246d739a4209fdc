"""Dot products of bytes are exact, in every lowering that the CPU can do."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")
from octavo_kernels.cpu import simd

DOT_PRODUCTS = """
import numba, numpy as np
from octavo_kernels.cpu import byte_dots, simd
from octavo_kernels.cpu.activations import BLOCK_BYTES, HALVES

rng = np.random.default_rng(0)
ROWS, GROUPS = 3, 2


def unpack(kind, data):
    # [vector, row, weight], of the layout that `PackedWeight` describes
    if kind is byte_dots.BYTES_OF_8:
        return data.view(np.int8).reshape(8, 8, 4).astype(np.int64)
    packed = data[:128].reshape(4, 8, 4)
    values = np.concatenate((packed & 15, packed >> 4)).astype(np.int64)
    upper = data[128:].reshape(-1, 8, 4).astype(np.int64)
    for i in range(8):
        if kind is byte_dots.FIVES:
            values[i] += (upper[0] >> i & 1) << 4
        if kind is byte_dots.SIXES:
            values[i] += (upper[i // 4] >> 2 * (i % 4) & 3) << 4
    return values - kind.offset


def run_of(kind):
    of_one, of_two = (byte_dots.dots_of(kind, ROWS, groups) for groups in (1, 2))

    @numba.njit
    def run(weights, scales, group, activations, out):
        dots = of_one(weights, scales, 0, activations, (0, BLOCK_BYTES, 2 * BLOCK_BYTES))
        simd.store_i32x8(out, dots[0])
        simd.store_i32x8(out + 32, dots[1])
        simd.store_i32x8(out + 64, dots[2])
        dots = of_two(weights, scales, group, activations, (0, BLOCK_BYTES, 2 * BLOCK_BYTES))
        simd.store_i32x16(out + 96, dots[0])
        simd.store_i32x16(out + 160, dots[1])
        simd.store_i32x16(out + 224, dots[2])

    return run


for kind, size in [
    (byte_dots.NIBBLES, 128),
    (byte_dots.FIVES, 160),
    (byte_dots.SIXES, 192),
    (byte_dots.BYTES_OF_8, 256),
]:
    run = run_of(kind)
    for case in range(30):
        weights = rng.integers(0, 256, (GROUPS, size), dtype=np.uint8)
        scales = rng.integers(-128, 128, (GROUPS, 2, 8), dtype=np.int8)
        x = rng.integers(-127, 128, (ROWS, 32), dtype=np.int8)
        if case < 4:
            weights[:] = (0, 127, 128, 255)[case]
            x[:] = (-127, 127)[case % 2]
            scales[:] = -128
        blocks = np.zeros((ROWS, BLOCK_BYTES), np.uint8)
        blocks[:, :32] = x.view(np.uint8)
        halves = x.reshape(ROWS, 2, 16).sum(-1).astype(np.int16)
        blocks[:, HALVES : HALVES + 4] = halves.view(np.uint8)
        data = np.concatenate((weights, scales.reshape(GROUPS, 16).view(np.uint8)), axis=1)
        out = np.empty((ROWS * 3, 8), np.int32)
        run(
            data.ctypes.data,
            data.ctypes.data + size,
            data.strides[0],
            blocks.ctypes.data,
            out.ctypes.data,
        )
        expected = []
        for group in range(GROUPS):
            parts = np.einsum(
                "vrw,xvw->xvr", unpack(kind, weights[group]), x.reshape(ROWS, 8, 4).astype(np.int64)
            )
            if kind.has_scales:
                parts *= np.repeat(scales[group].astype(np.int64), 4, axis=0)
            expected.append(parts.sum(1))
        assert np.array_equal(out[:ROWS], expected[0]), (kind, case)
        both = np.concatenate(expected, axis=1)
        assert np.array_equal(out[ROWS:].reshape(ROWS, 16), both), (kind, case)
print(simd.LOWERING)
"""


@pytest.mark.parametrize("lowering", simd.LOWERINGS)
def test_dot_products_are_exact(lowering):
    environment = {**os.environ, "OCTAVO_CPU_LOWERING": lowering}
    command = [sys.executable, "-c", DOT_PRODUCTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == lowering
