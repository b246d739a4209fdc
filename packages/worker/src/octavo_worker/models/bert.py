"""BERT (Devlin et al. 2018, arXiv 1810.04805): an encoder, for vectors of texts.

RoBERTa (arXiv 1907.11692) and XLM-RoBERTa (arXiv 1911.02116) are built the same way; they know one
kind of token and count positions from behind the padding's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

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


class BertModel:
    """Embeddings, and layers in which every token of a text sees every other.

    Nothing is cached: a text is computed once, as a whole.

    Args:
        spec: Hyper-parameters.
        weights: The tensors of `weight_layout`, by name.
    """

    prefix: ClassVar[str] = "bert"

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight]) -> None:
        name = f"{self.prefix}.embeddings"
        self._position_offset = spec.position_offset
        self._embedding = Embedding(weights[f"{name}.word_embeddings.weight"])
        self._position_embedding = tensor_of(weights, f"{name}.position_embeddings.weight")
        self._type_embedding = tensor_of(weights, f"{name}.token_type_embeddings.weight")
        self._norm = LayerNorm(weights, f"{name}.LayerNorm", spec.rms_norm_eps)
        self._layers = [
            BertLayer(spec, weights, f"{self.prefix}.encoder.layer.{index}")
            for index in range(spec.num_hidden_layers)
        ]

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors of the model.

        Raises:
            ModelError: The spec asks for an activation that isn't there.
        """
        check_activation(spec, PLAIN)
        hidden, name = spec.hidden_size, f"{cls.prefix}.embeddings"
        words = WeightPart(f"{name}.word_embeddings.weight", (spec.vocab_size, hidden))
        entries = [
            WeightEntry(words.name, (words,), is_vocabulary=True),
            whole_entry(f"{name}.position_embeddings.weight", spec.max_position_embeddings, hidden),
            whole_entry(f"{name}.token_type_embeddings.weight", spec.type_vocab_size, hidden),
            *LayerNorm.weight_layout(f"{name}.LayerNorm", hidden),
        ]
        for index in range(spec.num_hidden_layers):
            entries += BertLayer.weight_layout(spec, f"{cls.prefix}.encoder.layer.{index}")
        return entries

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        token_types: Tensor,
        lengths: Sequence[int],
    ) -> Tensor:
        """Compute the hidden states of texts, one after the other.

        Args:
            input_ids: ``[num_tokens]`` integers, special tokens included.
            positions: ``[num_tokens]``, from 0 on in each text.
            token_types: ``[num_tokens]``, 1 for the second text of a pair.
            lengths: Tokens of each text, at least one.

        Returns:
            ``[num_tokens, hidden_size]``.
        """
        hidden = self._embedding(input_ids)
        hidden = hidden + self._position_embedding[positions + self._position_offset]
        hidden = self._norm(hidden + self._type_embedding[token_types])
        same_length = _by_length(lengths, hidden.device)
        for layer in self._layers:
            hidden = layer.forward(hidden, same_length)
        return hidden

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Compute the hidden states of texts that are no pairs.

        Args:
            texts: Token ids of each, special tokens included; at least one.

        Returns:
            ``[num_tokens, hidden_size]``, one text after the other.
        """
        device = self._position_embedding.device
        lengths = [len(text) for text in texts]
        input_ids = torch.tensor([token_id for text in texts for token_id in text], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        return self.forward(input_ids, positions, torch.zeros_like(positions), lengths)


class RobertaModel(BertModel):
    """The same, under other names."""

    prefix = "roberta"


class BertLayer:
    """Self-attention and a feed-forward, each added and then normed.

    Args:
        spec: Hyper-parameters.
        weights: Loaded weights.
        prefix: The layer's name in them.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str) -> None:
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
    def weight_layout(cls, spec: ModelSpec, prefix: str) -> list[WeightEntry]:
        """List the layer's tensors."""
        hidden, width = spec.hidden_size, spec.intermediate_size
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

    def forward(self, hidden: Tensor, same_length: Sequence[Tensor]) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out.

        Args:
            hidden: One text after the other.
            same_length: For each length that texts have, ``[num_texts, length]`` with the rows
                of `hidden` that are theirs.
        """
        qkv = self._qkv_proj(hidden)  # [num_tokens, 3 * hidden_size]
        attended = torch.empty_like(hidden)
        for rows in same_length:
            attended[rows] = self._attend(qkv[rows])
        hidden = self._attention_norm(hidden + self._o_proj(attended))
        return self._mlp_norm(hidden + self._mlp.forward(hidden))

    def _attend(self, qkv: Tensor) -> Tensor:
        """Let each text's tokens see each other.

        Args:
            qkv: ``[num_texts, length, 3 * hidden_size]``.

        Returns:
            ``[num_texts, length, hidden_size]``.
        """
        # [num_texts, num_heads, length, head_dim] each
        query, key, value = (
            part.view(*part.shape[:2], -1, self._head_dim).transpose(1, 2)
            for part in qkv.chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2).flatten(2)


def _by_length(lengths: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return, for each length that there is, ``[num_texts, length]`` rows of the flat batch.

    Texts of one length are one call of attention, without padding.
    """
    starts: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        starts.setdefault(length, []).append(start)
        start += length
    return [
        torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
        for length, firsts in starts.items()
    ]
