"""Triton kernels of a mixture-of-experts feed-forward block.

(Token, expert) pairs are sorted by expert, and a tile of rows belongs to one expert. How many
pairs an expert gets is never known on the host: the grid covers the most tiles that there can
be, and a program finds its expert by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.fused_moe import Experts
from octavo_kernels.packed_weight import PackedWeight
from octavo_kernels.triton import tiles
from octavo_kernels.triton.gated_activation import gelu_and_mul, silu_and_mul
from octavo_kernels.triton.launch import on_device_of, with_dense_rows
from octavo_kernels.triton.search import block_owner
from octavo_kernels.unpack_weight import unpack_weight

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": partial(gelu_and_mul, approximate="tanh"),
}

# The matrices of dense experts, stacked, for as long as the experts live.
_stacked: WeakKeyDictionary[Experts, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def takes_experts(experts: Experts) -> bool:
    """Whether all experts are dense: packed ones would have to be unpacked in memory."""
    kinds = {weight.kind for weight in (*experts.gate_up, *experts.down)}
    return len(kinds) == 1 and kinds <= {"bf16", "f16", "f32"}


def fused_moe(x: Tensor, experts: Experts, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Send each token through its experts; see `octavo_kernels.fused_moe`.

    The stacked matrices are kept beside the experts' own for as long as those live; where
    memory counts, keep stacked matrices only, and call `stacked_moe`.

    Args:
        x: ``[num_tokens, hidden_size]``.
        experts: Dense, see `takes_experts`.
        topk_weights: ``[num_tokens, top_k]``.
        topk_ids: ``[num_tokens, top_k]`` integers.
    """
    if experts not in _stacked:
        _stacked[experts] = (_stack(experts.gate_up, x.dtype), _stack(experts.down, x.dtype))
    return stacked_moe(x, *_stacked[experts], topk_weights, topk_ids, experts.activation)


def _stack(weights: Sequence[PackedWeight], dtype: torch.dtype) -> Tensor:
    return torch.stack([unpack_weight(weight).to(dtype) for weight in weights])


def stacked_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_weights: Tensor,
    expert_ids: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Send each token through its experts, and add up what they return.

    Args:
        x: ``[num_tokens, hidden_size]``.
        gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``, the gate first.
        down: ``[num_experts, hidden_size, intermediate_size]``.
        expert_weights: ``[num_tokens, num_chosen]``, factors of what the experts return.
        expert_ids: ``[num_tokens, num_chosen]`` integers.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.

    Returns:
        ``[num_tokens, hidden_size]``, of the type of `x`. A token's experts are added in the
        order in which it names them.
    """
    num_tokens, num_chosen = expert_ids.shape
    if num_tokens == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = with_dense_rows(x)
    order, starts = _sorted_by_expert(expert_ids, len(gate_up))
    hidden = _expert_matmul(x, gate_up, order, starts, num_chosen, None)
    activated = _ACTIVATIONS[activation](hidden)
    returned = _expert_matmul(activated, down, order, starts, 0, expert_weights)
    return returned.view(num_tokens, num_chosen, -1).float().sum(1).to(x.dtype)


def _sorted_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return pairs in the order of their experts, and where each expert's begin.

    Pair ``i`` is token ``i / num_chosen`` with its ``i % num_chosen``-th expert.
    """
    flat = expert_ids.flatten().long()
    order = flat.argsort(stable=True)
    starts = torch.zeros(num_experts + 1, dtype=torch.int32, device=flat.device)
    starts[1:] = torch.nn.functional.one_hot(flat, num_experts).sum(0).cumsum(0)
    return order, starts


def _expert_matmul(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    starts: Tensor,
    num_chosen: int,
    factors: Tensor | None,
) -> Tensor:
    """Multiply each pair's row with its expert's matrix.

    Args:
        x: ``[num_tokens, size]`` if `num_chosen`, else ``[num_pairs, size]`` sorted by expert.
        weight: ``[num_experts, out_features, size]``.
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
            *(x, weight, order, starts, None if factors is None else factors.contiguous()),
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
    target = place.to(tl.int64)
    if factors is not None:
        acc = acc * tl.load(factors + pair, mask=is_pair, other=0.0).to(tl.float32)[:, None]
        target = pair
    tl.store(
        output + target[:, None] * out_features + row[None, :],
        acc.to(output.dtype.element_ty),
        mask=is_pair[:, None] & is_row[None, :],
    )
