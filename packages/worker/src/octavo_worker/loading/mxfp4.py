"""MXFP4: numbers of 4 bits, of which 32 share a power of two.

OCP Microscaling Formats, version 1.0, section 5.3: an element is a float of 1 sign, 2 exponent
and 1 mantissa bits, a scale a power of two (e8m0). Twice an element is a whole number from -12 to
12, so a block is a block of Q8_0, exactly, as long as its scale is a float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_kernels import PackedWeight, pack_dense_weight, pack_weight

BLOCK = 32
BLOCK_BYTES = 16

_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_BIAS = 127  # of a scale's exponent
_NOT_A_NUMBER = 255
# Exponents of the powers of two that are float16, the small ones without a leading one.
_FLOAT16_EXPONENTS = range(-24, 16)


def read_neighbours(blocks: Tensor) -> Tensor:
    """Take bytes apart whose halves are neighbours, low half first, as in safetensors files.

    Args:
        blocks: ``[..., 16]`` uint8.

    Returns:
        ``[..., 32]`` int8, each number twice.
    """
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return _DOUBLED[halves.long()]


def read_halves(blocks: Tensor) -> Tensor:
    """Take bytes apart that hold inputs ``i`` and ``i + 16``, as in GGUF files.

    Args:
        blocks: ``[..., 16]`` uint8.

    Returns:
        ``[..., 32]`` int8, each number twice.
    """
    return _DOUBLED[torch.cat((blocks & 15, blocks >> 4), dim=-1).long()]


def widen(doubled: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers in float32.

    Args:
        doubled: ``[rows, num_blocks, 32]`` int8, each number twice.
        scales: ``[rows, num_blocks]`` uint8.

    Returns:
        ``[rows, num_blocks * 32]``.
    """
    # Halved as one number: half of the smallest scale alone would be no float32.
    exponents = (scales.int() - _BIAS).unsqueeze(-1)
    wide = torch.ldexp(doubled.float() / 2, exponents.expand(doubled.shape))
    return wide.flatten(1)


def pack_mxfp4(doubled: Tensor, scales: Tensor) -> PackedWeight:
    """Pack a matrix for the CPU kernels without loss, as Q8_0.

    With a scale that Q8_0 can't have, which no weight that was trained needs, it is bfloat16.

    Args:
        doubled: ``[rows, num_blocks, 32]`` int8, each number twice.
        scales: ``[rows, num_blocks]`` uint8.
    """
    exponents = scales.int() - _BIAS - 1
    smallest, largest = _FLOAT16_EXPONENTS.start, _FLOAT16_EXPONENTS.stop - 1
    # What is zero has no need of a scale; quantizers write the smallest one there.
    exponents = exponents.masked_fill((doubled == 0).all(-1), 0)
    if int(exponents.min()) < smallest or int(exponents.max()) > largest:
        return pack_dense_weight(widen(doubled, scales).bfloat16())
    halves = torch.exp2(exponents.float()).half()
    rows, num_blocks, _ = doubled.shape
    raw = torch.empty(rows, num_blocks, 2 + BLOCK, dtype=torch.uint8)
    raw[..., :2] = halves.unsqueeze(-1).view(torch.uint8)
    raw[..., 2:] = doubled.view(torch.uint8)
    return pack_weight(raw.flatten(), "q8_0", (rows, num_blocks * BLOCK))


def check_scales(scales: Tensor, name: str, place: str) -> None:
    """Refuse a scale that is no number.

    Raises:
        ModelError: One is; the message names the tensor.
    """
    if bool((scales == _NOT_A_NUMBER).any()):
        raise ModelError(
            f"{place}: tensor {name} has numbers that are NaN or infinite; the file is damaged.",
            field=name,
        )
