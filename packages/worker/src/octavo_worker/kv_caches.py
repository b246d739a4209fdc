"""Allocate the paged KV cache of a model."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

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


def total_bytes(kv_caches: Sequence[KVCache]) -> int:
    """Return the bytes of a model's caches; what several layers share counts once."""
    tensors = {tensor.data_ptr(): tensor for cache in kv_caches for tensor in cache}
    return sum(tensor.nbytes for tensor in tensors.values())


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
    memory = _untouched_memory(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _untouched_memory(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory of which no page is taken before it is used.

    torch.zeros writes all of it, 1 s for 4 GiB. So does calloc, and np.zeros with it, where a
    model that was there before has left enough room in the heap.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
