"""Residual addition and RMS normalization in one operation."""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.rms_norm import rms_norm


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
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
