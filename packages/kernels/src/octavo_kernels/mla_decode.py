"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a cache of latents."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.dispatch import use_cpu, use_triton
from octavo_kernels.paged_attention import (
    AttentionOptions,
    attend_on_cpu,
    fits_cpu_kernel,
    paged_attention_reference,
)


def mla_decode(
    query: Tensor,
    latent_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_lora_rank: int,
) -> Tensor:
    """Attend to the latents of each token's request up to itself, in the absorbed form.

    All heads share one latent a token: its ``kv_lora_rank + rope_dim`` numbers are the key,
    the first ``kv_lora_rank`` of them the value. The up-projections of keys are folded into the
    query before, those of values are applied to the result after. Batches may be mixed as for
    `paged_attention`, though a long prompt is cheaper with its latents projected up.

    Args:
        query: ``[num_tokens, num_heads, kv_lora_rank + rope_dim]``.
        latent_cache: ``[num_blocks, block_size, kv_lora_rank + rope_dim]``, contiguous, of
            float32, bfloat16, float16 or a float8 type.
        metadata: How the tokens divide into requests.
        scale: Factor of the scores: that of the head before absorption.
        kv_lora_rank: Numbers of a latent that are the value.

    Returns:
        ``[num_tokens, num_heads, kv_lora_rank]``, in the type of `query`.

    Raises:
        ValueError: Shapes or types don't fit.
    """
    _check(query, latent_cache, kv_lora_rank)
    if use_triton(query):
        from octavo_kernels import triton

        return triton.mla_decode(query, latent_cache, metadata, scale, kv_lora_rank)
    keys = latent_cache.unsqueeze(1)  # [num_blocks, 1, block_size, kv_lora_rank + rope_dim]
    values = keys[..., :kv_lora_rank]
    if use_cpu(query, latent_cache) and fits_cpu_kernel(keys, values):
        return attend_on_cpu(query, keys, values, metadata, AttentionOptions(scale))
    return mla_decode_reference(query, latent_cache, metadata, scale, kv_lora_rank)


def mla_decode_reference(
    query: Tensor,
    latent_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_lora_rank: int,
) -> Tensor:
    """Do the same in plain torch, in float32."""
    keys = latent_cache.unsqueeze(1)  # [num_blocks, 1, block_size, kv_lora_rank + rope_dim]
    values = keys[..., :kv_lora_rank]
    return paged_attention_reference(query, keys, values, metadata, AttentionOptions(scale))


def _check(query: Tensor, latent_cache: Tensor, kv_lora_rank: int) -> None:
    if latent_cache.dim() != 3 or latent_cache.dtype == torch.int8:
        raise ValueError(
            "latent_cache must be floating point [num_blocks, block_size, latent_dim], not "
            f"{latent_cache.dtype} of {list(latent_cache.shape)}"
        )
    latent_dim = latent_cache.shape[-1]
    if query.shape[-1] != latent_dim:
        raise ValueError(f"query has heads of {query.shape[-1]}, the cache latents of {latent_dim}")
    if not 0 < kv_lora_rank <= latent_dim:
        raise ValueError(f"kv_lora_rank={kv_lora_rank} must be in 1 to latent_dim={latent_dim}")
