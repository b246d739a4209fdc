"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves rotated as in GPT-NeoX."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    Component ``i`` of a head is paired with component ``i + head_dim / 2``.
    Computed in float32.

    Args:
        positions: ``[num_tokens]`` integers below ``max_position``.
        query: ``[num_tokens, num_heads, head_dim]``.
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        cos_sin_cache: ``[max_position, head_dim]`` float32; the cosines of the
            ``head_dim / 2`` angles, then their sines.

    Returns:
        Rotated query and key, new and contiguous, in their own types.
    """
    cos_sin = cos_sin_cache.index_select(0, positions).unsqueeze(1)  # [num_tokens, 1, head_dim]
    cos, sin = cos_sin.chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)  # [num_tokens, num_heads, head_dim / 2]
    halves = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(halves, dim=-1).to(x.dtype)
