"""gpt-oss (OpenAI 2025, arXiv 2508.10925): attention with sinks, and experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo_core.model_spec import ModelSpec
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.mlp import FeedForward
from octavo_worker.layers.moe import run_experts
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import WeightEntry, WeightPart, whole_entry
from octavo_worker.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class GptOssExperts:
    """Experts whose gate and up are interleaved and clamped, and whose projections have biases.

    All experts of a layer are one tensor.

    Args:
        spec: Hyper-parameters.
        weights: Loaded weights.
        prefix: Name in them.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str) -> None:
        self._top_k = spec.num_experts_per_tok
        self._alpha, self._limit = spec.swiglu_alpha, spec.swiglu_limit
        self._gate = Linear.of(weights, f"{prefix}.router")
        # [num_experts, 2 * width, hidden_size] and [num_experts, hidden_size, width]
        self._gate_up_weight = tensor_of(weights, f"{prefix}.experts.gate_up_proj")
        self._gate_up_bias = tensor_of(weights, f"{prefix}.experts.gate_up_proj_bias")
        self._down_weight = tensor_of(weights, f"{prefix}.experts.down_proj")
        self._down_bias = tensor_of(weights, f"{prefix}.experts.down_proj_bias")

    @classmethod
    def weight_layout(cls, spec: ModelSpec, prefix: str) -> list[WeightEntry]:
        """List router and experts."""
        experts, hidden, width = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
        stored = {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}
        entries = [
            whole_entry(f"{prefix}.router.weight", experts, hidden),
            whole_entry(f"{prefix}.router.bias", experts),
        ]
        for name, (inputs, outputs) in stored.items():
            full_name = f"{prefix}.experts.{name}"
            part = WeightPart(full_name, (experts, inputs, outputs), _transpose_each)
            entries.append(WeightEntry(full_name, (part,), is_plain=True))
            entries.append(whole_entry(f"{full_name}_bias", experts, outputs))
        return entries

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        scores, experts = self._gate(hidden).float().topk(self._top_k, dim=-1)
        return run_experts(hidden, scores.softmax(-1), experts, self._run_expert)

    def _run_expert(self, index: int, rows: Tensor) -> Tensor:
        both = functional.linear(rows, self._gate_up_weight[index], self._gate_up_bias[index])
        gate = both[:, ::2].clamp(max=self._limit)
        up = both[:, 1::2].clamp(-self._limit, self._limit)
        activated = (up + 1) * gate * torch.sigmoid(self._alpha * gate)
        return functional.linear(activated, self._down_weight[index], self._down_bias[index])


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
    """gpt-oss, as far as its weights are not quantized."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = GptOssDecoderLayer


_transpose_each = partial(torch.transpose, dim0=1, dim1=2)
