"""Products with grouped, 8-bit and experts' weights in Triton against products written out."""

import pytest
import torch

from octavo_kernels import triton as kernels
from octavo_kernels.pack_weight import (
    pack_awq_weight,
    pack_dense_weight,
    pack_fp8_weight,
    pack_gptq_weight,
    pack_weight,
)
from octavo_kernels.quantize_weight import quantize_weight
from octavo_kernels.silu_and_mul import silu_and_mul_reference
from octavo_kernels.stacked_moe import stacked_moe_reference
from octavo_kernels.triton import tiles
from octavo_kernels.triton.stacked_moe import _sorted_by_expert
from octavo_kernels.unpack_weight import unpack_weight
from support.triton_interpreter import dot_row_by_row

BLOCK_BYTES = {"q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20)}
K_BYTES = {"q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210)}


def random_gguf(kind, rows, inputs):
    """Make bytes of a kind whose float16 scales are finite and small."""
    block, size = {**BLOCK_BYTES, **K_BYTES}[kind]
    raw = torch.randint(0, 256, (rows, inputs // block, size), dtype=torch.uint8)
    halves = {"q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q6_k": [208]}.get(kind, [0, 2])
    for offset in halves:
        raw[..., offset + 1] = 0x20 + raw[..., offset + 1] % 8  # 0.008 to 0.016
    return pack_weight(raw.flatten(), kind, (rows, inputs))


def check(x, weight, tolerance, bias=None, **options):
    """Compare with a float64 product of the same weights."""
    result = kernels.grouped_matmul(x, kernels.group_weight(weight), bias, **options)
    assert result.dtype == x.dtype
    expected = x.double() @ unpack_weight(weight).double().T
    if bias is not None:
        expected += bias.double()
    scale = expected.abs().mean().item()
    torch.testing.assert_close(
        result.double(), expected, rtol=tolerance, atol=tolerance * max(scale, 1e-3)
    )


@pytest.mark.parametrize("kind", [*BLOCK_BYTES, *K_BYTES])
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_gguf(kind, num_tokens):
    inputs = 256 if kind in K_BYTES else 160
    weight = random_gguf(kind, 37, inputs)
    # A slice: rows are not next to each other. Sums of 256 products in float32.
    x = torch.randn(num_tokens, inputs + 8)[:, :inputs]
    check(x, weight, 1e-4, torch.randn(37))
    if kind in BLOCK_BYTES:
        # Weights are rounded to the 8 bits of bfloat16, and the result is.
        check(x.bfloat16(), weight, 2e-2)


def random_gptq(inputs, rows, group):
    groups = inputs // group
    qweight = torch.randint(-(2**31), 2**31 - 1, (inputs // 8, rows), dtype=torch.int32)
    qzeros = torch.randint(-(2**31), 2**31 - 1, (groups, rows // 8), dtype=torch.int32)
    return qweight, qzeros, (0.01 + torch.rand(groups, rows)).half()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_gptq(group):
    weight = pack_gptq_weight(*random_gptq(256, 40, group))
    assert kernels.group_weight(weight).group_size == group
    check(torch.randn(3, 256), weight, 1e-4)
    check(torch.randn(20, 256).half(), weight, 3e-3)


def test_gptq_in_another_order_of_inputs():
    index = torch.randperm(128) % 4
    weight = pack_gptq_weight(*random_gptq(128, 16, 32), group_index=index)
    assert weight.input_order is not None
    check(torch.randn(3, 128), weight, 1e-4)


def test_awq():
    qweight = torch.randint(-(2**31), 2**31 - 1, (128, 5), dtype=torch.int32)
    qzeros = torch.randint(-(2**31), 2**31 - 1, (1, 5), dtype=torch.int32)
    weight = pack_awq_weight(qweight, qzeros, (0.01 + torch.rand(1, 40)).half())
    check(torch.randn(3, 128), weight, 1e-4)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("scales", [(), (40,), (1, 2)], ids=str)
def test_fp8(scales, native, monkeypatch):
    monkeypatch.setattr(tiles, "has_fp8_e4m3", lambda: native)
    raw = torch.randn(40, 144).to(torch.float8_e4m3fn)
    check(torch.randn(3, 144), pack_fp8_weight(raw, 0.1 + torch.rand(scales)), 1e-4)


def test_a_rows_bits_do_not_depend_on_the_batch(monkeypatch):
    dot_row_by_row(monkeypatch)
    weight = kernels.group_weight(random_gguf("q4_1", 20, 96))
    x = torch.randn(70, 96)
    whole = kernels.grouped_matmul(x, weight, batch_invariant=True)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 21)):
        part = kernels.grouped_matmul(x[rows], weight, batch_invariant=True)
        assert torch.equal(part, whole[rows])


def test_the_invariant_tile_is_one():
    for target in tiles.ARCHITECTURES:
        for size in (2, 4):
            found = {tiles.matmul(target, count, size, True) for count in (1, 17, 65, 5000)}
            assert len(found) == 1


@pytest.mark.parametrize("shape", [(1, 16, 32), (17, 33, 160), (70, 40, 100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scaled_products(shape, dtype):
    num_tokens, rows, inputs = shape
    x, bias = torch.randn(num_tokens, inputs + 3)[:, :inputs], torch.randn(rows)
    wide = torch.randn(rows, inputs)
    largest = {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]
    scales = wide.abs().amax(1) / largest
    weight = (wide / scales[:, None]).round().clamp(-largest, largest).to(dtype)
    codes, token_scales = kernels.quantize_rows(x, dtype)
    expected_scales = x.abs().amax(1) / largest
    torch.testing.assert_close(token_scales, expected_scales, rtol=1e-6, atol=0)
    back = codes.float() * token_scales[:, None]
    # Half a step: 1/254 of the largest for int8, 1/16 of the number for e4m3.
    step = expected_scales[:, None] / 2 if dtype == torch.int8 else x.abs() / 15 + 1e-3
    assert ((back - x).abs() <= step * 1.001).all()
    result = kernels.scaled_matmul(x, weight, scales, bias)
    expected = back.double() @ (weight.double() * scales.double()[:, None]).T + bias.double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["q4_0", "w8a8", "bf16"])
def test_packed_weights_are_laid_out_once(kind):
    wide = torch.randn(24, 64)
    weight = pack_dense_weight(wide.bfloat16()) if kind == "bf16" else quantize_weight(wide, kind)
    x, bias = torch.randn(3, 64), torch.randn(24)
    results = [kernels.quantized_matmul(x, weight, bias) for _ in range(2)]
    assert torch.equal(*results)
    expected = x @ unpack_weight(weight).T + bias
    # w8a8 rounds activations to 1/254 of a row's largest.
    limit = 0.15 if kind == "w8a8" else 1e-4
    torch.testing.assert_close(results[0], expected, rtol=limit, atol=limit)


def test_nothing_to_multiply():
    weight = kernels.group_weight(quantize_weight(torch.randn(16, 32), "q8_0"))
    assert kernels.grouped_matmul(torch.empty(0, 32), weight).shape == (0, 16)
    scaled = kernels.scaled_matmul(torch.empty(0, 32), torch.ones(4, 32).to(torch.int8), None)
    assert scaled.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 8), (9, 4), (40, 3)])
@pytest.mark.parametrize("has_biases", [False, True], ids=["", "biases"])
def test_experts(num_tokens, num_experts, dtype, has_biases):
    hidden, intermediate, num_chosen = 40, 24, 2
    x = torch.randn(num_tokens, hidden + 1)[:, :hidden].to(dtype)
    gate_up = (0.2 * torch.randn(num_experts, 2 * intermediate, hidden)).to(dtype)
    down = (0.2 * torch.randn(num_experts, hidden, intermediate)).to(dtype)
    ids = torch.rand(num_tokens, num_experts).topk(num_chosen).indices
    weights = torch.rand(num_tokens, num_chosen)
    biases = {}
    if has_biases:
        biases = {
            "gate_up_bias": torch.randn(num_experts, 2 * intermediate).to(dtype),
            "down_bias": torch.randn(num_experts, hidden).to(dtype),
        }
    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for token in range(num_tokens):
        for choice in range(num_chosen):
            expert = ids[token, choice]
            both = gate_up[expert].double() @ x[token].double()
            if has_biases:
                both += biases["gate_up_bias"][expert]
            gate, up = both.chunk(2)
            returned = down[expert].double() @ (torch.nn.functional.silu(gate) * up)
            if has_biases:
                returned += biases["down_bias"][expert]
            expected[token] += weights[token, choice] * returned
    arguments = x, gate_up, down, weights, ids
    result = kernels.stacked_moe(*arguments, kernels.silu_and_mul, **biases)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)
    # The twin's numbers are the same before they are rounded.
    twin = stacked_moe_reference(
        *(part.float() for part in arguments[:3]),
        weights,
        ids,
        silu_and_mul_reference,
        **{name: bias.float() for name, bias in biases.items()},
    )
    torch.testing.assert_close(twin.double(), expected, rtol=1e-5, atol=1e-5)


def test_all_tokens_to_one_expert_and_none():
    x, gate_up, down = torch.randn(5, 16), torch.randn(3, 32, 16), torch.randn(3, 16, 16)
    ids, weights = torch.full((5, 1), 2), torch.ones(5, 1)
    gate, up = (x @ gate_up[2].T).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ down[2].T
    activation = kernels.silu_and_mul
    result = kernels.stacked_moe(x, gate_up, down, weights, ids, activation)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    nothing = kernels.stacked_moe(x[:0], gate_up, down, weights[:0], ids[:0], activation)
    assert nothing.shape == (0, 16)


def test_experts_that_lie_apart_from_each_other():
    """As they do between the buffers of offloaded layers."""
    x, memory = torch.randn(7, 16), torch.randn(3, 40, 16)
    gate_up, down = memory[:, :32], torch.randn(3, 20, 16)[:, :16]
    ids, weights = torch.rand(7, 3).topk(2).indices, torch.rand(7, 2)
    arguments = weights, ids, kernels.silu_and_mul
    result = kernels.stacked_moe(x, gate_up, down, *arguments)
    expected = kernels.stacked_moe(x, gate_up.contiguous(), down.contiguous(), *arguments)
    assert torch.equal(result, expected)


def test_the_order_of_experts_is_found_without_waiting_for_the_device():
    """Tensors without numbers raise where the host would ask for one."""
    ids = torch.empty(9, 2, dtype=torch.int64, device="meta")
    order, starts = _sorted_by_expert(ids, 5)
    assert (order.shape, starts.shape) == ((18,), (6,))
