"""One call of the CPU kernels that rotate heads and write them to the cache, as words in memory.

`octavo_kernels.cpu.kv_write` says what each word is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads

FEW_TOKENS = 32
"""Up to here one thread is done before a second one would have woken up."""

write = {
    torch.float32: Kernel("kv_write.write_f32", "q"),
    torch.bfloat16: Kernel("kv_write.write_bf16", "q"),
    torch.float16: Kernel("kv_write.write_f16", "q"),
    torch.int8: Kernel("kv_write.write_int8", "q"),
    torch.float8_e4m3fn: Kernel("kv_write.write_e4m3", "q"),
    torch.float8_e5m2: Kernel("kv_write.write_e5m2", "q"),
}
"""The kernel for each type of cache; its argument is the address of a problem."""


@dataclass(frozen=True)
class Rotation:
    """How heads are rotated.

    Attributes:
        positions: ``[num_tokens]`` integers.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32.
        interleaved: Whether neighbours are paired.
        query: ``[num_tokens, num_heads, head_dim]``, rotated as well.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    interleaved: bool
    query: Tensor


@dataclass(frozen=True)
class Slots:
    """Where keys and values go.

    Attributes:
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous.
        value_cache: Like `key_cache`, with heads of ``value_head_dim``.
        slot_mapping: ``[num_tokens]`` integers.
        key_scale: ``[num_blocks, num_kv_heads, block_size]`` float32, contiguous.
        value_scale: Like `key_scale`.
    """

    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None


def run_kv_write(
    key: Tensor, value: Tensor, slots: Slots, rotation: Rotation | None = None
) -> Tensor | None:
    """Rotate keys and queries if asked, and write keys and values.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        value: ``[num_tokens, num_kv_heads, value_head_dim]``.
        slots: Where they go.
        rotation: How keys and queries are rotated before.

    Returns:
        The rotated query in float32, if there is a rotation.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size, value_dim = slots.value_cache.shape[2:]
    key, value = as_rows(key), as_rows(value)
    slot_mapping = slots.slot_mapping.to(torch.int32).contiguous()
    scratch = torch.empty(get_num_threads(), head_dim)
    writing = [
        *(key.data_ptr(), 4 * key.stride(0), value.data_ptr(), 4 * value.stride(0)),
        *(slots.key_cache.data_ptr(), slots.value_cache.data_ptr()),
        0 if slots.key_scale is None else slots.key_scale.data_ptr(),
        0 if slots.value_scale is None else slots.value_scale.data_ptr(),
        slot_mapping.data_ptr(),
        *(num_tokens, num_kv_heads, head_dim, value_dim, block_size, scratch.data_ptr()),
    ]
    return _run(write[slots.key_cache.dtype], num_tokens, rotation, writing)


def run_rotation(rotation: Rotation) -> Tensor:
    """Rotate the query of `rotation`, and write nothing; float32."""
    num_tokens, _, head_dim = rotation.query.shape
    writing = [*[0] * 9, num_tokens, 0, head_dim, 0, 1, 0]
    rotated = _run(write[torch.float32], num_tokens, rotation, writing)
    assert rotated is not None
    return rotated


def _run(
    kernel: Kernel, num_tokens: int, rotation: Rotation | None, writing: list[int]
) -> Tensor | None:
    rotated = None
    rotating = [0] * 8
    if rotation is not None:
        query = as_rows(rotation.query)
        positions = rotation.positions.to(torch.int32).contiguous()
        cos_sin_cache = rotation.cos_sin_cache.contiguous()
        rotated = torch.empty(query.shape)
        rotating = [
            *(positions.data_ptr(), cos_sin_cache.data_ptr(), cos_sin_cache.shape[1]),
            *(int(rotation.interleaved), query.data_ptr(), 4 * query.stride(0)),
            *(rotated.data_ptr(), query.shape[1]),
        ]
    words = torch.tensor([*rotating, *writing])
    if num_tokens <= FEW_TOKENS:
        kernel.alone(words.data_ptr())
    else:
        kernel(words.data_ptr())
    return rotated


def as_rows(x: Tensor) -> Tensor:
    """Return float32 whose heads lie side by side in each token: slices of a fused
    projection are taken as they are."""
    x = x.float()
    dense = x.stride(-1) == 1 and x.stride(1) == x.shape[-1]
    return x if dense else x.contiguous()
