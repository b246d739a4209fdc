"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import Experts, PackedWeight, fused_moe
from octavo_worker.layers.activation import GATED, KERNEL_NAMES
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.mlp import GatedMLP
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
        self._down = [Linear.of(weights, f"{expert}.down_proj") for expert in experts]
        self._activation = GATED[spec.hidden_act]
        self._joined = _join(self._gate_up, self._down, spec.hidden_act)
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
        for index in range(spec.num_experts):
            expert = f"{prefix}.experts.{index}"
            entries += linear_entries(expert, "gate_up_proj", {gate: width, up: width}, hidden)
            entries += linear_entries(expert, "down_proj", {down: hidden}, width)
        if has_shared_experts:
            shared = spec.shared_expert_intermediate_size
            entries += GatedMLP.weight_layout(f"{prefix}.shared_experts", hidden, shared)
        return entries

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        weights, experts = self._router(self._gate(hidden.float()))
        if self._joined is not None:
            output = fused_moe(hidden, self._joined, weights, experts)
        else:
            output = run_experts(hidden, weights, experts, self._run_expert)
        return output if self._shared is None else output + self._shared.forward(hidden)

    def _run_expert(self, index: int, rows: Tensor) -> Tensor:
        return self._down[index](self._activation(self._gate_up[index](rows)))


def run_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    run_expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Send each token through its experts, one expert after the other.

    Args:
        hidden: ``[num_tokens, hidden_size]``.
        weights: ``[num_tokens, top_k]``.
        experts: ``[num_tokens, top_k]`` integers.
        run_expert: Computes an expert, by its index, for ``[num_rows, hidden_size]``.

    Returns:
        ``[num_tokens, hidden_size]``.
    """
    output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for index in torch.unique(experts).tolist():
        tokens, choices = (experts == index).nonzero(as_tuple=True)
        rows = run_expert(index, hidden[tokens]).float()
        output.index_add_(0, tokens, rows * weights[tokens, choices].unsqueeze(1))
    return output.to(hidden.dtype)


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
