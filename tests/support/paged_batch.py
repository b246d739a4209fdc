"""Batches over a paged cache, and the attention that they should give, written out."""

from __future__ import annotations

import math

import torch

from octavo_kernels import AttentionMetadata

BLOCK = 16

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)
CASES = {
    "one token": [(1, 1)],
    "decode": [(1, length) for length in LENGTHS],
    "prefill": [(length, length) for length in LENGTHS],
    "chunks over context": [(3, length + 3) for length in LENGTHS],
    "mixed": [(1, 9), (5, 5), (1, 1), (4, 70), (1, 16), (2, 2), (40, 90)],
    "rows without tokens": [(0, 4), (1, 5), (0, 1), (3, 3), (0, 9)],
    "decode rows without tokens": [(0, 4), (1, 5), (0, 1), (1, 40)],
    "nothing": [],
}


def make_batch(lens, heads=(4, 2), dims=(32, 32), dtype=torch.float32, block_size=BLOCK):
    """Build queries, caches and the metadata of (query length, sequence length) pairs.

    Blocks that no request has are NaN, and so is the tail of each request's last block.
    """
    num_heads, num_kv_heads = heads
    blocks_of = [-(-seq_len // block_size) for _, seq_len in lens]
    num_blocks = sum(blocks_of) + 3
    shuffled = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lens), max(blocks_of, default=0) + 2), 10**8, dtype=torch.int32)
    caches = [
        torch.full((num_blocks, num_kv_heads, block_size, dim), math.nan, dtype=torch.float32)
        for dim in dims
    ]
    for row, (_, seq_len) in enumerate(lens):
        for index in range(blocks_of[row]):
            block = shuffled.pop()
            tables[row, index] = block
            filled = min(block_size, seq_len - index * block_size)
            for cache in caches:
                cache[block, :, :filled] = torch.randn(num_kv_heads, filled, cache.shape[-1])
    starts = torch.tensor([0, *(query_len for query_len, _ in lens)]).cumsum(0).int()
    seq_lens = [seq_len for _, seq_len in lens]
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables[:, :-1],  # rows are not next to each other
        slot_mapping=torch.full((int(starts[-1]),), -1, dtype=torch.int32),
        host_query_start_loc=starts.tolist(),
        host_seq_lens=seq_lens,
        block_size=block_size,
    )
    # A slice of a fused projection: its tokens are not next to each other.
    query = torch.randn(int(starts[-1]), num_heads + 1, dims[0])[:, :num_heads]
    return query.to(dtype), caches[0].to(dtype), caches[1].to(dtype), metadata


def reference(
    query, key_cache, value_cache, metadata, scale, window=None, soft_cap=None, sinks=None
):
    output = torch.zeros(*query.shape[:2], value_cache.shape[-1], dtype=torch.float64)
    group = query.shape[1] // key_cache.shape[1]
    starts = metadata.host_query_start_loc
    for row, seq_len in enumerate(metadata.host_seq_lens):
        first, end = starts[row], starts[row + 1]
        at = torch.arange(seq_len)
        blocks = metadata.block_tables[row].long()[at // metadata.block_size]
        offsets = at % metadata.block_size
        # [seq_len, num_heads, dim]
        keys = key_cache[blocks, :, offsets].double().repeat_interleave(group, 1)
        values = value_cache[blocks, :, offsets].double().repeat_interleave(group, 1)
        scores = torch.einsum("thd,nhd->htn", query[first:end].double(), keys) * scale
        if soft_cap:
            scores = soft_cap * (scores / soft_cap).tanh()
        position = torch.arange(seq_len - (end - first), seq_len).unsqueeze(1)
        hidden = at > position
        if window:
            hidden |= position - at >= window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., :seq_len]
        output[first:end] = torch.einsum("htn,nhd->thd", weights, values)
    return output
