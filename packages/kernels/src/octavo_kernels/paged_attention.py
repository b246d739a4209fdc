"""Causal attention of a flat mixed batch over the paged KV cache.

The paging is that of Kwon et al. 2023 (arXiv 2309.06180). Blocks are head-major,
``[num_blocks, num_kv_heads, block_size, head_dim]``, so that one head's tokens of a
block are one run of memory: a gather copies ``block_size * head_dim`` numbers at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo_kernels.attention_metadata import AttentionMetadata, DecodeGroup

# Query tokens of one call in a prefill. Bounds the mask to 256 rows, and skips most of the
# upper triangle of a long prompt: piece i sees keys up to its own end only.
PREFILL_PIECE = 256


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> Tensor:
    """Attend from each token to the tokens of its request up to itself.

    A request's last ``query_len`` positions are its query tokens; their own keys and
    values must be in the cache already. Requests of any kind may be mixed: whole
    prompts, pieces of prompts over cached context, and single tokens.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``; ``num_heads`` is
            a multiple of ``num_kv_heads``.
        value_cache: Like `key_cache`.
        metadata: How the tokens divide into requests.
        scale: Factor of the scores, usually ``head_dim ** -0.5``.

    Returns:
        ``[num_tokens, num_heads, head_dim]``.
    """
    query = query.contiguous()
    output = torch.empty_like(query)
    for group in metadata.decode_groups:
        _decode(output, query, key_cache, value_cache, group, scale)
    for row in metadata.prefill_rows:
        _prefill(output, query, key_cache, value_cache, metadata, row, scale)
    return output


def _decode(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: DecodeGroup,
    scale: float,
) -> None:
    """Compute rows of one query token together, padded to the longest."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[1]
    # The query heads of one KV head stand where the tokens of a sequence would, so that
    # K and V need no copy for each of them.
    q = query[group.tokens].view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k = _gather(key_cache, group.blocks).to(query.dtype)
    v = _gather(value_cache, group.blocks).to(query.dtype)
    attended = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
    output[group.tokens] = attended.reshape(-1, num_heads, head_dim)


def _prefill(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    row: int,
    scale: float,
) -> None:
    """Compute one request with several query tokens."""
    start, end = metadata.host_query_start_loc[row], metadata.host_query_start_loc[row + 1]
    seq_len = metadata.host_seq_lens[row]
    num_blocks = -(-seq_len // metadata.block_size)
    blocks = metadata.block_tables[row : row + 1, :num_blocks].long()
    k = _gather(key_cache, blocks).to(query.dtype)  # [1, num_kv_heads, num_positions, head_dim]
    v = _gather(value_cache, blocks).to(query.dtype)
    for first in range(start, end, PREFILL_PIECE):
        last = min(first + PREFILL_PIECE, end)
        num_keys = seq_len - (end - last)
        q = query[first:last].transpose(0, 1).unsqueeze(0)  # [1, num_heads, piece, head_dim]
        attended = scaled_dot_product_attention(
            q,
            k[:, :, :num_keys],
            v[:, :, :num_keys],
            attn_mask=_causal_mask(last - first, num_keys, query.device),
            scale=scale,
            enable_gqa=True,
        )
        output[first:last] = attended.squeeze(0).transpose(0, 1)


def _causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Make ``[num_queries, num_keys]``, True up to the diagonal that ends bottom right."""
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril_(num_keys - num_queries)


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """Copy blocks together.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        blocks: ``[num_rows, num_blocks]`` int64 block ids.

    Returns:
        ``[num_rows, num_kv_heads, num_blocks * block_size, head_dim]``.
    """
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    heads = torch.arange(num_kv_heads, device=blocks.device).unsqueeze(1)
    rows = blocks.unsqueeze(1) * num_kv_heads + heads  # [num_rows, num_kv_heads, num_blocks]
    gathered = cache.view(-1, block_size * head_dim).index_select(0, rows.flatten())
    return gathered.view(len(blocks), num_kv_heads, -1, head_dim)
