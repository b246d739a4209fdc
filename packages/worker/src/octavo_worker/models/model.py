"""What the model runner and the loader ask of a model definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import AttentionMetadata
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.weight import Weight
from octavo_worker.layers.weight_entry import WeightEntry


class Model(Protocol):
    """A decoder-only language model."""

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
            metadata: How the tokens divide into requests, for each layer; layers of one
                group share one object.

        Returns:
            ``[num_tokens, hidden_size]``.
        """
        ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32 from ``[num_rows, hidden_size]``."""
        ...


class ModelDefinition(Model, Protocol):
    """A model of ours: it says which tensors it is made of, and gets them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        max_model_len: int,
        device: torch.device,
    ) -> None: ...

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors that the model is made of.

        Raises:
            ModelError: The spec asks for something that the definition doesn't have.
        """
        ...
