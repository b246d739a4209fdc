"""How keys and values are stored in caches of 8-bit types.

A scale belongs to one token and one KV head, and is the largest magnitude among its
``head_dim`` numbers over the largest that the type holds. It is written once, with the token:
a cached block never depends on what came after it or lay beside it, so prefix caching and
recomputation give the same bits, and no calibration is needed. At a head size of 64 the scales
are 6 % of an int8 cache.

int8 always has scales. The float8 types may: with them the whole range of the type is used,
without them the numbers are rounded as they are and held within the range.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite number of each 8-bit type."""

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *LARGEST)
"""Types that a KV cache may have."""


def quantize_kv(x: Tensor, dtype: torch.dtype, scaled: bool) -> tuple[Tensor, Tensor | None]:
    """Convert keys or values to the type of a cache.

    Args:
        x: ``[..., head_dim]`` floating point.
        dtype: One of `CACHE_DTYPES`.
        scaled: Whether each vector gets a scale.

    Returns:
        `x` in `dtype`, and ``[...]`` float32 scales to multiply it with, or None. A vector
        with an infinity or a NaN reads back as not finite.
    """
    if dtype not in LARGEST:
        return x.to(dtype), None
    largest = LARGEST[dtype]
    x = x.float()
    if not scaled:
        return x.clamp(-largest, largest).to(dtype), None
    magnitude = x.abs().amax(dim=-1, keepdim=True)  # [..., 1]
    factor = torch.where(magnitude > 0, largest / magnitude, 0.0)
    # The product may round above the largest number; NaN can't become an integer.
    stored = (x * factor).nan_to_num(0.0).clamp(-largest, largest)
    if dtype == torch.int8:
        stored = stored.round()
    return stored.to(dtype), (magnitude / largest).squeeze(-1)


def dequantize_kv(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Convert ``[..., head_dim]`` of a cache to float32, with ``[...]`` scales if it has them."""
    x = stored.float()
    return x if scale is None else x * scale.unsqueeze(-1)


def check_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Check that two caches and their scales belong together.

    Raises:
        ValueError: A type is not supported, int8 has no scales, or shapes differ.
    """
    if key_cache.dtype not in CACHE_DTYPES or value_cache.dtype != key_cache.dtype:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CACHE_DTYPES)
        raise ValueError(
            f"key_cache and value_cache are {key_cache.dtype} and {value_cache.dtype}; "
            f"both must be one of {known}"
        )
    if key_cache.dim() != 4 or value_cache.shape[:3] != key_cache.shape[:3]:
        raise ValueError(
            "the caches must be [num_blocks, num_kv_heads, block_size, head_dim], not "
            f"{list(key_cache.shape)} and {list(value_cache.shape)}"
        )
    if (key_scale is None) != (value_scale is None):
        raise ValueError("give both key_scale and value_scale, or neither")
    if key_scale is None or value_scale is None:
        if key_cache.dtype == torch.int8:
            raise ValueError("a cache of int8 needs key_scale and value_scale")
        return
    if key_cache.dtype not in LARGEST:
        raise ValueError(f"key_scale is for caches of 8-bit types, not of {key_cache.dtype}")
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale.shape != key_cache.shape[:3] or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 of shape {list(key_cache.shape[:3])}, not "
                f"{scale.dtype} of {list(scale.shape)}"
            )
