"""A linear projection, over whatever form its weight is kept in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Linear:
    """``x @ weight.T + bias``.

    Models hold their projections as this class and never touch the weight, so that
    weights may later stay packed.

    Args:
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], name: str) -> Linear:
        """Take ``<name>.weight``, and ``<name>.bias`` if there is one, from loaded weights."""
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def __call__(self, x: Tensor) -> Tensor:
        """Project ``[num_tokens, in_features]`` to ``[num_tokens, out_features]``."""
        return torch.nn.functional.linear(x, self.weight, self.bias)
