"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import AttentionMetadata
from octavo_worker.layers.activation import PLAIN, check_activation
from octavo_worker.layers.attention import Attention, AttentionKind
from octavo_worker.layers.embedding import Embedding
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.mlp import PlainMLP
from octavo_worker.layers.norm import LayerNorm
from octavo_worker.layers.offloaded_weights import make_layers
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import (
    WeightEntry,
    embedding_entries,
    linear_entries,
    whole_entry,
)

PREFIX = "transformer"
EMBEDDING = f"{PREFIX}.wte.weight"
POSITIONS = f"{PREFIX}.wpe.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = f"{PREFIX}.ln_f"


class GPT2LMHeadModel:
    """Embeddings of tokens and positions, decoder layers, final norm and language-model head.

    Args:
        spec: Hyper-parameters.
        weights: The tensors of `weight_layout`, by name.
        max_model_len: Not used; positions are a table.
        device: Where the weights are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._embedding = Embedding.of(weights, EMBEDDING)
        # A stage of a pipeline has what stands before its layers, or behind them.
        self._position_embedding = None
        if POSITIONS in weights:
            self._position_embedding = tensor_of(weights, POSITIONS)
        self._layers = make_layers(
            weights,
            spec.num_hidden_layers,
            lambda index: GPT2DecoderLayer(spec, weights, index),
        )
        self._norm = None
        if f"{FINAL_NORM}.weight" in weights:
            self._norm = LayerNorm(weights, FINAL_NORM, spec.rms_norm_eps)
        self._lm_head = Linear(weights[LM_HEAD]) if LM_HEAD in weights else None

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors of the model.

        Raises:
            ModelError: The spec asks for an activation that isn't there.
        """
        check_activation(spec, PLAIN)
        hidden = spec.hidden_size
        embedding, head = embedding_entries(
            EMBEDDING, spec.vocab_size, hidden, is_tied=spec.tie_word_embeddings
        )
        entries = [embedding, whole_entry(POSITIONS, spec.max_position_embeddings, hidden)]
        for index in range(spec.num_hidden_layers):
            entries += GPT2DecoderLayer.weight_layout(spec, index)
        return [*entries, *LayerNorm.weight_layout(FINAL_NORM, hidden), head]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute the last hidden states, ``[num_tokens, hidden_size]``."""
        hidden = self._embedding(input_ids)
        if self._position_embedding is not None:
            hidden = hidden + self._position_embedding[positions.long()]
        for layer, kv_cache, seen in zip(self._layers, kv_caches, metadata, strict=True):
            hidden = layer.forward(hidden, positions, kv_cache, seen)
        return hidden if self._norm is None else self._norm(hidden)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32 from ``[num_rows, hidden_size]``."""
        assert self._lm_head is not None
        return self._lm_head(hidden_states).float()


class GPT2DecoderLayer:
    """Self-attention and a feed-forward, each behind a norm and added to the residual."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], index: int) -> None:
        prefix = f"{PREFIX}.h.{index}"
        kind = AttentionKind.of_layer(spec, index)
        if spec.scale_attn_by_inverse_layer_idx:
            kind = replace(kind, scale=kind.scale / (index + 1))
        self._attention_norm = LayerNorm(weights, f"{prefix}.ln_1", spec.rms_norm_eps)
        self._attention = Attention(
            kind,
            Linear.of(weights, f"{prefix}.attn.c_attn"),
            Linear.of(weights, f"{prefix}.attn.c_proj"),
        )
        self._mlp_norm = LayerNorm(weights, f"{prefix}.ln_2", spec.rms_norm_eps)
        self._mlp = PlainMLP(
            Linear.of(weights, f"{prefix}.mlp.c_fc"),
            PLAIN[spec.hidden_act],
            Linear.of(weights, f"{prefix}.mlp.c_proj"),
        )

    @classmethod
    def weight_layout(cls, spec: ModelSpec, index: int) -> list[WeightEntry]:
        """List the layer's tensors; q, k and v are stored as one."""
        prefix, hidden, width = f"{PREFIX}.h.{index}", spec.hidden_size, spec.intermediate_size

        sizes = AttentionKind.of_layer(spec, index).split_sizes

        def linear(
            module: str, name: str, rows: int, columns: int, sections: Sequence[int] = ()
        ) -> list[WeightEntry]:
            return linear_entries(
                *(f"{prefix}.{module}", name, {name: rows}, columns, True),
                transposed=True,
                sections=sections,
            )

        return [
            *LayerNorm.weight_layout(f"{prefix}.ln_1", hidden),
            *linear("attn", "c_attn", sum(sizes), hidden, sizes),
            *linear("attn", "c_proj", hidden, sizes[0]),
            *LayerNorm.weight_layout(f"{prefix}.ln_2", hidden),
            *linear("mlp", "c_fc", width, hidden),
            *linear("mlp", "c_proj", hidden, width),
        ]

    def forward(
        self, hidden: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        normed = self._attention_norm(hidden)
        hidden = hidden + self._attention.forward(normed, positions, kv_cache, metadata)
        return hidden + self._mlp.forward(self._mlp_norm(hidden))
