"""Unpack GGUF tensor types to float32.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block of Q8_0,
Q4_0 or Q4_1 holds 32 weights behind a float16 scale (and, for Q4_1, a float16 minimum);
byte ``i`` of a 4-bit block holds weight ``i`` in its low half and ``i + 16`` in its high half.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}

DEQUANTIZABLE_TYPES = (*_PLAIN, *_BLOCK_BYTES)
"""Names of the tensor types that `dequantize` knows."""


def dequantize(data: Tensor, type_name: str, shape: Sequence[int]) -> Tensor:
    """Unpack one tensor.

    Args:
        data: ``[num_bytes]`` uint8, as it lies in the file.
        type_name: GGUF type, one of `DEQUANTIZABLE_TYPES`.
        shape: Shape of the result, outermost dimension first.

    Returns:
        Float32 of that shape. F32 data is not copied.

    Raises:
        ValueError: The type is not supported, or the bytes don't fill the shape.
    """
    if type_name in _PLAIN:
        weights = data.view(_PLAIN[type_name]).float()
    elif type_name in _BLOCK_BYTES:
        weights = _unpack(data.view(-1, _BLOCK_BYTES[type_name]), type_name)
    else:
        known = ", ".join(DEQUANTIZABLE_TYPES)
        raise ValueError(f"tensor type {type_name} is not supported; supported: {known}")
    num_weights = 1
    for dimension in shape:
        num_weights *= dimension
    if weights.numel() != num_weights:
        raise ValueError(f"{len(data)} bytes of {type_name} do not fill the shape {list(shape)}")
    return weights.view(tuple(shape))


def _unpack(blocks: Tensor, type_name: str) -> Tensor:
    """Turn ``[num_blocks, block_bytes]`` uint8 into ``[num_blocks, 32]`` float32."""
    scale = _halves(blocks, 0)  # [num_blocks, 1]
    if type_name == "Q8_0":
        return blocks[:, 2:].view(torch.int8) * scale
    packed = blocks[:, -16:]
    weights = blocks.new_empty(len(blocks), 32, dtype=torch.float32)
    weights[:, :16] = packed & 15
    weights[:, 16:] = packed >> 4
    if type_name == "Q4_0":
        return weights.sub_(8).mul_(scale)
    return weights.mul_(scale).add_(_halves(blocks, 2))


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """Read the float16 at a byte offset of each block, as ``[num_blocks, 1]`` float32."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()
