"""A linear projection, over whatever form its weight is kept in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo_kernels import PackedWeight, quantized_matmul
from octavo_worker.layers.parallel_weights import group_of, is_partial
from octavo_worker.layers.weight import Packed, Weight, tensor_of
from octavo_worker.parallel_state import ParallelGroup


class Linear:
    """``x @ weight.T + bias``.

    Models hold their projections as this class and never touch the weight: it may be
    packed, and in parts.

    Args:
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
        group: Workers that have the other inputs; None if all are here. Their products are
            added up.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None = None, group: ParallelGroup | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._group = group

    @classmethod
    def of(cls, weights: Mapping[str, Weight], name: str) -> Linear:
        """Take ``<name>.weight``, and ``<name>.bias`` if there is one, from loaded weights."""
        has_bias = f"{name}.bias" in weights
        bias = tensor_of(weights, f"{name}.bias") if has_bias else None
        group = group_of(weights) if is_partial(weights, f"{name}.weight") else None
        return cls(weights[f"{name}.weight"], bias, group)

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
        if self._group is None:
            return self._multiply(x, self.bias)
        output = self._group.all_reduce(self._multiply(x, None))
        return output if self.bias is None else output + self.bias

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self.weight, Tensor):
            return torch.nn.functional.linear(x, self.weight, bias)
        part_biases = [None] * len(self.parts) if bias is None else self.part_biases
        outputs = [
            quantized_matmul(x, part, part_bias)
            for part, part_bias in zip(self.parts, part_biases, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
