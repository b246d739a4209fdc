"""Normalization of rows, as layers of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo_kernels import fused_add_rms_norm, layer_norm, rms_norm
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import WeightEntry, WeightPart, whole_entry


class RMSNorm:
    """Root-mean-square normalization.

    Args:
        weight: ``[hidden_size]``.
        eps: Added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize rows; the shape is kept."""
        return rms_norm(x, self.weight, self._eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add a block's output to the residual stream; return the normalized sum, and the sum."""
        return fused_add_rms_norm(x, residual, self.weight, self._eps)


class LayerNorm:
    """Normalization to a mean of zero and a variance of one, then scaled and shifted.

    Args:
        weights: Loaded weights.
        name: Of the norm.
        eps: Added to the variance.
    """

    def __init__(self, weights: Mapping[str, Weight], name: str, eps: float) -> None:
        self._weight = tensor_of(weights, f"{name}.weight")
        self._bias = tensor_of(weights, f"{name}.bias")
        self._eps = eps

    @classmethod
    def weight_layout(cls, name: str, size: int) -> list[WeightEntry]:
        """List weight and bias."""
        return [whole_entry(f"{name}.weight", size), whole_entry(f"{name}.bias", size)]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize ``[num_tokens, hidden_size]``."""
        normed, _ = layer_norm(x, self._weight, self._bias, self._eps)
        return normed


def shifted_norm_entry(name: str, size: int) -> WeightEntry:
    """Describe a norm's weight that is stored less one, as Gemma's are.

    It is kept in float32: one and a small number have no place together in bfloat16.
    """
    part = WeightPart(name, (size,), _add_one)
    return WeightEntry(name, (part,), is_plain=True, dtype=torch.float32)


def _add_one(weight: Tensor) -> Tensor:
    return weight + 1
