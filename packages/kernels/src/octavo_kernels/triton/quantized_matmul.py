"""Products with packed weights on a GPU, laid out for it on first use."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from octavo_kernels.interleave import separate
from octavo_kernels.packed_weight import DENSE_KINDS, PackedWeight
from octavo_kernels.triton.grouped_matmul import grouped_matmul
from octavo_kernels.triton.grouped_weight import GROUPED_KINDS, GroupedWeight, group_weight
from octavo_kernels.triton.scaled_matmul import scaled_matmul
from octavo_kernels.unpack_weight import unpack_weight

# A matrix and the scales of its rows, where it has some.
_Matrix = tuple[Tensor, Tensor | None]

_laid_out: WeakKeyDictionary[PackedWeight, GroupedWeight | _Matrix] = WeakKeyDictionary()


def quantized_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``; see `octavo_kernels.quantized_matmul`.

    Activations are not rounded, except for ``w8a8``. The GPU's layout is kept beside the packed
    weight for as long as that lives; where memory counts, keep what `group_weight` returns
    instead, and call `grouped_matmul`.

    Args:
        x: ``[num_tokens, in_features]``.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or none.
    """
    form = _laid_out.get(weight)
    if form is None:
        form = _laid_out[weight] = _lay_out(weight)
    if isinstance(form, GroupedWeight):
        return grouped_matmul(x, form, bias)
    matrix, scales = form
    if scales is not None:
        return scaled_matmul(x, matrix, scales, bias)
    matrix = matrix if matrix.dtype == x.dtype else matrix.to(x.dtype)
    return torch.nn.functional.linear(x, matrix, None if bias is None else bias.to(x.dtype))


def _lay_out(weight: PackedWeight) -> GroupedWeight | _Matrix:
    """Bring a weight into the form that its kernel takes."""
    if weight.kind in GROUPED_KINDS:
        return group_weight(weight)
    if weight.kind == "w8a8":
        fields = separate(weight.data, weight.kind, weight.scales, weight.shape[1])
        rows = weight.shape[0]
        return fields.values[:rows].contiguous(), fields.scales[:rows].flatten().contiguous()
    return unpack_weight(weight).to(DENSE_KINDS[weight.kind]), None
