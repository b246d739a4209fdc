"""The forms that a loaded tensor of a model can have."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from octavo_kernels import PackedWeight

Packed = tuple[PackedWeight, ...]
"""A matrix for the CPU kernels, in parts by rows: one, or several of different kinds."""

Weight = Tensor | Packed


def tensor_of(weights: Mapping[str, Weight], name: str) -> Tensor:
    """Return a weight that is never packed: of a norm, or a bias."""
    weight = weights[name]
    assert isinstance(weight, Tensor)
    return weight
