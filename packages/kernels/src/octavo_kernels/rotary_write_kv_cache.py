"""Rotary embedding and the write to the paged cache in one pass over a step's heads."""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.dispatch import use_cpu, use_triton
from octavo_kernels.kv_quantization import check_kv_cache
from octavo_kernels.kv_write_problem import Rotation, Slots, run_kv_write
from octavo_kernels.rotary_embedding import (
    check_rotary,
    rotary_embedding,
    rotary_embedding_reference,
)
from octavo_kernels.write_kv_cache import (
    whole_vectors,
    write_kv_cache,
    write_kv_cache_reference,
)


def rotary_write_kv_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, and write keys and values to their slots.

    The same as `rotary_embedding` followed by `write_kv_cache`, bit for bit in float32, without
    a copy of the rotated keys. The arguments are those of the two.

    Returns:
        ``[num_tokens, num_heads, head_dim]``, the rotated query, new and contiguous.

    Raises:
        ValueError: The caches, scales and angles don't fit together.
    """
    check_rotary(query, cos_sin_cache)
    check_kv_cache(key_cache, value_cache, key_scale, value_scale)
    if use_triton(query):
        query, key = rotary_embedding(positions, query, key, cos_sin_cache, interleaved=interleaved)
        write_kv_cache(
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        return query
    if use_cpu(query, key_cache) and whole_vectors(key_cache, value_cache):
        slots = Slots(key_cache, value_cache, slot_mapping, key_scale, value_scale)
        rotation = Rotation(positions, cos_sin_cache, interleaved, query)
        rotated = run_kv_write(key, value, slots, rotation)
        assert rotated is not None
        return rotated.to(query.dtype)
    return rotary_write_kv_cache_reference(
        positions,
        query,
        key,
        value,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        interleaved=interleaved,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def rotary_write_kv_cache_reference(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Do the same in plain torch."""
    query, key = rotary_embedding_reference(
        positions, query, key, cos_sin_cache, interleaved=interleaved
    )
    write_kv_cache_reference(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return query
