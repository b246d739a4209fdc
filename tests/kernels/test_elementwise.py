"""Norms, activation and rotary embedding against formulas written out in float64."""

import pytest
import torch

from octavo_kernels import (
    fused_add_rms_norm,
    gelu_and_mul,
    layer_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from octavo_kernels.fused_add_rms_norm import fused_add_rms_norm_reference
from octavo_kernels.gelu_and_mul import gelu_and_mul_reference
from octavo_kernels.layer_norm import layer_norm_reference
from octavo_kernels.rms_norm import rms_norm_reference
from octavo_kernels.silu_and_mul import silu_and_mul_reference

# Float32 has 2**-24 relative rounding; a few operations and a sum of a few hundred terms
# stay under 1e-6 of values near one.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def _rms_norm(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 8), (1, 1), (1, 576), (7, 33), (3, 128)])
def test_rms_norm(num_tokens, hidden):
    x, weight = torch.randn(num_tokens, hidden) * 30, torch.randn(hidden)
    expected = _rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, **TOLERANCE)


def test_rms_norm_of_half_types_rounds_once():
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, rms_norm(x.float(), weight.float(), 1e-5).bfloat16())


def test_rms_norm_of_non_contiguous_rows_leaves_them_alone():
    wide = torch.randn(6, 40)
    x, before = wide[::2, 5:30], wide.clone()
    expected = _rms_norm(x, torch.ones(25), 1e-6)
    torch.testing.assert_close(rms_norm(x, torch.ones(25), 1e-6).double(), expected, **TOLERANCE)
    assert torch.equal(wide, before)


def test_fused_add_rms_norm_returns_norm_and_sum():
    x, residual, weight = torch.randn(4, 48), torch.randn(4, 48), torch.randn(48)
    normed, total = fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), _rms_norm(total, weight, 1e-6), **TOLERANCE)


@pytest.mark.parametrize("intermediate", [1, 7, 96])
def test_silu_and_mul_takes_the_gate_first(intermediate):
    x = torch.randn(5, 4 * intermediate)[:, ::2]
    before = x.clone()
    gate, up = x.double()[:, :intermediate], x.double()[:, intermediate:]
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_and_mul(x).double(), expected, **TOLERANCE)
    assert torch.equal(x, before)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul(approximate):
    x = torch.cat((torch.linspace(-12, 12, 77), torch.randn(77))).expand(3, -1)
    gate, up = x.double().chunk(2, dim=-1)
    expected = torch.nn.functional.gelu(gate, approximate=approximate) * up
    # The error function is good to 1.5e-7, and the gate is up to 12.
    torch.testing.assert_close(
        gelu_and_mul(x, approximate).double(), expected, rtol=2e-6, atol=2e-6
    )


def test_gelu_and_mul_knows_two_kinds():
    with pytest.raises(ValueError, match="approximate is 'fast'; it must be 'none' or 'tanh'"):
        gelu_and_mul(torch.zeros(1, 2), "fast")


@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 8), (1, 1), (1, 576), (7, 33)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(num_tokens, hidden, with_bias):
    x, residual = torch.randn(num_tokens, hidden) + 3, torch.randn(num_tokens, hidden)
    weight, bias = torch.randn(hidden), torch.randn(hidden) if with_bias else None
    before = residual.clone()
    for added in (None, residual):
        total = x if added is None else x + added
        wide_bias = None if bias is None else bias.double()
        expected = torch.nn.functional.layer_norm(
            total.double(), (hidden,), weight.double(), wide_bias, 1e-5
        )
        normed, returned = layer_norm(x, weight, bias, 1e-5, added)
        torch.testing.assert_close(normed.double(), expected, rtol=4e-6, atol=4e-6)
        assert torch.equal(returned, total)
    assert torch.equal(residual, before)


def test_kernels_and_twins_agree_on_large_batches():
    x, residual, weight = torch.randn(70, 600), torch.randn(70, 600), torch.randn(600)
    pairs = [
        (rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)),
        (
            fused_add_rms_norm(x, residual, weight, 1e-5),
            fused_add_rms_norm_reference(x, residual, weight, 1e-5),
        ),
        (
            layer_norm(x, weight, weight, 1e-5, residual),
            layer_norm_reference(x, weight, weight, 1e-5, residual),
        ),
        (silu_and_mul(x), silu_and_mul_reference(x)),
        (gelu_and_mul(x), gelu_and_mul_reference(x)),
        (gelu_and_mul(x, "tanh"), gelu_and_mul_reference(x, "tanh")),
    ]
    for result, expected in pairs:
        torch.testing.assert_close(result, expected, rtol=4e-6, atol=4e-6)


def test_a_row_is_the_same_in_every_batch():
    x, residual, weight = torch.randn(70, 600), torch.randn(70, 600), torch.randn(600)
    operations = [
        lambda rows: rms_norm(x[rows], weight, 1e-5),
        lambda rows: fused_add_rms_norm(x[rows], residual[rows], weight, 1e-5)[0],
        lambda rows: layer_norm(x[rows], weight, weight, 1e-5)[0],
        lambda rows: silu_and_mul(x[rows]),
        lambda rows: gelu_and_mul(x[rows]),
    ]
    for operation in operations:
        whole = operation(slice(0, 70))
        for start, end in [(0, 1), (0, 2), (69, 70), (3, 68)]:
            assert torch.equal(operation(slice(start, end)), whole[start:end])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -200.0, 200.0, -0.0])
def test_gates_beyond_the_range_of_exp(value):
    x = torch.tensor([[value, 1.0]])
    for operation in (silu_and_mul, gelu_and_mul):
        reference = silu_and_mul_reference if operation is silu_and_mul else gelu_and_mul_reference
        torch.testing.assert_close(operation(x), reference(x), equal_nan=True)


def _cos_sin(max_position, head_dim):
    frequencies = 1 / 100 ** (torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(max_position).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_rotary_embedding_turns_pairs_half_a_head_apart(head_dim):
    num_tokens, half = 9, head_dim // 2
    cache = _cos_sin(50, head_dim)
    qkv = torch.randn(num_tokens, 5 * head_dim)
    query = qkv[:, : 3 * head_dim].view(num_tokens, 3, head_dim)  # views with gaps
    key = qkv[:, 3 * head_dim :].view(num_tokens, 2, head_dim)
    positions = torch.tensor([0, 49, 3, 3, 7, 1, 20, 11, 0], dtype=torch.int32)
    for x, rotated in zip(
        (query, key), rotary_embedding(positions, query, key, cache), strict=True
    ):
        as_complex = torch.complex(x[..., :half], x[..., half:])
        turn = torch.complex(cache[positions.long(), :half], cache[positions.long(), half:])
        expected = as_complex * turn[:, None]
        torch.testing.assert_close(rotated[..., :half], expected.real, **TOLERANCE)
        torch.testing.assert_close(rotated[..., half:], expected.imag, **TOLERANCE)
        assert torch.equal(rotated[positions == 0], x[positions == 0])


@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64), (2, 3, 4, 64)])
def test_rows_may_lie_in_more_than_two_dimensions(shape: tuple[int, ...]) -> None:
    """As heads do, which models normalize one by one."""
    x, weight = torch.randn(shape), torch.rand(64)
    for got, expected in (
        (rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)),
        (silu_and_mul(x), silu_and_mul_reference(x)),
        (gelu_and_mul(x, "tanh"), gelu_and_mul_reference(x, "tanh")),
        (layer_norm(x, weight, None, 1e-5)[0], layer_norm_reference(x, weight, None, 1e-5)[0]),
    ):
        torch.testing.assert_close(got, expected)
