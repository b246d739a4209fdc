"""Root-mean-square layer normalization (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to a root mean square of one, then by `weight`.

    Computed in float32 and rounded to the type of `x` once, at the end.

    Args:
        x: ``[num_tokens, hidden_size]``.
        weight: ``[hidden_size]``.
        eps: Added to the mean square.

    Returns:
        ``[num_tokens, hidden_size]``, of the type of `x`.
    """
    wide = x.float()
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()  # [num_tokens, 1]
    return (wide * scale).mul_(weight.float()).to(x.dtype)
