"""Allocate the paged KV cache of a model."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.layer_spec import LayerSpec
from octavo_core.model_spec import ModelSpec
from octavo_worker.layers.kv_cache import KVCache


def allocate_kv_caches(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[KVCache]:
    """Allocate the KV cache of every layer.

    A block of any group has the same bytes: the first layer of each group shares the same
    memory, the second another, and so on, for a block belongs to one group at a time.

    Args:
        spec: Hyper-parameters.
        num_blocks: Blocks of the pool.
        block_size: Tokens of a block.
        dtype: Type of K and V.
        device: Where the result is to be.

    Returns:
        One for each layer; layers without K and V have empty ones.

    Raises:
        ModelError: Layers of other groups have heads of another shape.
    """
    nothing = torch.empty(0, dtype=dtype, device=device)
    caches = [KVCache(nothing, nothing)] * spec.num_hidden_layers
    places: dict[int, tuple[LayerSpec, KVCache]] = {}
    for group in spec.kv_cache_groups():
        for place, index in enumerate(group.layers):
            layer = spec.layers[index]
            if place not in places:
                places[place] = layer, _allocate(layer, num_blocks, block_size, dtype, device)
            first, caches[index] = places[place]
            if _shape(first) != _shape(layer):
                raise ModelError(
                    f"layers with and without a window have KV heads of other shapes in "
                    f"{spec.architecture}, which is not supported.",
                    field="layer_types",
                )
    return caches


def _shape(layer: LayerSpec) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v


def _allocate(
    layer: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    shape = (num_blocks, layer.num_kv_heads, block_size)
    key = _zeros((*shape, layer.head_dim_k), dtype, device)
    if layer.kind == "mla":
        return KVCache(key, key)
    return KVCache(key, _zeros((*shape, layer.head_dim_v), dtype, device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Zeroed memory from the system is not touched until it is used; torch.zeros would
    # write all of it, 1 s for 4 GiB.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
