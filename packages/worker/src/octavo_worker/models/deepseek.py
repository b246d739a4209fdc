"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention and many experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch

from octavo_core.errors import ModelError
from octavo_core.model_spec import ModelSpec
from octavo_kernels import select_experts
from octavo_worker.layers.attention import AttentionLayer
from octavo_worker.layers.latent_attention import LatentAttention
from octavo_worker.layers.mlp import FeedForward
from octavo_worker.layers.moe import MixtureOfExperts
from octavo_worker.layers.rotary import Rotary
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import WeightEntry, whole_entry
from octavo_worker.models.llama import LlamaDecoderLayer, LlamaForCausalLM

_BIAS = "gate.e_score_correction_bias"


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Latent attention and experts, of which some see every token; the first layers have none."""

    @classmethod
    def attention_layout(cls, spec: ModelSpec, prefix: str, index: int) -> list[WeightEntry]:
        """List the tensors of attention."""
        return LatentAttention.weight_layout(spec, prefix)

    def make_attention(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        prefix: str,
        index: int,
        rotary: Rotary,
    ) -> AttentionLayer:
        """Make the attention of `attention_layout`."""
        return LatentAttention(spec, weights, prefix, rotary)

    @classmethod
    def mlp_layout(cls, spec: ModelSpec, prefix: str, index: int) -> list[WeightEntry]:
        """List the tensors of the experts, or of the feed-forward."""
        if index not in spec.moe_layers:
            return super().mlp_layout(spec, prefix, index)
        shared = spec.shared_expert_intermediate_size > 0
        entries = MixtureOfExperts.weight_layout(spec, f"{prefix}.mlp", has_shared_experts=shared)
        if _is_v3(spec):
            bias = whole_entry(f"{prefix}.mlp.{_BIAS}", spec.num_experts)
            entries.append(bias._replace(dtype=torch.float32))
        return entries

    def make_mlp(
        self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str, index: int
    ) -> FeedForward:
        """Make the feed-forward of `mlp_layout`."""
        if index not in spec.moe_layers:
            return super().make_mlp(spec, weights, prefix, index)
        by_groups = _is_v3(spec) or spec.topk_method == "group_limited_greedy"
        router = partial(
            select_experts,
            top_k=spec.num_experts_per_tok,
            renormalize=_is_v3(spec) and spec.norm_topk_prob,
            scale=spec.routed_scaling_factor,
            num_groups=spec.n_group if by_groups else 1,
            top_groups=spec.topk_group if by_groups else 1,
        )
        if _is_v3(spec):
            bias = tensor_of(weights, f"{prefix}.mlp.{_BIAS}")
            router = partial(router, scoring="sigmoid", correction_bias=bias)
        shared = spec.shared_expert_intermediate_size > 0
        return MixtureOfExperts(spec, weights, f"{prefix}.mlp", router, has_shared_experts=shared)


class DeepseekForCausalLM(LlamaForCausalLM):
    """DeepSeek-V2 and V3."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = DeepseekDecoderLayer

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors of the model.

        Raises:
            ModelError: The spec has no latent attention, or an activation that isn't there.
        """
        if spec.kv_lora_rank is None:
            raise ModelError(
                f"{spec.architecture} without kv_lora_rank is not supported.", field="kv_lora_rank"
            )
        return super().weight_layout(spec)


def _is_v3(spec: ModelSpec) -> bool:
    return spec.architecture == "DeepseekV3ForCausalLM"
