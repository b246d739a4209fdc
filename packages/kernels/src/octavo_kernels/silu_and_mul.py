"""The gated activation of a SwiGLU feed-forward (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of a fused projection.

    Args:
        x: ``[num_tokens, 2 * intermediate_size]``; the gate comes first.

    Returns:
        ``[num_tokens, intermediate_size]``.
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
