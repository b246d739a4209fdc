"""Store the keys and values of a step in the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.dispatch import use_cpu, use_triton
from octavo_kernels.kv_quantization import check_kv_cache, quantize_kv
from octavo_kernels.kv_write_problem import Slots, run_kv_write


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write each token's key and value to its slot, in place.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        value: ``[num_tokens, num_kv_heads, value_head_dim]``.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous, of
            one of `octavo_kernels.kv_quantization.CACHE_DTYPES`.
        value_cache: Like `key_cache`, with ``value_head_dim``.
        slot_mapping: ``[num_tokens]`` integers, ``block_id * block_size + offset``; -1
            leaves a token out. No slot may be there twice.
        key_scale: ``[num_blocks, num_kv_heads, block_size]`` float32, contiguous; written
            as well. An int8 cache needs it, float8 caches may have it.
        value_scale: Like `key_scale`.

    Raises:
        ValueError: The caches and scales don't belong together.
    """
    check_kv_cache(key_cache, value_cache, key_scale, value_scale)
    if use_triton(key):
        from octavo_kernels import triton

        triton.write_kv_cache(
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        return
    if use_cpu(key, key_cache) and whole_vectors(key_cache, value_cache):
        slots = Slots(key_cache, value_cache, slot_mapping, key_scale, value_scale)
        run_kv_write(key, value, slots)
        return
    write_kv_cache_reference(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def whole_vectors(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether heads are multiples of 8, as the CPU kernels write them."""
    return not (key_cache.shape[-1] % 8 or value_cache.shape[-1] % 8)


def write_kv_cache_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Do the same in plain torch."""
    num_kv_heads, block_size = key_cache.shape[1:3]
    # The test reads a flag back from the device; padded steps are rare in this implementation.
    if slot_mapping.numel() == 0 or int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().flatten()
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    slots = slot_mapping.long()
    first_rows = slots // block_size * (num_kv_heads * block_size) + slots % block_size
    heads = torch.arange(num_kv_heads, device=slots.device) * block_size
    rows = (first_rows.unsqueeze(1) + heads).flatten()  # [num_tokens * num_kv_heads]
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        head_dim = cache.shape[-1]
        stored, scales = quantize_kv(new.reshape(-1, head_dim), cache.dtype, scale is not None)
        # Copied as bytes of the same size: index_copy_ doesn't know float8.
        kind = torch.int8 if cache.dtype.itemsize == 1 else cache.dtype
        cache.view(kind).view(-1, head_dim).index_copy_(0, rows, stored.view(kind))
        if scale is not None and scales is not None:
            scale.view(-1).index_copy_(0, rows, scales)
