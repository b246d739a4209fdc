"""Norms, activation and rotary embedding against formulas written out in float64."""

import pytest
import torch

from octavo_kernels import fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul

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
