"""Triton kernel of layer normalization."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton import tiles
from octavo_kernels.triton.launch import on_device_of, with_dense_rows


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalize each row; see `octavo_kernels.layer_norm`.

    Args:
        x: ``[num_tokens, hidden_size]``, or with more dimensions before the last.
        weight: ``[hidden_size]``.
        bias: ``[hidden_size]``, or none.
        eps: Added to the variance.
        residual: Like `x`, added to it first, or none.

    Returns:
        The normalized rows, and what was normalized.
    """
    rows = with_dense_rows(x.reshape(-1, x.shape[-1]))  # [num_tokens, hidden_size]
    output = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    total = None
    if residual is not None:
        residual = with_dense_rows(residual.reshape(rows.shape))
        total = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.numel() > 0:
        block, num_warps = tiles.element_block(x.shape[-1])
        with on_device_of(x):
            _norm[(len(rows),)](
                *(rows, residual, weight, bias, output, total, eps),
                *(rows.stride(0), 0 if residual is None else residual.stride(0)),
                SIZE=x.shape[-1],
                BLOCK=block,
                num_warps=num_warps,
            )
    return output.view(x.shape), x if total is None else total.view(x.shape)


@triton.jit
def _norm(
    x,
    residual,
    weight,
    bias,
    output,
    total,
    eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program normalizes one row, which stays in registers for both passes."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    numbers = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    if residual is not None:
        before = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0)
        # Rounded to the stream's own type, which is what the next block reads.
        numbers = (numbers.to(tl.float32) + before.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * SIZE + at, numbers, mask=inside)
    wide = numbers.to(tl.float32)
    centered = tl.where(inside, wide - tl.sum(wide, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / SIZE + eps)
    result = centered * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        result = result + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + at, result.to(output.dtype.element_ty), mask=inside)
