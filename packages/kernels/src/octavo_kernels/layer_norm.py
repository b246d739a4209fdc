"""Layer normalization (Ba et al. 2016, arXiv 1607.06450), with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.dispatch import use_cpu, use_triton

_layer_norm = Kernel("norms.layer_norm", "qqqqqqqdq")
_ALONE = 1 << 15


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Bring each row to a mean of zero and a variance of one, then scale and shift it.

    Computed in float32 and rounded to the type of `x` once, at the end.

    Args:
        x: ``[num_tokens, hidden_size]``.
        weight: ``[hidden_size]``.
        bias: ``[hidden_size]``, or None.
        eps: Added to the variance.
        residual: ``[num_tokens, hidden_size]``, added to x first; None for nothing.

    Returns:
        The normalized rows, and what was normalized (``x + residual``): both
        ``[num_tokens, hidden_size]``, of the type of `x`. The arguments are left as they are.
    """
    if use_triton(x):
        from octavo_kernels import triton

        return triton.layer_norm(x, weight, bias, eps, residual)
    tensors = [t for t in (x, weight, bias, residual) if t is not None]
    same = residual is None or residual.dtype == x.dtype
    if x.dim() != 2 or x.dtype != torch.float32 or not same or not use_cpu(*tensors):
        return layer_norm_reference(x, weight, bias, eps, residual)
    rows = x if x.stride(-1) == 1 else x.contiguous()
    total = None
    if residual is not None:
        total = residual.clone(memory_format=torch.contiguous_format)
    wide = weight.float().contiguous()
    shift = None if bias is None else bias.float().contiguous()
    out = torch.empty(x.shape)
    run = _layer_norm.alone if x.numel() <= _ALONE else _layer_norm
    run(
        rows.data_ptr(),
        4 * rows.stride(0),
        0 if total is None else total.data_ptr(),
        wide.data_ptr(),
        0 if shift is None else shift.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        out.data_ptr(),
    )
    return out, x if total is None else total


def layer_norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The torch twin of `layer_norm`."""
    total = x if residual is None else x + residual
    wide = total.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scale = (centred.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    result = (centred * scale).mul_(weight.float())
    if bias is not None:
        result += bias.float()
    return result.to(x.dtype), total
