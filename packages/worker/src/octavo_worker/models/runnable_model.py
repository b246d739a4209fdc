"""What the model runner asks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from octavo_kernels import AttentionMetadata
from octavo_worker.layers.kv_cache import KVCache


class RunnableModel(Protocol):
    """A model, or one worker's part of it; see `Model` for the shapes."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute the last hidden states."""
        ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute logits."""
        ...
