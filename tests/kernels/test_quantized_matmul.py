"""The projection over packed weights: against its twin, and one row against many."""

import os
import subprocess
import sys

import pytest
import torch

from octavo_kernels import (
    pack_dense_weight,
    pack_fp8_weight,
    pack_gptq_weight,
    pack_weight,
    quantize_weight,
    quantized_matmul,
    unpack_weight,
)
from octavo_kernels.cpu import threads
from octavo_kernels.multiply import quantized_bytes
from octavo_kernels.quantized_matmul import quantized_matmul_reference
from support.weights import gguf_weight, gptq_weight

KINDS = (
    *("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k"),
    *("w8a8", "u4z", "u4z-ordered", "f32", "bf16", "f16", "e4m3", "e4m3-blocks"),
)
# Kernel and twin add the same float32 numbers in another order: 1e-4 of the largest is what
# the engine asks for, and 2e-6 what a few hundred additions leave.
TOLERANCE = 5e-6


def _weight(kind, rows, inputs):
    if kind in ("w8a8", "q8_0", "q4_0"):
        return quantize_weight(torch.randn(rows, inputs), kind)
    if kind.startswith("u4z"):
        filled = -(-rows // 8) * 8
        parts = gptq_weight(inputs, filled, 64, kind.endswith("ordered"))
        return pack_gptq_weight(*parts[:4])
    if kind == "e4m3":
        weight = torch.randn(rows, inputs).to(torch.float8_e4m3fn)
        return pack_fp8_weight(weight, torch.rand(rows) + 0.5)
    if kind == "e4m3-blocks":
        weight = torch.randn(rows, inputs).to(torch.float8_e4m3fn)
        return pack_fp8_weight(weight, torch.rand(-(-rows // 128), -(-inputs // 128)) + 0.5)
    if kind in ("f32", "bf16", "f16"):
        types = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        return pack_dense_weight(torch.randn(rows, inputs).to(types[kind]))
    return pack_weight(gguf_weight(kind, (rows, inputs))[0], kind, (rows, inputs))


def _assert_close(result, expected):
    assert result.shape == expected.shape
    assert (result - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_and_twin_agree(kind, num_tokens):
    for rows, inputs in [(1, 256), (40, 512), (43, 768)]:
        weight = _weight(kind, rows, inputs)
        x, bias = torch.randn(num_tokens, inputs), torch.randn(weight.shape[0])
        expected = quantized_matmul_reference(x, weight, bias)
        _assert_close(quantized_matmul(x, weight, bias), expected)
        _assert_close(weight(x), quantized_matmul_reference(x, weight))


@pytest.mark.parametrize("kind", ["f32", "bf16", "e4m3"])
@pytest.mark.parametrize("inputs", [1, 31, 257, 700])
def test_dense_weights_may_have_any_number_of_inputs(kind, inputs):
    weight, x = _weight(kind, 19, inputs), torch.randn(6, inputs)
    _assert_close(quantized_matmul(x, weight), x @ unpack_weight(weight).t())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_every_batch_and_on_any_number_of_threads(kind):
    weight = _weight(kind, 72, 512)
    x, bias = torch.randn(64, 512), torch.randn(72)
    alone = torch.cat([quantized_matmul(row.unsqueeze(0), weight, bias) for row in x])
    try:
        for num_threads in (1, 2, 3):
            threads.set_num_threads(num_threads)
            for size in (*range(1, 18), 31, 32, 33, 63, 64):
                assert torch.equal(quantized_matmul(x[:size], weight, bias), alone[:size]), size
            pieces = [quantized_matmul(piece, weight, bias) for piece in x.split([7, 1, 40, 16])]
            assert torch.equal(torch.cat(pieces), alone)
    finally:
        threads.set_num_threads(threads.default_num_threads())


def test_large_products_agree_in_every_chunk():
    weight = _weight("q4_1", 1096, 2048)
    x = torch.randn(130, 2048)
    result = quantized_matmul(x, weight)
    _assert_close(result, quantized_matmul_reference(x, weight))
    assert torch.equal(quantized_matmul(x[77:78], weight), result[77:78])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_in_and_out(dtype):
    weight, x = _weight("q8_0", 24, 64), torch.randn(5, 64).to(dtype)
    result = quantized_matmul(x, weight)
    assert result.dtype == dtype
    assert torch.equal(result, quantized_matmul(x.float(), weight).to(dtype))


def test_views_are_read_where_they_lie():
    weight, wide = _weight("q4_1", 24, 64), torch.randn(7, 200)
    for x in (wide[::2, 5:69], torch.randn(64, 4).t(), torch.randn(1, 64).expand(3, 64)):
        assert torch.equal(quantized_matmul(x, weight), quantized_matmul(x.clone(), weight))


def test_extremes_of_activations():
    weight = _weight("q8_0", 8, 64)
    x = torch.zeros(4, 64)
    x[1] = 1e30
    x[2, 3], x[3, 40] = float("inf"), float("nan")
    result = quantized_matmul(x, weight)
    assert (result[0] == 0).all()
    _assert_close(result[1:2], quantized_matmul_reference(x, weight)[1:2])
    assert not result[2:].isfinite().any()


def test_no_tokens_and_wrong_shapes():
    weight = _weight("q8_0", 8, 64)
    assert quantized_matmul(torch.zeros(0, 64), weight).shape == (0, 8)
    with pytest.raises(ValueError, match=r"x has the shape \[2, 32\]; in_features is 64"):
        quantized_matmul(torch.zeros(2, 32), weight)


PRODUCTS = """
import sys, torch
from octavo_kernels import quantize_weight, pack_weight, quantized_matmul
torch.manual_seed(0)
x = torch.randn(13, 256)
results = [quantized_matmul(x, quantize_weight(torch.randn(24, 256), k)) for k in ("q8_0", "q4_0")]
raw = torch.randint(0, 256, (8, 210), dtype=torch.uint8)
raw[:, 208:] = torch.tensor([0, 20], dtype=torch.uint8)
results.append(quantized_matmul(x, pack_weight(raw.flatten(), "q6_k", (8, 256))))
sys.stdout.buffer.write(b"".join(r.numpy().tobytes() for r in results))
"""


def test_every_cpu_gets_the_same_bits():
    pytest.importorskip("numba")
    from octavo_kernels.cpu.simd import LOWERINGS

    outputs = []
    for lowering in LOWERINGS:
        environment = {**os.environ, "OCTAVO_CPU_LOWERING": lowering}
        command = [sys.executable, "-c", PRODUCTS]
        outputs.append(subprocess.run(command, env=environment, capture_output=True, check=True))
    assert len(outputs[0].stdout) == 4 * 13 * (24 + 24 + 8)
    assert len({output.stdout for output in outputs}) == 1


def test_scratch_has_room_for_the_kernels_blocks():
    pytest.importorskip("numba")
    from octavo_kernels.cpu.activations import BLOCK, BLOCK_BYTES

    assert quantized_bytes(3 * BLOCK) == 3 * BLOCK_BYTES


def test_the_twin_can_be_forced(monkeypatch):
    weight, x = _weight("q4_0", 40, 512), torch.randn(9, 512)
    monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    assert torch.equal(quantized_matmul(x, weight), quantized_matmul_reference(x, weight))
