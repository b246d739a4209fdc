"""BERT (Devlin et al. 2018, arXiv 1810.04805): an encoder, for embeddings of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from octavo_core.model_spec import ModelSpec
from octavo_worker.layers.activation import PLAIN, check_activation
from octavo_worker.layers.embedding import Embedding
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.mlp import PlainMLP
from octavo_worker.layers.norm import LayerNorm
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import (
    WeightEntry,
    WeightPart,
    linear_entries,
    whole_entry,
)

PREFIX = "bert.embeddings"
EMBEDDING = f"{PREFIX}.word_embeddings.weight"
POSITIONS = f"{PREFIX}.position_embeddings.weight"
TYPES = f"{PREFIX}.token_type_embeddings.weight"
NORM = f"{PREFIX}.LayerNorm"


class BertModel:
    """Embeddings, and layers in which every token of a text sees every other.

    Nothing is cached: a text is computed once, as a whole.

    Args:
        spec: Hyper-parameters.
        weights: The tensors of `weight_layout`, by name.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight]) -> None:
        self._embedding = Embedding(weights[EMBEDDING])
        self._position_embedding = tensor_of(weights, POSITIONS)
        self._type_embedding = tensor_of(weights, TYPES)
        self._norm = LayerNorm(weights, NORM, spec.rms_norm_eps)
        self._layers = [BertLayer(spec, weights, index) for index in range(spec.num_hidden_layers)]

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors of the model.

        Raises:
            ModelError: The spec asks for an activation that isn't there.
        """
        check_activation(spec, PLAIN)
        hidden = spec.hidden_size
        words = WeightPart(EMBEDDING, (spec.vocab_size, hidden))
        entries = [
            WeightEntry(EMBEDDING, (words,), is_vocabulary=True),
            whole_entry(POSITIONS, spec.max_position_embeddings, hidden),
            whole_entry(TYPES, spec.type_vocab_size, hidden),
            *LayerNorm.weight_layout(NORM, hidden),
        ]
        for index in range(spec.num_hidden_layers):
            entries += BertLayer.weight_layout(spec, index)
        return entries

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Compute the hidden states of texts.

        Args:
            texts: Token ids of each, special tokens included; at most
                ``max_position_embeddings`` of them, and at least one.

        Returns:
            ``[num_tokens, hidden_size]``, one text after the other.
        """
        device = self._position_embedding.device
        lengths = [len(text) for text in texts]
        input_ids = torch.tensor([token_id for text in texts for token_id in text], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        hidden = self._embedding(input_ids) + self._position_embedding[positions]
        hidden = self._norm(hidden + self._type_embedding[0])
        for layer in self._layers:
            hidden = layer.forward(hidden, lengths)
        return hidden


class BertLayer:
    """Self-attention and a feed-forward, each added and then normed."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], index: int) -> None:
        prefix = f"bert.encoder.layer.{index}"
        self._head_dim = spec.head_dim
        self._qkv_proj = Linear.of(weights, f"{prefix}.attention.self.qkv_proj")
        self._o_proj = Linear.of(weights, f"{prefix}.attention.output.dense")
        self._attention_norm = LayerNorm(
            weights, f"{prefix}.attention.output.LayerNorm", spec.rms_norm_eps
        )
        self._mlp = PlainMLP(
            Linear.of(weights, f"{prefix}.intermediate.dense"),
            PLAIN[spec.hidden_act],
            Linear.of(weights, f"{prefix}.output.dense"),
        )
        self._mlp_norm = LayerNorm(weights, f"{prefix}.output.LayerNorm", spec.rms_norm_eps)

    @classmethod
    def weight_layout(cls, spec: ModelSpec, index: int) -> list[WeightEntry]:
        """List the layer's tensors."""
        prefix, hidden, width = (
            f"bert.encoder.layer.{index}",
            spec.hidden_size,
            spec.intermediate_size,
        )
        qkv = {"query": hidden, "key": hidden, "value": hidden}

        def dense(module: str, rows: int, columns: int) -> list[WeightEntry]:
            return linear_entries(f"{prefix}.{module}", "dense", {"dense": rows}, columns, True)

        return [
            *linear_entries(f"{prefix}.attention.self", "qkv_proj", qkv, hidden, bias=True),
            *dense("attention.output", hidden, hidden),
            *LayerNorm.weight_layout(f"{prefix}.attention.output.LayerNorm", hidden),
            *dense("intermediate", width, hidden),
            *dense("output", hidden, width),
            *LayerNorm.weight_layout(f"{prefix}.output.LayerNorm", hidden),
        ]

    def forward(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out.

        Args:
            hidden: One text after the other.
            lengths: Tokens of each.
        """
        # [num_heads, num_tokens of the text, 3 * head_dim]
        texts = torch.split(self._qkv_proj(hidden), list(lengths))
        attended = torch.cat([self._attend(text) for text in texts])
        hidden = self._attention_norm(hidden + self._o_proj(attended))
        return self._mlp_norm(hidden + self._mlp.forward(hidden))

    def _attend(self, qkv: Tensor) -> Tensor:
        """Let one text's tokens see each other: ``[num_tokens, 3 * hidden_size]`` to a third."""
        # [num_heads, num_tokens, head_dim] each
        query, key, value = (
            part.view(len(qkv), -1, self._head_dim).transpose(0, 1) for part in qkv.chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        return attended.transpose(0, 1).flatten(1)
