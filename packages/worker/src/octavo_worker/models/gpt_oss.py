"""gpt-oss (OpenAI 2025, arXiv 2508.10925): attention with sinks, and experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import run_experts, stacked_moe
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.mlp import FeedForward
from octavo_worker.layers.moe import expert_entries, stacks_of
from octavo_worker.layers.parallel_weights import group_of
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import WeightEntry, whole_entry
from octavo_worker.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class GptOssExperts:
    """Experts whose gate and up are interleaved and clamped, and whose projections have biases.

    Args:
        spec: Hyper-parameters.
        weights: Loaded weights.
        prefix: Name in them.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str) -> None:
        self._top_k = spec.num_experts_per_tok
        self._alpha, self._limit = spec.swiglu_alpha, spec.swiglu_limit
        self._gate = Linear.of(weights, f"{prefix}.router")
        self._gate_up = _linears(spec, weights, f"{prefix}.experts", "gate_up_proj")
        self._down = _linears(spec, weights, f"{prefix}.experts", "down_proj")
        # Several workers have a part of each expert's width, and add up what comes of it; the
        # bias behind it is the first one's to add.
        self._group = group_of(weights)
        if self._group is not None and self._group.place.tensor_rank > 0:
            self._down = [Linear(linear.weight) for linear in self._down]
        self._stacks = stacks_of(self._gate_up, self._down)
        self._gate_up_bias = tensor_of(weights, f"{prefix}.experts.gate_up_proj_bias")
        self._down_bias: Tensor | None = None
        if self._down[0].bias is not None:
            self._down_bias = tensor_of(weights, f"{prefix}.experts.down_proj_bias")

    @classmethod
    def weight_layout(cls, spec: ModelSpec, prefix: str) -> list[WeightEntry]:
        """List router and experts; the biases of all experts are one tensor."""
        experts, hidden, width = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
        return [
            whole_entry(f"{prefix}.router.weight", experts, hidden),
            whole_entry(f"{prefix}.router.bias", experts),
            whole_entry(f"{prefix}.experts.gate_up_proj_bias", experts, 2 * width),
            whole_entry(f"{prefix}.experts.down_proj_bias", experts, hidden),
            *expert_entries(spec, prefix, "gate_up_proj", {"gate_up_proj": 2 * width}, hidden),
            *expert_entries(spec, prefix, "down_proj", {"down_proj": hidden}, width),
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        scores, experts = self._gate(hidden).float().topk(self._top_k, dim=-1)
        output = self._run(hidden, scores.softmax(-1), experts)
        return output if self._group is None else self._group.all_reduce(output)

    def _run(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if self._stacks is None:
            return run_experts(hidden, weights, experts, self._run_expert)
        return stacked_moe(
            *(hidden, *self._stacks, weights, experts, self._activation),
            gate_up_bias=self._gate_up_bias,
            down_bias=self._down_bias,
        )

    def _run_expert(self, index: int, rows: Tensor) -> Tensor:
        return self._down[index](self._activation(self._gate_up[index](rows)))

    def _activation(self, both: Tensor) -> Tensor:
        gate = both[:, ::2].clamp(max=self._limit)
        up = both[:, 1::2].clamp(-self._limit, self._limit)
        return (up + 1) * gate * torch.sigmoid(self._alpha * gate)


def _linears(
    spec: ModelSpec, weights: Mapping[str, Weight], prefix: str, name: str
) -> list[Linear]:
    biases = tensor_of(weights, f"{prefix}.{name}_bias")
    return [
        Linear(weights[f"{prefix}.{index}.{name}.weight"], biases[index])
        for index in range(spec.num_experts)
    ]


class GptOssDecoderLayer(LlamaDecoderLayer):
    """A Llama layer with these experts."""

    @classmethod
    def mlp_layout(cls, spec: ModelSpec, prefix: str, index: int) -> list[WeightEntry]:
        """List the tensors of the experts."""
        return GptOssExperts.weight_layout(spec, f"{prefix}.mlp")

    def make_mlp(
        self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str, index: int
    ) -> FeedForward:
        """Make the experts of `mlp_layout`."""
        return GptOssExperts(spec, weights, f"{prefix}.mlp")


class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = GptOssDecoderLayer
