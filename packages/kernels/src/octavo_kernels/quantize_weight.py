"""Quantize weights when a model is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.interleave import interleave
from octavo_kernels.pack_weight import _fill_up
from octavo_kernels.packed_weight import ROWS_OF_GROUP, PackedWeight, check_shape
from octavo_kernels.weight_fields import WeightFields

QUANTIZABLE_KINDS = ("q8_0", "q4_0", "w8a8")


def quantize_weight(weight: Tensor, kind: str) -> PackedWeight:
    """Quantize ``[out_features, in_features]`` by rounding to the nearest.

    Args:
        weight: float32, bfloat16 or float16.
        kind: ``q8_0`` or ``q4_0`` (a scale for 32 weights, chosen as GGUF's reference
            does), or ``w8a8`` (int8 with one scale for each row).

    Raises:
        ValueError: The kind is another, or ``in_features`` isn't a multiple of 32.
    """
    if kind not in QUANTIZABLE_KINDS:
        raise ValueError(
            f"weights can't be quantized to {kind!r}; they can to {', '.join(QUANTIZABLE_KINDS)}"
        )
    shape = check_shape(kind, weight.shape)
    wide = _fill_up(weight.float(), ROWS_OF_GROUP)
    if kind == "w8a8":
        scales = wide.abs().amax(dim=1, keepdim=True) / 127  # [rows, 1]
        values = _divide(wide, scales).round().clamp(-127, 127).to(torch.int8)
        fields = WeightFields(values, scales)
        return PackedWeight(kind, shape, interleave(fields, kind), scales.flatten().contiguous())
    blocks = wide.view(len(wide), -1, 32)
    if kind == "q8_0":
        scales = blocks.abs().amax(dim=-1, keepdim=True) / 127  # [rows, blocks, 1]
        values = _divide(blocks, scales).round().to(torch.int8)
    else:
        # The number furthest from zero becomes -8, the one end that is a step longer.
        furthest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
        scales = furthest / -8
        values = (_divide(blocks, scales) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    fields = WeightFields(values.flatten(1), scales.squeeze(-1).half())
    return PackedWeight(kind, shape, interleave(fields, kind))


def _divide(x: Tensor, scales: Tensor) -> Tensor:
    """``x / scales``, and 0 where the scale is."""
    return torch.where(scales == 0, 0.0, x * (1 / scales))
