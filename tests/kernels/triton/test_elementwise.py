"""Norms, rotary embedding, activations and block copies in Triton against the torch twins."""

import pytest
import torch

from octavo_kernels import triton as kernels
from octavo_kernels.rotary_embedding import rotary_embedding_reference

# Both compute in float32 and round once, so half a digit of the result's type may differ, and
# float32 by the order of some hundreds of additions, and by 1 + erf(x) where that is near zero.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SIZES = [1, 15, 16, 17, 576, 1025]


def close(result, expected):
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    limit = TOLERANCE[expected.dtype]
    torch.testing.assert_close(result, expected, rtol=limit, atol=limit)


def strided(rows, size, dtype):
    """Return ``[rows, size]`` whose rows are not next to each other."""
    return torch.randn(rows, size + 3).to(dtype)[:, 1 : size + 1]


def norm_of(x, weight, eps):
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_norms(size, dtype):
    x, residual = strided(3, size, dtype), strided(3, size, dtype)
    weight, bias = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    close(kernels.rms_norm(x, weight, 1e-5), norm_of(x, weight, 1e-5))
    result, total = kernels.fused_add_rms_norm(x, residual, weight, 1e-5)
    expected_total = x + residual
    assert torch.equal(total, expected_total)
    close(result, norm_of(expected_total, weight, 1e-5))
    expected = torch.nn.functional.layer_norm(
        x.float(), (size,), weight.float(), bias.float(), 1e-5
    )
    result, total = kernels.layer_norm(x, weight, bias, 1e-5)
    assert total is x
    close(result, expected.to(dtype))
    result, total = kernels.layer_norm(x - residual, weight, None, 1e-5, residual)
    assert torch.equal(total, (x - residual) + residual)
    expected = torch.nn.functional.layer_norm(total.float(), (size,), weight.float(), None, 1e-5)
    close(result, expected.to(dtype))


def test_norm_of_heads_and_of_nothing():
    x = torch.randn(2, 3, 16)
    close(kernels.rms_norm(x, torch.ones(16), 1e-6), norm_of(x, torch.ones(16), 1e-6))
    assert kernels.rms_norm(torch.empty(0, 16), torch.ones(16), 1e-6).shape == (0, 16)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gated_activations(size, dtype):
    x = (3 * torch.randn(3, 2 * size + 5)).to(dtype)[:, : 2 * size]
    gate, up = x.float().chunk(2, -1)
    functions = torch.nn.functional
    close(kernels.silu_and_mul(x), (functions.silu(gate) * up).to(dtype))
    close(kernels.gelu_and_mul(x), (functions.gelu(gate) * up).to(dtype))
    expected = (functions.gelu(gate, approximate="tanh") * up).to(dtype)
    close(kernels.gelu_and_mul(x, approximate="tanh"), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (6, 6), (80, 32), (32, 2), (48, 42)]
)
@pytest.mark.parametrize("heads", [(9, 3), (1, 1), (20, 17)], ids=str)
def test_rotary_embedding(heads, head_dim, rotary_dim, interleaved):
    num_tokens, cache = 4, torch.randn(50, rotary_dim)
    positions = torch.tensor([0, 49, 7, 7], dtype=torch.int32)
    fused = torch.randn(num_tokens, sum(heads) + 1, head_dim).bfloat16()
    query, key = fused[:, : heads[0]], fused[:, heads[0] : -1]
    result = kernels.rotary_embedding(positions, query, key, cache, interleaved=interleaved)
    expected = rotary_embedding_reference(positions, query, key, cache, interleaved=interleaved)
    for one, other in zip(result, expected, strict=True):
        close(one, other)


def test_rotary_of_nothing():
    none = torch.empty(0, 2, 8)
    query, key = kernels.rotary_embedding(torch.empty(0).int(), none, none, torch.ones(4, 8))
    assert query.shape == key.shape == none.shape


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 4, 16), torch.bfloat16), ((3,), torch.int8), ((1025, 3), torch.float16)],
    ids=str,
)
def test_blocks_are_copied_and_nothing_else(shape, dtype):
    count = torch.Size(shape).numel()
    cache = torch.arange(6 * count).view(6, *shape).to(dtype)
    other = torch.zeros(4, *shape, dtype=dtype)
    pairs = torch.tensor([[0, 3], [5, 1]])
    expected, expected_other = cache.clone(), other.clone()
    expected[3], expected[1] = cache[0], cache[5]
    kernels.copy_blocks([cache], pairs)
    assert torch.equal(cache, expected)
    kernels.swap_blocks(cache, other, pairs)
    expected_other[3], expected_other[1] = cache[0], cache[5]
    assert torch.equal(other, expected_other)
    kernels.copy_blocks([cache], torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(cache, expected)
