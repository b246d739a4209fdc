"""Feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from octavo_worker.layers.activation import Activation
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.weight import Weight
from octavo_worker.layers.weight_entry import WeightEntry, linear_entries


class FeedForward(Protocol):
    """What stands between attention and the next layer."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        ...


class GatedMLP:
    """A feed-forward whose one half is multiplied with the activated other half.

    Args:
        weights: Loaded weights.
        prefix: Its name in them.
        activation: One of `octavo_worker.layers.activation.GATED`.
    """

    def __init__(self, weights: Mapping[str, Weight], prefix: str, activation: Activation) -> None:
        self.gate_up_proj = Linear.of(weights, f"{prefix}.gate_up_proj")
        self.down_proj = Linear.of(weights, f"{prefix}.down_proj")
        self._activation = activation

    @classmethod
    def weight_layout(
        cls,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        is_fused: bool = False,
    ) -> list[WeightEntry]:
        """List the projections: gate and up fused, and down.

        Args:
            prefix: Name of the feed-forward.
            hidden_size: Width of input and output.
            intermediate_size: Width in between.
            bias: Whether the projections have biases.
            is_fused: Whether the checkpoint has gate and up as one.
        """
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        sections: tuple[int, ...] = ()
        if is_fused:
            sections = tuple(parts.values())
            parts = {"gate_up_proj": sum(sections)}
        down = {"down_proj": hidden_size}
        return [
            *linear_entries(*(prefix, "gate_up_proj", parts, hidden_size, bias), sections=sections),
            *linear_entries(prefix, "down_proj", down, intermediate_size, bias),
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        return self.down_proj(self._activation(self.gate_up_proj(hidden)))


class PlainMLP:
    """A feed-forward of two projections.

    Args:
        first: To the width in between.
        activation: One of `octavo_worker.layers.activation.PLAIN`.
        second: Back.
    """

    def __init__(self, first: Linear, activation: Activation, second: Linear) -> None:
        self._first = first
        self._activation = activation
        self._second = second

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        return self._second(self._activation(self._first(hidden)))
