"""Root-mean-square layer normalization (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.dispatch import use_cpu, use_triton

rms_norm_rows = Kernel("norms.rms_norm", "qqqqqqdq")

# Numbers below which waking the other threads costs more than they bring.
_ALONE = 1 << 15


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to a root mean square of one, then by `weight`.

    Computed in float32 and rounded to the type of `x` once, at the end.

    Args:
        x: ``[..., hidden_size]``: a row for each token, or for each head of each token.
        weight: ``[hidden_size]``.
        eps: Added to the mean square.

    Returns:
        Of the shape and type of `x`.
    """
    if use_triton(x):
        from octavo_kernels import triton

        return triton.rms_norm(x, weight, eps)
    if x.dtype != torch.float32 or not use_cpu(x, weight):
        return rms_norm_reference(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    return normalize(rows, None, weight, eps).view(x.shape)


def normalize(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Run the CPU kernel; x is added to `residual` in place, if there is one."""
    rows = x if x.stride(-1) == 1 else x.contiguous()
    wide = weight.float().contiguous()
    out = torch.empty(x.shape)
    run = rms_norm_rows.alone if x.numel() <= _ALONE else rms_norm_rows
    run(
        rows.data_ptr(),
        4 * rows.stride(0),
        0 if residual is None else residual.data_ptr(),
        wide.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        out.data_ptr(),
    )
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The torch twin of `rms_norm`."""
    wide = x.float()
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()  # [num_tokens, 1]
    return (wide * scale).mul_(weight.float()).to(x.dtype)
