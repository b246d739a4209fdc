"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo_kernels.dispatch import use_cpu
from octavo_kernels.kv_write_problem import Rotation, run_rotation


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    The first ``rotary_dim`` components of a head are rotated, the others are copied.
    Computed in float32.

    Args:
        positions: ``[num_tokens]`` integers below ``max_position``.
        query: ``[num_tokens, num_heads, head_dim]``.
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32; the cosines of the
            ``rotary_dim / 2`` angles, then their sines. ``rotary_dim`` is even and at
            most ``head_dim``.
        interleaved: Whether component ``2 i`` is paired with ``2 i + 1``, as in GPT-J,
            or component ``i`` with ``i + rotary_dim / 2``, as in GPT-NeoX.

    Returns:
        Rotated query and key, new and contiguous, in their own types.

    Raises:
        ValueError: ``rotary_dim`` is odd or larger than a head.
    """
    check_rotary(query, cos_sin_cache)
    if use_cpu(query, cos_sin_cache):
        rotation = Rotation(positions, cos_sin_cache, interleaved, query)
        other = replace(rotation, query=key)
        return run_rotation(rotation).to(query.dtype), run_rotation(other).to(key.dtype)
    return rotary_embedding_reference(positions, query, key, cos_sin_cache, interleaved=interleaved)


def rotary_embedding_reference(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Do the same in plain torch."""
    # [num_tokens, 1, rotary_dim]
    cos_sin = cos_sin_cache.index_select(0, positions).unsqueeze(1)
    cos, sin = cos_sin.chunk(2, dim=-1)
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def check_rotary(x: Tensor, cos_sin_cache: Tensor) -> None:
    """Raise `ValueError` if the cache of cosines does not fit the heads."""
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or rotary_dim > x.shape[-1]:
        raise ValueError(f"rotary_dim={rotary_dim} must be even and at most head_dim={x.shape[-1]}")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)  # [num_tokens, num_heads, rotary_dim / 2]
    halves = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)
