"""A linear projection, over whatever form its weight is kept in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo_kernels import PackedWeight, quantized_matmul
from octavo_worker.layers.weight import Packed, Weight, tensor_of


class Linear:
    """``x @ weight.T + bias``.

    Models hold their projections as this class and never touch the weight: it may be
    packed, and in parts.

    Args:
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def of(cls, weights: Mapping[str, Weight], name: str) -> Linear:
        """Take ``<name>.weight``, and ``<name>.bias`` if there is one, from loaded weights."""
        has_bias = f"{name}.bias" in weights
        bias = tensor_of(weights, f"{name}.bias") if has_bias else None
        return cls(weights[f"{name}.weight"], bias)

    @property
    def parts(self) -> Packed:
        """The parts of a packed weight."""
        assert not isinstance(self.weight, Tensor)
        return self.weight

    @property
    def whole(self) -> PackedWeight:
        """A packed weight that is one part, as every projection of one tensor is."""
        (part,) = self.parts
        return part

    @property
    def part_biases(self) -> list[Tensor | None]:
        """The bias of each part of a packed weight."""
        if self.bias is None:
            return [None] * len(self.parts)
        return list(torch.split(self.bias, [part.shape[0] for part in self.parts]))

    def __call__(self, x: Tensor) -> Tensor:
        """Project ``[num_tokens, in_features]`` to ``[num_tokens, out_features]``."""
        if isinstance(self.weight, Tensor):
            return torch.nn.functional.linear(x, self.weight, self.bias)
        outputs = [
            quantized_matmul(x, part, bias)
            for part, bias in zip(self.parts, self.part_biases, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
