"""Triton kernel of multi-head latent attention, in the absorbed form.

A latent is loaded once for the scores and the values of 16 heads. Keys are cut into segments as
for `paged_attention`, and joined by the same kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.triton import tiles
from octavo_kernels.triton.fp8 import FP8_BITS, decode_e4m3
from octavo_kernels.triton.launch import next_power_of_2, on_device_of, with_dense_rows
from octavo_kernels.triton.paged_attention import LOG2_E, reduce_segments
from octavo_kernels.triton.search import item_owner
from octavo_kernels.triton.write_kv_cache import as_kernels_see


def mla_decode(
    query: Tensor,
    latent_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_lora_rank: int,
) -> Tensor:
    """Attend to latents; see `octavo_kernels.mla_decode`.

    Args:
        query: ``[num_tokens, num_heads, kv_lora_rank + rope_dim]``.
        latent_cache: ``[num_blocks, block_size, kv_lora_rank + rope_dim]``.
        metadata: How the tokens divide into requests.
        scale: Factor of the scores.
        kv_lora_rank: Numbers of a latent that are the value.
    """
    num_tokens, num_heads, latent_dim = query.shape
    output = torch.empty(
        (num_tokens, num_heads, kv_lora_rank), dtype=query.dtype, device=query.device
    )
    if num_tokens == 0:
        return output
    query = with_dense_rows(query)
    kind, latents, _ = as_kernels_see(latent_cache, latent_cache)
    tile = tiles.latent_attention(tiles.architecture(), query.itemsize)
    segments = tiles.NUM_SEGMENTS
    block_v = max(16, next_power_of_2(kv_lora_rank))
    block_r = max(16, next_power_of_2(latent_dim - kv_lora_rank))
    partial = torch.empty(
        (num_tokens, num_heads, segments, block_v), dtype=torch.float32, device=query.device
    )
    state = torch.empty(
        (2, num_tokens, num_heads, segments), dtype=torch.float32, device=query.device
    )
    with on_device_of(query):
        _attend_segment[(num_tokens, -(-num_heads // tile.rows), segments)](
            *(query, latents, metadata.block_tables, metadata.query_start_loc),
            *(metadata.seq_lens, partial, state[0], state[1]),
            *(query.stride(0), query.stride(1), latents.stride(0), latents.stride(1)),
            *(metadata.block_tables.stride(0), scale, metadata.seq_lens.shape[0]),
            NUM_HEADS=num_heads,
            RANK=kv_lora_rank,
            ROPE_DIM=latent_dim - kv_lora_rank,
            BLOCK_V=block_v,
            BLOCK_R=block_r,
            BLOCK_SIZE=latents.shape[1],
            KIND=kind,
            NUM_SEGMENTS=segments,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            **tile.options,
        )
        reduce_segments[(num_tokens, num_heads)](
            *(partial, state[0], state[1], output, None, output.stride(0), output.stride(1)),
            NUM_HEADS=num_heads,
            VALUE_DIM=kv_lora_rank,
            BLOCK_V=block_v,
            NUM_SEGMENTS=segments,
            num_warps=4,
        )
    return output


@triton.jit
def _attend_segment(
    query,
    latents,
    block_tables,
    query_start_loc,
    seq_lens,
    partial,
    partial_maximum,
    partial_total,
    q_token_stride,
    q_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    scale,
    num_reqs,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes one segment of the keys of one token, for BLOCK_M heads."""
    token = tl.program_id(0)
    segment = tl.program_id(2)
    row = item_owner(query_start_loc, token, num_reqs)
    # Keys that this token sees: those of its request, without the tokens after it.
    num_keys = tl.load(seq_lens + row) - (tl.load(query_start_loc + row + 1) - 1 - token)
    tiles_each = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), NUM_SEGMENTS)
    first_key = segment * tiles_each * BLOCK_N
    end_key = tl.minimum(first_key + tiles_each * BLOCK_N, num_keys)

    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = head < NUM_HEADS
    at = tl.arange(0, BLOCK_V)
    rope_at = RANK + tl.arange(0, BLOCK_R)
    in_rank = at < RANK
    in_rope = rope_at < RANK + ROPE_DIM
    of_query = query + token.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride
    q = tl.load(of_query + at[None, :], mask=is_head[:, None] & in_rank[None, :], other=0.0)
    q_rope = tl.load(
        of_query + rope_at[None, :], mask=is_head[:, None] & in_rope[None, :], other=0.0
    )
    block_table = block_tables + row.to(tl.int64) * table_stride
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(first_key, end_key, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        in_keys = position < end_key
        block = tl.load(block_table + position // BLOCK_SIZE, mask=in_keys, other=0)
        key_at = block.to(tl.int64) * block_stride + (position % BLOCK_SIZE) * slot_stride
        # [BLOCK_N, BLOCK_V], the key and the value in one.
        k_mask = in_keys[:, None]
        if RANK != BLOCK_V:
            k_mask = k_mask & in_rank[None, :]
        k = _load(latents + key_at[:, None] + at[None, :], k_mask, q.dtype, KIND)
        rope_mask = in_keys[None, :] & in_rope[:, None]
        k_rope = _load(latents + key_at[None, :] + rope_at[:, None], rope_mask, q.dtype, KIND)
        scores = tl.dot(q_rope, k_rope, input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(in_keys[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(weights, 1)
        maximum = new_maximum
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(k.dtype), k, acc, input_precision="ieee")
    state_at = (token.to(tl.int64) * NUM_HEADS + head) * NUM_SEGMENTS + segment
    tl.store(partial + state_at[:, None] * BLOCK_V + at[None, :], acc, mask=is_head[:, None])
    tl.store(partial_maximum + state_at, maximum, mask=is_head)
    tl.store(partial_total + state_at, total, mask=is_head)


@triton.jit
def _load(pointers, mask, KIND_OF_QUERY: tl.constexpr, KIND: tl.constexpr):
    """Load latents as the query's type."""
    if KIND == FP8_BITS:
        return decode_e4m3(tl.load(pointers, mask=mask, other=0)).to(KIND_OF_QUERY)
    return tl.load(pointers, mask=mask, other=0.0).to(KIND_OF_QUERY)
