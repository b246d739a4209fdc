"""Mixture of experts whose dense matrices lie in one tensor, expert after expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo_kernels.dispatch import use_triton


def stacked_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Send each token through its experts, and add up what they say.

    On a GPU the host never waits for the experts that were chosen, so that a step can be
    captured in a graph.

    Args:
        x: ``[num_tokens, hidden_size]``.
        gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``.
        down: ``[num_experts, hidden_size, intermediate_size]``.
        topk_weights: ``[num_tokens, top_k]`` float32, see `select_experts`.
        topk_ids: ``[num_tokens, top_k]`` integers, experts of each token.
        activation: From ``[num_rows, 2 * intermediate_size]`` to ``[num_rows,
            intermediate_size]``.
        gate_up_bias: ``[num_experts, 2 * intermediate_size]``, or None.
        down_bias: ``[num_experts, hidden_size]``, or None.

    Returns:
        ``[num_tokens, hidden_size]``, of the type of `x`.
    """
    run = stacked_moe_reference
    if use_triton(x):
        from octavo_kernels import triton

        run = triton.stacked_moe
    return run(
        *(x, gate_up, down, topk_weights, topk_ids, activation),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def stacked_moe_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The torch twin of `stacked_moe`: one expert after the other."""

    def run_expert(index: int, rows: Tensor) -> Tensor:
        inner = activation(_project(rows, gate_up, gate_up_bias, index))
        return _project(inner, down, down_bias, index)

    return run_experts(x, topk_weights, topk_ids, run_expert)


def run_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    run_expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Send each token through its experts, whatever they are, one expert after the other.

    Args:
        x: ``[num_tokens, hidden_size]``.
        topk_weights: ``[num_tokens, top_k]``.
        topk_ids: ``[num_tokens, top_k]`` integers.
        run_expert: Computes an expert, by its index, for ``[num_rows, hidden_size]``.

    Returns:
        ``[num_tokens, hidden_size]``, of the type of `x`.
    """
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in torch.unique(topk_ids).tolist():
        tokens, choices = (topk_ids == index).nonzero(as_tuple=True)
        rows = run_expert(index, x[tokens]).float()
        output.index_add_(0, tokens, rows * topk_weights[tokens, choices].unsqueeze(1))
    return output.to(x.dtype)


def _project(rows: Tensor, weights: Tensor, biases: Tensor | None, index: int) -> Tensor:
    bias = None if biases is None else biases[index]
    return torch.nn.functional.linear(rows, weights[index], bias)
