"""The gated activation of a SwiGLU feed-forward (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.dispatch import use_cpu, use_triton

gated_rows = Kernel("gated.activate_and_mul", "qqqqqq")

SILU, GELU, GELU_TANH = 0, 1, 2
_ALONE = 1 << 14


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of a fused projection.

    Args:
        x: ``[num_tokens, 2 * intermediate_size]``; the gate comes first.

    Returns:
        ``[num_tokens, intermediate_size]``.
    """
    if use_triton(x):
        from octavo_kernels import triton

        return triton.silu_and_mul(x)
    if x.dim() != 2 or x.dtype != torch.float32 or not use_cpu(x):
        return silu_and_mul_reference(x)
    return activate_and_mul(x, SILU)


def activate_and_mul(x: Tensor, kind: int) -> Tensor:
    """Run the CPU kernel."""
    rows = x if x.stride(-1) == 1 else x.contiguous()
    size = x.shape[1] // 2
    out = torch.empty(x.shape[0], size)
    run = gated_rows.alone if x.numel() <= _ALONE else gated_rows
    run(rows.data_ptr(), 4 * rows.stride(0), x.shape[0], size, kind, out.data_ptr())
    return out


def silu_and_mul_reference(x: Tensor) -> Tensor:
    """The torch twin of `silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
