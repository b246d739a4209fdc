"""Triton kernel of rotary position embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.launch import next_power_of_2, on_device_of, with_dense_rows

# Heads of one program: with 128 components, 8 numbers for each of 256 threads.
HEADS_OF_A_PROGRAM = 16


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions; see `octavo_kernels.rotary_embedding`.

    Args:
        positions: ``[num_tokens]`` integers.
        query: ``[num_tokens, num_heads, head_dim]``.
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32.
        interleaved: Pair neighbours, as in GPT-J, or halves, as in GPT-NeoX.
    """
    query, key = with_dense_rows(query), with_dense_rows(key)
    rotated = (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(key.shape, dtype=key.dtype, device=key.device),
    )
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return rotated
    num_kv_heads, half = key.shape[1], cos_sin_cache.shape[-1] // 2
    block_heads = min(HEADS_OF_A_PROGRAM, next_power_of_2(max(num_heads, num_kv_heads)))
    # The pairs of a head, and as many again where there is more than is rotated.
    block = next_power_of_2(max(half, head_dim - 2 * half))
    grid = (num_tokens, -(-num_heads // block_heads) + -(-num_kv_heads // block_heads))
    with on_device_of(query):
        _rotate[grid](
            *(positions, query, key, cos_sin_cache, *rotated),
            *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
            cos_sin_cache.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            INTERLEAVED=interleaved,
            BLOCK_H=block_heads,
            BLOCK=block,
            num_warps=min(8, max(1, block_heads * block // 128)),
        )
    return rotated


@triton.jit
def _rotate(
    positions,
    query,
    key,
    cos_sin_cache,
    new_query,
    new_key,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    cache_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program rotates BLOCK_H heads of one token: queries first, then keys."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    of_query = tl.cdiv(NUM_HEADS, BLOCK_H)
    cache = cos_sin_cache + tl.load(positions + token).to(tl.int64) * cache_stride
    if part < of_query:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        source = query + token * q_token_stride + head[:, None] * q_head_stride
        target = new_query + (token * NUM_HEADS + head[:, None]) * HEAD_DIM
        _rotate_heads(source, target, cache, head < NUM_HEADS, HEAD_DIM, HALF, INTERLEAVED, BLOCK)
    else:
        head = (part - of_query) * BLOCK_H + tl.arange(0, BLOCK_H)
        source = key + token * k_token_stride + head[:, None] * k_head_stride
        target = new_key + (token * NUM_KV_HEADS + head[:, None]) * HEAD_DIM
        _rotate_heads(
            source, target, cache, head < NUM_KV_HEADS, HEAD_DIM, HALF, INTERLEAVED, BLOCK
        )


@triton.jit
def _rotate_heads(
    source,
    target,
    cache,
    is_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate ``[heads, head_dim]``, and copy what lies behind the rotated components."""
    pair = tl.arange(0, BLOCK)
    is_pair = pair < HALF
    cos = tl.load(cache + pair, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(cache + HALF + pair, mask=is_pair, other=0.0)[None, :]
    if INTERLEAVED:
        first_at = 2 * pair[None, :]
        second_at = first_at + 1
    else:
        first_at = pair[None, :]
        second_at = first_at + HALF
    inside = is_head[:, None] & is_pair[None, :]
    first = tl.load(source + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=inside, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + first_at, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(target + second_at, (second * cos + first * sin).to(kind), mask=inside)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + pair
        inside = is_head[:, None] & (rest < HEAD_DIM)[None, :]
        copied = tl.load(source + rest[None, :], mask=inside, other=0.0)
        tl.store(target + rest[None, :], copied, mask=inside)
