"""Allocate the paged KV cache of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.layer_spec import LayerSpec
from octavo_core.model_spec import ModelSpec
from octavo_kernels import map_memory
from octavo_worker.layers.kv_cache import KVCache

_CPU = torch.device("cpu")
_MAX_SLOTS = 2**31  # of 32 bits, in the kernels


class KVPool(NamedTuple):
    """The KV cache of every layer, and where in it a block is.

    Attributes:
        caches: One for each layer.
        block_step: A block's id times this is its number in each of `caches`.
    """

    caches: list[KVCache]
    block_step: int = 1


def allocate_kv_pool(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype
) -> KVPool:
    """Allocate the KV cache of a CPU: what all layers keep of a block lies together.

    A cache grows from its first block on, and what grows in one place takes whole pages in one.
    With a place for keys and one for values of each layer, the first token of the starter model
    would take 60 huge pages, 120 MB and 50 ms, and so would every 5,461st.

    Args:
        spec: Hyper-parameters.
        num_blocks: Blocks of the pool.
        block_size: Tokens of a block.
        dtype: Type of K and V.

    Raises:
        ModelError: Layers of other groups have heads of another shape.
    """
    step = _tensors_of_block(spec)
    if not step or num_blocks * step * block_size >= _MAX_SLOTS:
        return KVPool(allocate_kv_caches(spec, num_blocks, block_size, dtype, _CPU))
    groups = spec.kv_cache_groups()
    layer = spec.layers[groups[0].layers[0]]
    shape = (num_blocks * step, layer.num_kv_heads, block_size, layer.head_dim_k)
    whole = _zeros(shape, dtype, _CPU)
    # Each from its place in the first block to its place in the last.
    parts = [whole[place : place + (num_blocks - 1) * step + 1] for place in range(step)]
    nothing = torch.empty(0, dtype=dtype)
    caches = [KVCache(nothing, nothing)] * spec.num_hidden_layers
    for group in groups:
        for place, index in enumerate(group.layers):
            if layer.kind == "mla":
                caches[index] = KVCache(parts[place], parts[place])
            else:
                caches[index] = KVCache(*parts[2 * place : 2 * place + 2])
    return KVPool(caches, step)


def _tensors_of_block(spec: ModelSpec) -> int:
    """How many tensors of one shape a block has in all layers; 0 if their shapes differ."""
    groups = spec.kv_cache_groups()
    layers = [spec.layers[index] for group in groups for index in group.layers]
    if len({(layer.kind == "mla", *_shape(layer)) for layer in layers}) != 1:
        return 0
    most = max(len(group.layers) for group in groups)
    if layers[0].kind == "mla":
        return most
    return 2 * most if layers[0].head_dim_k == layers[0].head_dim_v else 0


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


def memory_of(kv_caches: Sequence[KVCache]) -> list[torch.UntypedStorage]:
    """Return the memory of a model's caches; what several layers share is there once."""
    storages = [tensor.untyped_storage() for cache in kv_caches for tensor in cache]
    return list({storage.data_ptr(): storage for storage in storages}.values())


def total_bytes(kv_caches: Sequence[KVCache]) -> int:
    """Return the bytes of a model's caches; what several layers share counts once."""
    return sum(storage.nbytes() for storage in memory_of(kv_caches))


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
    return map_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
