"""Unpack GGUF tensor types to float32.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block of Q8_0,
Q4_0 or Q4_1 holds 32 weights behind a float16 scale (and, for Q4_1, a float16 minimum);
byte ``i`` of a 4-bit block holds weight ``i`` in its low half and ``i + 16`` in its high half.
The K types have blocks of 256 with scales of their own for 16 or 32 weights, see
`octavo_kernels.weight_fields`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_kernels.weight_fields import SUPER_BLOCK, read_gguf_fields

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
_SUPER_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}

DEQUANTIZABLE_TYPES = (*_PLAIN, *_BLOCK_BYTES, *_SUPER_BLOCK_BYTES)
"""Names of the tensor types that `dequantize` knows."""

_BLOCKS_AT_ONCE = 1 << 14


def dequantize(
    data: Tensor, type_name: str, shape: Sequence[int], out: Tensor | None = None
) -> Tensor:
    """Unpack one tensor.

    Args:
        data: ``[num_bytes]`` uint8, as it lies in the file.
        type_name: GGUF type, one of `DEQUANTIZABLE_TYPES`.
        shape: Shape of the result, outermost dimension first.
        out: Where to put the result: contiguous, of that shape, on the device of `data`.
            If it is float32, no other memory of that size is touched, which halves the
            time that a large tensor takes.

    Returns:
        `out`, or a new float32 tensor.

    Raises:
        ValueError: The type is not supported, or the bytes don't fill the shape.
    """
    block_weights, block_bytes = _block(type_name)
    num_blocks, rest = divmod(data.numel(), block_bytes)
    if rest or num_blocks * block_weights != math.prod(shape):
        raise ValueError(f"{data.numel()} bytes of {type_name} do not fill the shape {list(shape)}")
    if out is not None and out.dtype != torch.float32:
        return out.copy_(dequantize(data, type_name, shape))
    if out is None:
        out = torch.empty(tuple(shape), dtype=torch.float32, device=data.device)
    if type_name in _PLAIN:
        return out.copy_(data.view(_PLAIN[type_name]).view(out.shape))
    if type_name in _SUPER_BLOCK_BYTES:
        weights = out.view(num_blocks, SUPER_BLOCK)
        # A piece at a time: the fields of a tensor take several times its memory.
        for start in range(0, num_blocks, _BLOCKS_AT_ONCE):
            end = min(start + _BLOCKS_AT_ONCE, num_blocks)
            raw = data[start * block_bytes : end * block_bytes]
            kind = type_name.lower()
            weights[start:end] = read_gguf_fields(raw, kind, end - start).dequantize(kind)
        return out
    _unpack(data.view(num_blocks, block_bytes), type_name, out.view(num_blocks, block_weights))
    return out


def _block(type_name: str) -> tuple[int, int]:
    """Return the weights and the bytes of a block."""
    if type_name in _PLAIN:
        return 1, _PLAIN[type_name].itemsize
    if type_name in _BLOCK_BYTES:
        return 32, _BLOCK_BYTES[type_name]
    if type_name in _SUPER_BLOCK_BYTES:
        return SUPER_BLOCK, _SUPER_BLOCK_BYTES[type_name]
    known = ", ".join(DEQUANTIZABLE_TYPES)
    raise ValueError(f"tensor type {type_name} is not supported; supported: {known}")


def _unpack(blocks: Tensor, type_name: str, weights: Tensor) -> None:
    """Turn ``[num_blocks, block_bytes]`` uint8 into ``[num_blocks, 32]`` float32."""
    scale = _halves(blocks, 0)  # [num_blocks, 1]
    if type_name == "Q8_0":
        torch.mul(blocks[:, 2:].view(torch.int8), scale, out=weights)
        return
    packed = blocks[:, -16:]
    weights[:, :16] = packed & 15
    weights[:, 16:] = packed >> 4
    if type_name == "Q4_0":
        weights.sub_(8).mul_(scale)
    else:
        weights.mul_(scale).add_(_halves(blocks, 2))


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """Read the float16 at a byte offset of each block, as ``[num_blocks, 1]`` float32."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()
