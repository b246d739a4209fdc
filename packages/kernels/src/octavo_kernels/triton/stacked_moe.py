"""Triton kernels of a mixture-of-experts feed-forward block.

(Token, expert) pairs are sorted by expert, and a tile of rows belongs to one expert. How many
pairs an expert gets is never known on the host: the grid covers the most tiles that there can
be, and a program finds its expert by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton import tiles
from octavo_kernels.triton.launch import on_device_of, with_dense_rows
from octavo_kernels.triton.search import block_owner


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
    """Send each token through its experts; see `octavo_kernels.stacked_moe`.

    A token's experts are added in the order in which it names them.
    """
    num_tokens, num_chosen = topk_ids.shape
    if num_tokens == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = with_dense_rows(x)
    order, starts = _sorted_by_expert(topk_ids, len(gate_up))
    hidden = _expert_matmul(x, gate_up, gate_up_bias, order, starts, num_chosen, None)
    activated = activation(hidden)
    returned = _expert_matmul(activated, down, down_bias, order, starts, 0, topk_weights)
    return returned.view(num_tokens, num_chosen, -1).float().sum(1).to(x.dtype)


def _sorted_by_expert(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return pairs in the order of their experts, and where each expert's begin.

    Pair ``i`` is token ``i / num_chosen`` with its ``i % num_chosen``-th expert.
    """
    in_order, order = topk_ids.flatten().int().sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    return order, torch.searchsorted(in_order, bounds, out_int32=True)


def _expert_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    num_chosen: int,
    factors: Tensor | None,
) -> Tensor:
    """Multiply each pair's row with its expert's matrix.

    Args:
        x: ``[num_tokens, size]`` if `num_chosen`, else ``[num_pairs, size]`` sorted by expert.
        weight: ``[num_experts, out_features, size]``.
        bias: ``[num_experts, out_features]``, or None.
        order: ``[num_pairs]``, see `_sorted_by_expert`.
        starts: ``[num_experts + 1]``.
        num_chosen: Experts of a token; 0 if rows of `x` are pairs.
        factors: ``[num_tokens, num_chosen]``; if given, results are multiplied with them and
            stand in the order of the pairs, else sorted by expert.

    Returns:
        ``[num_pairs, out_features]``.
    """
    num_pairs, (num_experts, out_features, size) = len(order), weight.shape
    weight = weight if weight.stride(2) == 1 else weight.contiguous()
    output = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
    # As many tokens as an expert gets on average decide on the tile.
    tile = tiles.matmul(tiles.architecture(), -(-num_pairs // num_experts), x.itemsize)
    num_blocks = num_pairs // tile.rows + num_experts
    with on_device_of(x):
        _matmul[(num_blocks, -(-out_features // tile.columns))](
            *(x, weight, None if bias is None else bias.contiguous(), order, starts),
            None if factors is None else factors.contiguous(),
            *(output, num_experts, out_features, size, x.stride(0)),
            *(weight.stride(0), weight.stride(1)),
            NUM_CHOSEN=num_chosen,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            **tile.options,
        )
    return output


@triton.jit
def _matmul(
    x,
    weight,
    bias,
    order,
    starts,
    factors,
    output,
    num_experts,
    out_features,
    size,
    x_stride,
    expert_stride,
    row_stride,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program computes one tile: BLOCK_M pairs of one expert, BLOCK_N columns."""
    block = tl.program_id(0)
    expert = block_owner(starts, block, num_experts, BLOCK_M)
    first = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    place = first + (block - (first // BLOCK_M + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.min(place, 0) >= end:
        return
    is_pair = place < end
    pair = tl.load(order + place, mask=is_pair, other=0)
    source = place.to(tl.int64)
    if NUM_CHOSEN > 0:
        source = pair // NUM_CHOSEN
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < out_features
    at = tl.arange(0, BLOCK_K)
    of_pair = x + source[:, None] * x_stride
    of_row = weight + expert.to(tl.int64) * expert_stride + row.to(tl.int64)[None, :] * row_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size, BLOCK_K):
        inside = start + at < size
        a = tl.load(
            of_pair + (start + at)[None, :], mask=is_pair[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(
            of_row + (start + at)[:, None], mask=inside[:, None] & is_row[None, :], other=0.0
        )
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if bias is not None:
        of_expert = bias + expert.to(tl.int64) * out_features + row
        acc += tl.load(of_expert, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = place.to(tl.int64)
    if factors is not None:
        acc = acc * tl.load(factors + pair, mask=is_pair, other=0.0).to(tl.float32)[:, None]
        target = pair
    tl.store(
        output + target[:, None] * out_features + row[None, :],
        acc.to(output.dtype.element_ty),
        mask=is_pair[:, None] & is_row[None, :],
    )
