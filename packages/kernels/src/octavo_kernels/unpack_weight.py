"""Packed weights back as float32."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.interleave import separate
from octavo_kernels.packed_weight import DENSE_KINDS, ROWS_OF_PANEL, PackedWeight


def unpack_weight(weight: PackedWeight) -> Tensor:
    """Compute ``[out_features, in_features]`` float32, inputs in their own order."""
    rows, inputs = weight.shape
    if weight.kind in DENSE_KINDS:
        wide = _unpack_dense(weight)
    else:
        fields = separate(weight.data, weight.kind, weight.scales, inputs)
        wide = fields.dequantize(weight.kind)
    wide = wide[:rows]
    if weight.input_order is not None:
        wide = torch.empty_like(wide).index_copy_(1, weight.input_order, wide)
    return wide.contiguous()


def _unpack_dense(weight: PackedWeight) -> Tensor:
    panels = weight.data.view(DENSE_KINDS[weight.kind]).view(-1, weight.shape[1], ROWS_OF_PANEL)
    wide = panels.float().transpose(1, 2).reshape(-1, weight.shape[1])
    if weight.scales is None:
        return wide
    scales = weight.scales.transpose(1, 2).flatten(0, 1)  # [rows, blocks]
    block = weight.scale_block or weight.shape[1]
    return wide * scales.repeat_interleave(block, dim=1)[:, : weight.shape[1]]
