"""Mixture of experts: the choice of experts, and the sum of what they say."""

import pytest
import torch

from octavo_kernels import Experts, fused_moe, pack_dense_weight, quantize_weight, select_experts
from octavo_kernels.fused_moe import fused_moe_reference

HIDDEN, FFN, NUM_EXPERTS = 64, 96, 8


def _experts(kind="q8_0", activation="silu"):
    def weight(rows, inputs):
        numbers = torch.randn(rows, inputs) * inputs**-0.5
        return pack_dense_weight(numbers) if kind == "f32" else quantize_weight(numbers, kind)

    gate_up = [weight(2 * FFN, HIDDEN) for _ in range(NUM_EXPERTS)]
    return Experts(gate_up, [weight(HIDDEN, FFN) for _ in range(NUM_EXPERTS)], activation)


def _routed(num_tokens, top_k=2):
    return select_experts(torch.randn(num_tokens, NUM_EXPERTS), top_k)


def _assert_close(result, expected):
    # Rounding of activations may differ where a float32 sum falls on a half: one step of 127.
    assert (result - expected).abs().max() <= 2e-3 * expected.abs().max()
    assert (result - expected).abs().mean() <= 1e-4 * expected.abs().mean()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "w8a8", "f32"])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_kernel_and_twin_agree(kind, num_tokens):
    experts, x = _experts(kind), torch.randn(num_tokens, HIDDEN)
    weights, ids = _routed(num_tokens)
    result = fused_moe(x, experts, weights, ids)
    _assert_close(result, fused_moe_reference(x, experts, weights, ids))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations(activation):
    experts, x = _experts(activation=activation), torch.randn(5, HIDDEN)
    weights, ids = _routed(5)
    _assert_close(
        fused_moe(x, experts, weights, ids), fused_moe_reference(x, experts, weights, ids)
    )


def test_a_token_is_the_same_in_every_batch():
    experts, x = _experts("q4_0"), torch.randn(40, HIDDEN)
    weights, ids = _routed(40, top_k=3)
    whole = fused_moe(x, experts, weights, ids)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 29)):
        assert torch.equal(fused_moe(x[rows], experts, weights[rows], ids[rows]), whole[rows])


def test_one_expert_for_all_and_no_tokens():
    experts, x = _experts(), torch.randn(6, HIDDEN).bfloat16()
    weights, ids = torch.ones(6, 1), torch.full((6, 1), 3, dtype=torch.int32)
    result = fused_moe(x, experts, weights, ids)
    assert result.dtype == torch.bfloat16
    only = Experts([experts.gate_up[3]], [experts.down[3]])
    assert torch.equal(result, fused_moe(x, only, weights, torch.zeros_like(ids)))
    assert fused_moe(x[:0], experts, weights[:0], ids[:0]).shape == (0, HIDDEN)


def test_softmax_routing_is_the_formula():
    logits = torch.randn(7, NUM_EXPERTS)
    weights, ids = select_experts(logits, 3)
    expected = logits.softmax(-1).topk(3)
    assert torch.equal(ids.long(), expected.indices)
    torch.testing.assert_close(weights, expected.values / expected.values.sum(-1, keepdim=True))
    weights, _ = select_experts(logits, 3, renormalize=False, scale=2.5)
    torch.testing.assert_close(weights, expected.values * 2.5)


def test_equal_experts_come_in_their_order():
    _, ids = select_experts(torch.zeros(2, NUM_EXPERTS), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


def test_groups_and_a_bias_that_only_counts_for_the_choice():
    logits = torch.tensor([[9.0, -9, 2, 2, 1, 1, 0, 3]])
    _, ids = select_experts(logits, 2, scoring="sigmoid", num_groups=4, top_groups=1)
    assert ids.tolist() == [[2, 3]]  # 0.88 twice beats 1.0 and 0.0
    bias = torch.tensor([0, 0, 0, 0, 0, 0, 5.0, 0])
    weights, ids = select_experts(
        logits, 1, scoring="sigmoid", correction_bias=bias, renormalize=False
    )
    assert ids.tolist() == [[6]]
    assert weights.item() == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k is 9; it must be between 1 and 8"),
        ({"top_k": 1, "scoring": "max"}, "scoring is 'max'"),
        ({"top_k": 1, "num_groups": 3}, "num_groups is 3 and top_groups 1"),
    ],
)
def test_numbers_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        select_experts(torch.zeros(1, NUM_EXPERTS), **options)


def test_weights_that_do_not_fit_are_refused():
    experts = _experts()
    with pytest.raises(ValueError, match=r"has the shape \(64, 96\), not \(192, 64\)"):
        Experts(experts.down, experts.down)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        Experts(experts.gate_up, experts.down, "relu")
