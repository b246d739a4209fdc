"""Mixtral (Jiang et al. 2024, arXiv 2401.04088) and Qwen3-MoE (arXiv 2505.09388): Llama and Qwen3
with experts in place of feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from octavo_core.model_spec import ModelSpec
from octavo_kernels import select_experts
from octavo_worker.layers.mlp import FeedForward
from octavo_worker.layers.moe import MixtureOfExperts
from octavo_worker.layers.weight import Weight
from octavo_worker.layers.weight_entry import WeightEntry
from octavo_worker.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Qwen3MoeDecoderLayer(LlamaDecoderLayer):
    """A layer with experts, or a Llama layer where the configuration leaves them out."""

    experts_name: ClassVar[str] = "mlp"
    projection_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    @classmethod
    def mlp_layout(cls, spec: ModelSpec, prefix: str, index: int) -> list[WeightEntry]:
        """List the tensors of the experts, or of the feed-forward."""
        if index not in spec.moe_layers:
            return super().mlp_layout(spec, prefix, index)
        return MixtureOfExperts.weight_layout(
            spec, f"{prefix}.{cls.experts_name}", cls.projection_names
        )

    def make_mlp(
        self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str, index: int
    ) -> FeedForward:
        """Make the feed-forward of `mlp_layout`."""
        if index not in spec.moe_layers:
            return super().make_mlp(spec, weights, prefix, index)
        router = partial(
            select_experts, top_k=spec.num_experts_per_tok, renormalize=spec.norm_topk_prob
        )
        return MixtureOfExperts(spec, weights, f"{prefix}.{self.experts_name}", router)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3-MoE."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = Qwen3MoeDecoderLayer


class MixtralDecoderLayer(Qwen3MoeDecoderLayer):
    """The same under Mixtral's names."""

    experts_name = "block_sparse_moe"
    projection_names = ("w1", "w3", "w2")


class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = MixtralDecoderLayer
