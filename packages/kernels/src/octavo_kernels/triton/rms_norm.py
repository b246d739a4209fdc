"""Triton kernel of RMS normalization, with or without a residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton import tiles
from octavo_kernels.triton.launch import on_device_of, with_dense_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize each row; see `octavo_kernels.rms_norm`.

    Args:
        x: ``[num_tokens, hidden_size]``, or with more dimensions before the last.
        weight: ``[hidden_size]``.
        eps: Added to the mean square.
    """
    output, _ = _launch(x, None, weight, eps)
    return output


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, then normalize; see `octavo_kernels.fused_add_rms_norm`.

    Args:
        x: ``[num_tokens, hidden_size]``.
        residual: Like `x`.
        weight: ``[hidden_size]``.
        eps: Added to the mean square.

    Returns:
        The normalized sum and the sum.
    """
    output, total = _launch(x, residual, weight, eps)
    assert total is not None
    return output, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    shape = x.shape
    rows = with_dense_rows(x.reshape(-1, shape[-1]))  # [num_tokens, hidden_size]
    output = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    total = None
    if residual is not None:
        residual = with_dense_rows(residual.reshape(rows.shape))
        total = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.numel() > 0:
        block, num_warps = tiles.element_block(shape[-1])
        with on_device_of(x):
            _norm[(len(rows),)](
                *(rows, residual, weight, output, total, eps),
                *(rows.stride(0), 0 if residual is None else residual.stride(0)),
                SIZE=shape[-1],
                BLOCK=block,
                num_warps=num_warps,
            )
    return output.view(shape), None if total is None else total.view(shape)


@triton.jit
def _norm(
    x,
    residual,
    weight,
    output,
    total,
    eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program normalizes one row. Each row is read once and reduced in one order."""
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
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        output + row * SIZE + at, (wide * scale * factor).to(output.dtype.element_ty), mask=inside
    )
