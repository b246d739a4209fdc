"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import Experts, PackedWeight, fused_moe, run_experts, stacked_moe
from octavo_worker.layers.activation import GATED, KERNEL_NAMES
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.mlp import GatedMLP
from octavo_worker.layers.parallel_weights import group_of
from octavo_worker.layers.weight import Weight
from octavo_worker.layers.weight_entry import WeightEntry, WeightPart, linear_entries

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From router logits ``[num_tokens, num_experts]`` to weights and experts, both ``[num_tokens,
top_k]``."""

_KERNEL_BLOCK = 32  # sizes that `Experts` takes are multiples


class MixtureOfExperts:
    """A router, experts that are gated feed-forwards, and shared experts that see every token.

    Args:
        spec: Hyper-parameters.
        weights: Loaded weights.
        prefix: Its name in them.
        router: Chooses the experts of each token.
        has_shared_experts: Whether there is a feed-forward for all tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        prefix: str,
        router: Router,
        *,
        has_shared_experts: bool = False,
    ) -> None:
        self._gate = Linear.of(weights, f"{prefix}.gate")
        self._router = router
        experts = [f"{prefix}.experts.{index}" for index in range(spec.num_experts)]
        self._gate_up = [Linear.of(weights, f"{expert}.gate_up_proj") for expert in experts]
        # Several workers add up what they have of the whole mixture, not of each expert.
        self._group = group_of(weights)
        self._down = [Linear(weights[f"{expert}.down_proj.weight"]) for expert in experts]
        self._activation = GATED[spec.hidden_act]
        self._joined = _join(self._gate_up, self._down, spec.hidden_act)
        self._stacks = stacks_of(self._gate_up, self._down)
        self._shared = None
        if has_shared_experts:
            self._shared = GatedMLP(weights, f"{prefix}.shared_experts", self._activation)

    @classmethod
    def weight_layout(
        cls,
        spec: ModelSpec,
        prefix: str,
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        *,
        has_shared_experts: bool = False,
    ) -> list[WeightEntry]:
        """List the router, and the experts' projections: gate and up fused, and down.

        Args:
            spec: Hyper-parameters.
            prefix: Name of the mixture.
            names: What the checkpoint calls an expert's gate, up and down.
            has_shared_experts: Whether there is a feed-forward for all tokens.
        """
        hidden, width = spec.hidden_size, spec.moe_intermediate_size
        gate, up, down = names
        # Experts that are about as good are not told apart by rounding.
        router = WeightPart(f"{prefix}.gate.weight", (spec.num_experts, hidden))
        entries = [WeightEntry(router.name, (router,), is_plain=True, dtype=torch.float32)]
        entries += expert_entries(spec, prefix, "gate_up_proj", {gate: width, up: width}, hidden)
        entries += expert_entries(spec, prefix, "down_proj", {down: hidden}, width)
        if has_shared_experts:
            shared = spec.shared_expert_intermediate_size
            entries += GatedMLP.weight_layout(f"{prefix}.shared_experts", hidden, shared)
        return entries

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        weights, experts = self._router(self._gate(hidden.float()))
        if self._joined is not None:
            output = fused_moe(hidden, self._joined, weights, experts)
        elif self._stacks is not None:
            output = stacked_moe(hidden, *self._stacks, weights, experts, self._activation)
        else:
            output = run_experts(hidden, weights, experts, self._run_expert)
        if self._group is not None:
            output = self._group.all_reduce(output)
        return output if self._shared is None else output + self._shared.forward(hidden)

    def _run_expert(self, index: int, rows: Tensor) -> Tensor:
        return self._down[index](self._activation(self._gate_up[index](rows)))


def expert_entries(
    spec: ModelSpec, prefix: str, name: str, parts: Mapping[str, int], in_features: int
) -> list[WeightEntry]:
    """List a projection of every expert of a layer, to lie in one memory.

    Args:
        spec: Hyper-parameters.
        prefix: Name of the mixture.
        name: Of the projection; see `linear_entries` for it and what follows.
        parts: The checkpoint's projections, with their out_features.
        in_features: Width of the input.
    """
    return [
        entry._replace(stack=f"{prefix}.experts.{name}")
        for index in range(spec.num_experts)
        for entry in linear_entries(f"{prefix}.experts.{index}", name, parts, in_features)
    ]


def stacks_of(gate_up: Sequence[Linear], down: Sequence[Linear]) -> tuple[Tensor, Tensor] | None:
    """Return the matrices of all experts as `stacked_moe` takes them, without a copy.

    Args:
        gate_up: Of each expert.
        down: Likewise.

    Returns:
        ``[num_experts, out_features, in_features]`` of both; None if they are packed, or do
        not lie as `WeightEntry.stack` asks for.
    """
    first, second = _stack_of(gate_up), _stack_of(down)
    return None if first is None or second is None else (first, second)


def _stack_of(linears: Sequence[Linear]) -> Tensor | None:
    matrices = [linear.weight for linear in linears if isinstance(linear.weight, Tensor)]
    if len(matrices) < len(linears):
        return None
    first = matrices[0]
    starts = [matrix.storage_offset() for matrix in matrices]
    step = (starts[-1] - starts[0]) // max(len(starts) - 1, 1)
    evenly = [starts[0] + index * step for index in range(len(starts))]
    memories = {matrix.untyped_storage().data_ptr() for matrix in matrices}
    if starts != evenly or len(memories) > 1:
        return None
    return first.as_strided((len(matrices), *first.shape), (step, *first.stride()))


def _join(gate_up: list[Linear], down: list[Linear], activation: str) -> Experts | None:
    """Bring packed experts into the form of the one kernel that runs them all, if it takes them."""
    every = (*gate_up, *down)
    if any(isinstance(linear.weight, Tensor) or len(linear.parts) > 1 for linear in every):
        return None
    wholes: list[PackedWeight] = [linear.whole for linear in every]
    if any(size % _KERNEL_BLOCK for weight in wholes for size in weight.shape):
        return None
    if any(weight.input_order is not None for weight in wholes):
        return None
    count = len(gate_up)
    return Experts(wholes[:count], wholes[count:], KERNEL_NAMES[activation])
