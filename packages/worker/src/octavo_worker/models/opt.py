"""OPT (Zhang et al. 2022, arXiv 2205.01068)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

PREFIX = "model.decoder"
EMBEDDING = f"{PREFIX}.embed_tokens.weight"
POSITIONS = f"{PREFIX}.embed_positions.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = f"{PREFIX}.final_layer_norm"

_EPS = 1e-5  # of all norms; configurations don't say it
_FIRST_POSITION = 2  # row of the first position: two were for padding once


class OPTForCausalLM:
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
        # Of these, a stage of a pipeline has what stands before its layers, or behind them.
        def linear(name: str) -> Linear | None:
            return Linear.of(weights, name) if f"{name}.weight" in weights else None

        self._embedding = Embedding.of(weights, EMBEDDING)
        self._position_embedding = None
        if POSITIONS in weights:
            self._position_embedding = tensor_of(weights, POSITIONS)
        self._project_in = linear(f"{PREFIX}.project_in")
        self._project_out = linear(f"{PREFIX}.project_out")
        self._layers = make_layers(
            weights,
            spec.num_hidden_layers,
            lambda index: OPTDecoderLayer(spec, weights, index),
        )
        self._norm = None
        if f"{FINAL_NORM}.weight" in weights:
            self._norm = LayerNorm(weights, FINAL_NORM, _EPS)
        self._lm_head = Linear(weights[LM_HEAD]) if LM_HEAD in weights else None

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors of the model.

        Raises:
            ModelError: The spec asks for an activation that isn't there.
        """
        check_activation(spec, PLAIN)
        hidden, width = spec.hidden_size, spec.word_embed_proj_dim or spec.hidden_size
        embedding, head = embedding_entries(
            EMBEDDING, spec.vocab_size, width, is_tied=spec.tie_word_embeddings
        )
        positions = spec.max_position_embeddings + _FIRST_POSITION
        entries = [embedding, whole_entry(POSITIONS, positions, hidden)]
        if _is_projected(spec):
            entries += linear_entries(PREFIX, "project_in", {"project_in": hidden}, width)
        for index in range(spec.num_hidden_layers):
            entries += OPTDecoderLayer.weight_layout(spec, index)
        if spec.do_layer_norm_before:
            entries += LayerNorm.weight_layout(FINAL_NORM, hidden)
        if _is_projected(spec):
            entries += linear_entries(PREFIX, "project_out", {"project_out": width}, hidden)
        return [*entries, head]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute the last hidden states, ``[num_tokens, word_embed_proj_dim]``."""
        hidden = self._embedding(input_ids)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._position_embedding is not None:
            hidden = hidden + self._position_embedding[positions.long() + _FIRST_POSITION]
        for layer, kv_cache, seen in zip(self._layers, kv_caches, metadata, strict=True):
            hidden = layer.forward(hidden, positions, kv_cache, seen)
        if self._norm is not None:
            hidden = self._norm(hidden)
        return hidden if self._project_out is None else self._project_out(hidden)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32 from the last hidden states."""
        assert self._lm_head is not None
        return self._lm_head(hidden_states).float()


class OPTDecoderLayer:
    """Self-attention and a feed-forward, with norms before them (or, in one model, behind)."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], index: int) -> None:
        prefix = f"{PREFIX}.layers.{index}"
        self._norms_first = spec.do_layer_norm_before
        self._attention_norm = LayerNorm(weights, f"{prefix}.self_attn_layer_norm", _EPS)
        self._attention = Attention(
            AttentionKind.of_layer(spec, index),
            Linear.of(weights, f"{prefix}.self_attn.qkv_proj"),
            Linear.of(weights, f"{prefix}.self_attn.out_proj"),
        )
        self._mlp_norm = LayerNorm(weights, f"{prefix}.final_layer_norm", _EPS)
        self._mlp = PlainMLP(
            Linear.of(weights, f"{prefix}.fc1"),
            PLAIN[spec.hidden_act],
            Linear.of(weights, f"{prefix}.fc2"),
        )

    @classmethod
    def weight_layout(cls, spec: ModelSpec, index: int) -> list[WeightEntry]:
        """List the layer's tensors."""
        prefix, hidden = f"{PREFIX}.layers.{index}", spec.hidden_size
        attention = f"{prefix}.self_attn"
        sizes = AttentionKind.of_layer(spec, index).split_sizes
        qkv = dict(zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True))
        return [
            *LayerNorm.weight_layout(f"{prefix}.self_attn_layer_norm", hidden),
            *linear_entries(attention, "qkv_proj", qkv, hidden, bias=True),
            *linear_entries(attention, "out_proj", {"out_proj": hidden}, sizes[0], bias=True),
            *LayerNorm.weight_layout(f"{prefix}.final_layer_norm", hidden),
            *linear_entries(prefix, "fc1", {"fc1": spec.intermediate_size}, hidden, bias=True),
            *linear_entries(prefix, "fc2", {"fc2": hidden}, spec.intermediate_size, bias=True),
        ]

    def forward(
        self, hidden: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        normed = self._attention_norm(hidden) if self._norms_first else hidden
        hidden = hidden + self._attention.forward(normed, positions, kv_cache, metadata)
        if not self._norms_first:
            hidden = self._attention_norm(hidden)
        normed = self._mlp_norm(hidden) if self._norms_first else hidden
        hidden = hidden + self._mlp.forward(normed)
        return hidden if self._norms_first else self._mlp_norm(hidden)


def _is_projected(spec: ModelSpec) -> bool:
    """Whether the embedding has another width than the layers."""
    return spec.word_embed_proj_dim not in (None, spec.hidden_size)
