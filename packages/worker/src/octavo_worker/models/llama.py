"""Llama (Touvron et al. 2023, arXiv 2302.13971; grouped-query attention as in arXiv 2307.09288).

Mistral (arXiv 2310.06825), Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388) are built the
same way; what they add (windows, biases of q, k and v, norms of the heads of q and k) is in their
`octavo_core.model_family.ModelFamily` and in the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import (
    AttentionMetadata,
    BatchTables,
    Decoder,
    DecoderLayer,
    DecoderStep,
)
from octavo_worker.layers.activation import GATED, KERNEL_NAMES, check_activation
from octavo_worker.layers.attention import AttentionKind, AttentionLayer, FamilyAttention
from octavo_worker.layers.embedding import Embedding
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.mlp import FeedForward, GatedMLP
from octavo_worker.layers.norm import RMSNorm
from octavo_worker.layers.offloaded_weights import make_layers
from octavo_worker.layers.one_call import fits_one_call, join_layers, packed_layer, whole_steps
from octavo_worker.layers.rotary import Rotary, build_rotaries
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import WeightEntry, embedding_entries, whole_entry

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
NORM = "model.norm.weight"


class LlamaDecoderLayer:
    """Self-attention and a gated feed-forward, each behind a norm and added to the residual."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Weight], index: int, rotary: Rotary
    ) -> None:
        prefix = f"model.layers.{index}"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensor_of(weights, f"{prefix}.{name}.weight"), spec.rms_norm_eps)

        self._input_norm = norm("input_layernorm")
        self._attention = self.make_attention(spec, weights, f"{prefix}.self_attn", index, rotary)
        self._post_attention_norm = norm("post_attention_layernorm")
        self._mlp = self.make_mlp(spec, weights, prefix, index)

    @classmethod
    def weight_layout(cls, spec: ModelSpec, index: int) -> list[WeightEntry]:
        """List the layer's tensors."""
        prefix = f"model.layers.{index}"
        return [
            whole_entry(f"{prefix}.input_layernorm.weight", spec.hidden_size),
            *cls.attention_layout(spec, f"{prefix}.self_attn", index),
            whole_entry(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
            *cls.mlp_layout(spec, prefix, index),
        ]

    @classmethod
    def attention_layout(cls, spec: ModelSpec, prefix: str, index: int) -> list[WeightEntry]:
        """List the tensors of attention."""
        return FamilyAttention.weight_layout(spec, prefix, index)

    def make_attention(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        prefix: str,
        index: int,
        rotary: Rotary,
    ) -> AttentionLayer:
        """Make the attention of `attention_layout`."""
        return FamilyAttention(spec, weights, prefix, index, rotary)

    @classmethod
    def mlp_layout(cls, spec: ModelSpec, prefix: str, index: int) -> list[WeightEntry]:
        """List the tensors of the feed-forward."""
        return GatedMLP.weight_layout(
            f"{prefix}.mlp", spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        )

    def make_mlp(
        self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str, index: int
    ) -> FeedForward:
        """Make the feed-forward of `mlp_layout`."""
        return GatedMLP(weights, f"{prefix}.mlp", GATED[spec.hidden_act])

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return the feed-forward's output, not yet added, and the residual stream."""
        hidden, residual = self._input_norm.after_add(hidden, residual)
        hidden = self._attention.forward(hidden, positions, kv_cache, metadata)
        hidden, residual = self._post_attention_norm.after_add(hidden, residual)
        return self._mlp.forward(hidden), residual

    def packed(self) -> DecoderLayer:
        """Return the layer's weights for `Decoder`."""
        attention, mlp = self._attention, self._mlp
        # `fits_one_call` has seen to it
        assert isinstance(attention, FamilyAttention)
        assert isinstance(mlp, GatedMLP)
        return packed_layer(attention, mlp, self._input_norm, self._post_attention_norm)


class LlamaForCausalLM:
    """Embedding, decoder layers, final norm and language-model head.

    Where the weights are packed, the layers and the final norm are one call of the CPU
    kernels; the results are those of the layers one by one, bit for bit.

    Args:
        spec: Hyper-parameters.
        weights: The tensors of `weight_layout`, by name.
        max_model_len: Positions to prepare rotary angles for.
        device: Where the weights are.
    """

    layer_class: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        rotaries = build_rotaries(spec, max_model_len, device)
        self._embedding = Embedding.of(weights, EMBEDDING)
        self._layers = make_layers(
            weights,
            len(rotaries),
            lambda index: self.layer_class(spec, weights, index, rotaries[index]),
        )
        # A stage of a pipeline that is not the last has neither.
        self._norm = None
        if NORM in weights:
            self._norm = RMSNorm(tensor_of(weights, NORM), spec.rms_norm_eps)
        self._lm_head = Linear(weights[LM_HEAD]) if LM_HEAD in weights else None
        self._scale = AttentionKind.of_layer(spec, 0).scale
        self._decoder: Decoder | None = None
        if fits_one_call(spec, weights):
            assert self._norm is not None
            layers = [layer.packed() for layer in self._layers]
            self._decoder = join_layers(spec, layers, self._norm, KERNEL_NAMES[spec.hidden_act])

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors of the model; projections that share an input are fused.

        Raises:
            ModelError: The spec asks for an activation that isn't there.
        """
        check_activation(spec, GATED)
        embedding, head = embedding_entries(
            EMBEDDING, spec.vocab_size, spec.hidden_size, is_tied=spec.tie_word_embeddings
        )
        entries = [embedding]
        for index in range(spec.num_hidden_layers):
            entries += cls.layer_class.weight_layout(spec, index)
        return [*entries, whole_entry(NORM, spec.hidden_size), head]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute the last hidden states of a flat batch, and fill the KV cache.

        Args:
            input_ids: ``[num_tokens]`` int32.
            positions: ``[num_tokens]`` int32.
            kv_caches: One for each layer.
            metadata: How the tokens divide into requests, for each layer.

        Returns:
            ``[num_tokens, hidden_size]``, after the final norm.
        """
        hidden = self._embedding(input_ids)
        if self._decoder is not None:
            return self._decoder.forward(hidden, positions, kv_caches, metadata, self._scale)
        residual = torch.zeros_like(hidden)
        for layer, kv_cache, seen in zip(self._layers, kv_caches, metadata, strict=True):
            hidden, residual = layer.forward(hidden, residual, positions, kv_cache, seen)
        hidden = hidden + residual
        return hidden if self._norm is None else self._norm(hidden)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32 from ``[num_rows, hidden_size]``."""
        assert self._lm_head is not None
        return self._lm_head(hidden_states).float()

    def decoder_step(
        self, tables: BatchTables, kv_caches: Sequence[KVCache], group_of_layer: Sequence[int]
    ) -> DecoderStep | None:
        """Return this model's steps as one call each, over a batch and its caches, if it can."""
        if self._decoder is None or self._lm_head is None:
            return None
        return whole_steps(
            *(self._decoder, self._embedding.weight, self._lm_head.weight),
            *(tables, kv_caches, self._scale),
            group_of_layer=group_of_layer,
        )
