"""Residual addition and RMS normalization in one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.dispatch import use_cpu, use_triton
from octavo_kernels.rms_norm import normalize, rms_norm_reference


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, and normalize the sum.

    Args:
        x: ``[num_tokens, hidden_size]``, a block's output.
        residual: ``[num_tokens, hidden_size]``, the stream before it.
        weight: ``[hidden_size]``.
        eps: Added to the mean square.

    Returns:
        The normalized sum, and the sum as the new residual; both
        ``[num_tokens, hidden_size]``. The arguments are left as they are.
    """
    if use_triton(x):
        from octavo_kernels import triton

        return triton.fused_add_rms_norm(x, residual, weight, eps)
    if (
        x.dim() != 2
        or x.dtype != torch.float32
        or residual.dtype != x.dtype
        or not use_cpu(x, residual, weight)
    ):
        return fused_add_rms_norm_reference(x, residual, weight, eps)
    total = residual.clone(memory_format=torch.contiguous_format)
    return normalize(x, total, weight, eps), total


def fused_add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The torch twin of `fused_add_rms_norm`."""
    residual = x + residual
    return rms_norm_reference(residual, weight, eps), residual
