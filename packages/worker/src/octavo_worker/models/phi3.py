"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): Llama with projections that are stored
fused, and with a context that LongRoPE stretches."""

from __future__ import annotations

from typing import ClassVar

from octavo_core.model_spec import ModelSpec
from octavo_worker.layers.attention import FamilyAttention
from octavo_worker.layers.mlp import GatedMLP
from octavo_worker.layers.weight_entry import WeightEntry
from octavo_worker.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Phi3DecoderLayer(LlamaDecoderLayer):
    """A Llama layer whose checkpoint has q, k and v as one tensor, and gate and up as another."""

    @classmethod
    def attention_layout(cls, spec: ModelSpec, prefix: str, index: int) -> list[WeightEntry]:
        """List the tensors of attention."""
        return FamilyAttention.weight_layout(spec, prefix, index, parts=("qkv",))

    @classmethod
    def mlp_layout(cls, spec: ModelSpec, prefix: str, index: int) -> list[WeightEntry]:
        """List the tensors of the feed-forward."""
        return GatedMLP.weight_layout(
            f"{prefix}.mlp", spec.hidden_size, spec.intermediate_size, is_fused=True
        )


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 and Phi-4."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = Phi3DecoderLayer
