"""Triton kernel that stores the keys and values of a step in the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.kv_quantization import LARGEST
from octavo_kernels.triton import tiles
from octavo_kernels.triton.fp8 import FP8_BITS, INT8, PLAIN, encode_e4m3
from octavo_kernels.triton.launch import next_power_of_2, on_device_of, with_dense_rows


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
    """Write each token's key and value to its slot; see `octavo_kernels.write_kv_cache`.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        value: ``[num_tokens, num_kv_heads, value_head_dim]``.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        value_cache: ``[num_blocks, num_kv_heads, block_size, value_head_dim]``.
        slot_mapping: ``[num_tokens]`` integers; -1, or a slot beyond the cache, writes nothing.
        key_scale: ``[num_blocks, num_kv_heads, block_size]`` float32, contiguous, written.
        value_scale: Like `key_scale`.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    value_dim = value.shape[2]
    largest = LARGEST.get(key_cache.dtype, 0.0)
    if num_tokens == 0:
        return
    key, value = with_dense_rows(key), with_dense_rows(value)
    kind, key_cache, value_cache = as_kernels_see(key_cache, value_cache)
    heads, width = next_power_of_2(num_kv_heads), next_power_of_2(max(head_dim, value_dim))
    with on_device_of(key):
        _write[(num_tokens,)](
            *(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            key_cache.shape[0] * key_cache.shape[2],
            KIND=kind,
            LARGEST_NUMBER=largest,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_SIZE=key_cache.shape[2],
            BLOCK_H=heads,
            BLOCK_D=width,
            # 8 numbers a thread: one load of 16 bytes in bfloat16.
            num_warps=min(8, max(1, heads * width // 256)),
        )


def as_kernels_see(key_cache: Tensor, value_cache: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the kind of a cache for kernels, and the caches in a type that they can load."""
    if key_cache.dtype == torch.int8:
        return INT8.value, key_cache, value_cache
    if key_cache.dtype == torch.float8_e4m3fn and not tiles.has_fp8_e4m3():
        return FP8_BITS.value, key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    return PLAIN.value, key_cache, value_cache


@triton.jit
def _write(
    new_key,
    new_value,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    num_slots,
    KIND: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program writes the key and the value of one token, all heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.arange(0, BLOCK_H)
    at = tl.arange(0, BLOCK_D)
    is_head = head < NUM_KV_HEADS
    # Scales lie as the cache does without its last dimension.
    scale_at = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset

    inside = is_head[:, None] & (at < HEAD_DIM)[None, :]
    from_key = token * key_token_stride + head[:, None] * key_head_stride + at[None, :]
    k = tl.load(new_key + from_key, mask=inside, other=0.0)
    to_key = key_cache + block * k_block_stride + offset * k_slot_stride
    to_key = to_key + head[:, None] * k_head_stride + at[None, :]
    _store(to_key, k, key_scale, scale_at, is_head, inside, KIND, LARGEST_NUMBER)

    inside = is_head[:, None] & (at < VALUE_DIM)[None, :]
    from_value = token * value_token_stride + head[:, None] * value_head_stride + at[None, :]
    v = tl.load(new_value + from_value, mask=inside, other=0.0)
    to_value = value_cache + block * v_block_stride + offset * v_slot_stride
    to_value = to_value + head[:, None] * v_head_stride + at[None, :]
    _store(to_value, v, value_scale, scale_at, is_head, inside, KIND, LARGEST_NUMBER)


@triton.jit
def _store(
    to, x, scales, scale_at, is_head, inside, KIND: tl.constexpr, LARGEST_NUMBER: tl.constexpr
):
    """Store ``[heads, head_dim]`` numbers in the cache's own type, and their scales."""
    if LARGEST_NUMBER > 0.0:
        x = x.to(tl.float32)
        if scales is not None:
            # A NaN counts as infinite, so that the scale tells of it: int8 has no NaN.
            magnitude = tl.where(x == x, tl.abs(x), float("inf"))
            magnitude = tl.max(magnitude, 1)  # [heads]
            # In the order of operations of the twin, for the same bits.
            inverse = tl.div_rn(1.0, tl.where(magnitude > 0.0, magnitude, 1.0))
            factor = tl.where(magnitude > 0.0, inverse * LARGEST_NUMBER, 0.0)
            tl.store(scales + scale_at, tl.div_rn(magnitude, LARGEST_NUMBER), mask=is_head)
            x = x * factor[:, None]
            x = tl.where(x == x, x, 0.0)
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST_NUMBER), LARGEST_NUMBER), x)
    if KIND == INT8:
        tl.store(to, round_to_int8(x), mask=inside)
    elif KIND == FP8_BITS:
        tl.store(to, encode_e4m3(x), mask=inside)
    else:
        tl.store(to, x.to(to.dtype.element_ty), mask=inside)


@triton.jit
def round_to_int8(x):
    """Round float32 within ±127 to the nearest int8, ties to even.

    Adding 1.5 * 2**23 leaves no bits for a fraction, so the addition itself rounds.
    """
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)
