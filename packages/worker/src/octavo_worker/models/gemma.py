"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786).

Unlike Llama they scale the embedding, store the weights of norms less one, and activate by GELU;
from Gemma 2 on there are norms behind attention and feed-forward as well, and most layers see
a window only. Gemma 2 bounds scores and logits; Gemma 3 norms the heads of q and k instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from octavo_worker.layers.activation import GATED
from octavo_worker.layers.attention import AttentionKind, FamilyAttention
from octavo_worker.layers.embedding import Embedding, HiddenStatesBefore
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.mlp import GatedMLP
from octavo_worker.layers.norm import RMSNorm, shifted_norm_entry
from octavo_worker.layers.offloaded_weights import make_layers
from octavo_worker.layers.one_call import fits_one_call, join_layers, packed_layer, whole_steps
from octavo_worker.layers.rotary import Rotary, build_rotaries
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import WeightEntry, embedding_entries

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
NORM = "model.norm.weight"

# Whatever the files say: the first ones said "gelu" and meant this.
_ACTIVATION = GATED["gelu_pytorch_tanh"]


class GemmaForCausalLM:
    """Scaled embedding, decoder layers, final norm and language-model head.

    Args:
        spec: Hyper-parameters.
        weights: The tensors of `weight_layout`, by name.
        max_model_len: Positions to prepare rotary angles for.
        device: Where the weights are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        rotaries = build_rotaries(spec, max_model_len, device)
        self._embedding = Embedding.of(weights, EMBEDDING)
        self._embedding_scale = spec.hidden_size**0.5
        self._layers = make_layers(
            weights,
            len(rotaries),
            lambda index: GemmaDecoderLayer(spec, weights, index, rotaries[index]),
        )
        # A stage of a pipeline that is not the last has neither.
        self._norm = None
        if NORM in weights:
            self._norm = RMSNorm(tensor_of(weights, NORM), spec.rms_norm_eps)
        self._lm_head = Linear(weights[LM_HEAD]) if LM_HEAD in weights else None
        self._soft_cap = spec.final_logit_softcapping
        self._attention_scale = AttentionKind.of_layer(spec, 0).scale
        self._decoder: Decoder | None = None
        if fits_one_call(spec, weights):
            assert self._norm is not None
            layers = [layer.packed() for layer in self._layers]
            self._decoder = join_layers(spec, layers, self._norm, "gelu_tanh")

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors of the model; projections that share an input are fused."""
        embedding, head = embedding_entries(
            EMBEDDING, spec.vocab_size, spec.hidden_size, is_tied=spec.tie_word_embeddings
        )
        entries = [embedding]
        for index in range(spec.num_hidden_layers):
            entries += GemmaDecoderLayer.weight_layout(spec, index)
        return [*entries, shifted_norm_entry(NORM, spec.hidden_size), head]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute the last hidden states, ``[num_tokens, hidden_size]``."""
        hidden = self._embedding(input_ids)
        if not isinstance(self._embedding, HiddenStatesBefore):
            # The scale is rounded to the model's type, as in training.
            hidden *= torch.tensor(self._embedding_scale, dtype=hidden.dtype)
        if self._decoder is not None:
            return self._decoder.forward(
                hidden, positions, kv_caches, metadata, self._attention_scale
            )
        residual = torch.zeros_like(hidden)
        for layer, kv_cache, seen in zip(self._layers, kv_caches, metadata, strict=True):
            hidden, residual = layer.forward(hidden, residual, positions, kv_cache, seen)
        hidden = hidden + residual
        return hidden if self._norm is None else self._norm(hidden)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32 from ``[num_rows, hidden_size]``."""
        assert self._lm_head is not None
        logits = self._lm_head(hidden_states).float()
        if self._soft_cap is None:
            return logits
        return torch.tanh(logits / self._soft_cap) * self._soft_cap

    def decoder_step(
        self, tables: BatchTables, kv_caches: Sequence[KVCache], group_of_layer: Sequence[int]
    ) -> DecoderStep | None:
        """Return this model's steps as one call each, over a batch and its caches, if it can."""
        if self._decoder is None or self._lm_head is None:
            return None
        return whole_steps(
            *(self._decoder, self._embedding.weight, self._lm_head.weight),
            *(tables, kv_caches, self._attention_scale),
            group_of_layer=group_of_layer,
            embedding_scale=self._embedding_scale,
            logits_soft_cap=self._soft_cap,
        )


class GemmaDecoderLayer:
    """Self-attention and a gated feed-forward, each between norms or behind one."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Weight], index: int, rotary: Rotary
    ) -> None:
        prefix = f"model.layers.{index}"

        def norm(name: str) -> RMSNorm | None:
            key = f"{prefix}.{name}.weight"
            return RMSNorm(tensor_of(weights, key), spec.rms_norm_eps) if key in weights else None

        before_attention, after_attention, before_mlp, after_mlp = map(norm, _norm_names(spec))
        assert before_attention is not None
        assert before_mlp is not None
        self._before_attention, self._after_attention = before_attention, after_attention
        self._before_mlp, self._after_mlp = before_mlp, after_mlp
        self._attention = FamilyAttention(spec, weights, f"{prefix}.self_attn", index, rotary)
        self._mlp = GatedMLP(weights, f"{prefix}.mlp", _ACTIVATION)

    @classmethod
    def weight_layout(cls, spec: ModelSpec, index: int) -> list[WeightEntry]:
        """List the layer's tensors."""
        prefix = f"model.layers.{index}"
        attention = FamilyAttention.weight_layout(spec, f"{prefix}.self_attn", index)
        return [
            *(
                shifted_norm_entry(f"{prefix}.{name}.weight", spec.hidden_size)
                for name in _norm_names(spec)
                if name
            ),
            *(
                shifted_norm_entry(entry.name, spec.head_dim) if "_norm." in entry.name else entry
                for entry in attention
            ),
            *GatedMLP.weight_layout(f"{prefix}.mlp", spec.hidden_size, spec.intermediate_size),
        ]

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return the feed-forward's output, not yet added, and the residual stream."""
        hidden, residual = self._before_attention.after_add(hidden, residual)
        hidden = self._attention.forward(hidden, positions, kv_cache, metadata)
        if self._after_attention is not None:
            hidden = self._after_attention(hidden)
        hidden, residual = self._before_mlp.after_add(hidden, residual)
        hidden = self._mlp.forward(hidden)
        if self._after_mlp is not None:
            hidden = self._after_mlp(hidden)
        return hidden, residual

    def packed(self) -> DecoderLayer:
        """Return the layer's weights for `Decoder`."""
        return packed_layer(
            *(self._attention, self._mlp, self._before_attention, self._before_mlp),
            self._after_attention,
            self._after_mlp,
        )


def _norm_names(spec: ModelSpec) -> tuple[str, str, str, str]:
    """Name the norms before and behind attention, and before and behind the feed-forward.

    The first Gemma has none behind them, and the name of the third is other.
    """
    if spec.family.norms_per_layer == 4:
        return (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    return "input_layernorm", "", "post_attention_layernorm", ""
