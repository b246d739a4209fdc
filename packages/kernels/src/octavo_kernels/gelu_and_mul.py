"""The gated activation of a GEGLU feed-forward (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.dispatch import use_cpu, use_triton
from octavo_kernels.silu_and_mul import GELU, GELU_TANH, activate_and_mul

_KINDS = {"none": GELU, "tanh": GELU_TANH}


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``gelu(gate) * up`` of a fused projection.

    Args:
        x: ``[num_tokens, 2 * intermediate_size]``; the gate comes first.
        approximate: ``none`` for the error function, ``tanh`` for the approximation with it
            (Hendrycks and Gimpel 2016, arXiv 1606.08415).

    Returns:
        ``[num_tokens, intermediate_size]``.

    Raises:
        ValueError: `approximate` is another.
    """
    if approximate not in _KINDS:
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
    if use_triton(x):
        from octavo_kernels import triton

        return triton.gelu_and_mul(x, approximate)
    if x.dim() != 2 or x.dtype != torch.float32 or not use_cpu(x):
        return gelu_and_mul_reference(x, approximate)
    return activate_and_mul(x, _KINDS[approximate])


def gelu_and_mul_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """The torch twin of `gelu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate).mul_(up)
