"""What the model runner and the loader ask of a model definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import AttentionMetadata
from octavo_worker.layers.piece import Piece, shape_of_piece
from octavo_worker.layers.weight import Weight


class KVCache(NamedTuple):
    """The paged cache of one layer; both ``[num_blocks, num_kv_heads, block_size, head_dim]``."""

    key: Tensor
    value: Tensor


class WeightPart(NamedTuple):
    """One tensor of a checkpoint, under the name that transformers saves it with.

    Attributes:
        name: Its name.
        shape: Its whole shape.
        piece: What is read of it; None for all.
    """

    name: str
    shape: tuple[int, ...]
    piece: Piece | None = None

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of what is read."""
        return shape_of_piece(self.shape, self.piece)


class WeightEntry(NamedTuple):
    """One tensor of a model.

    Attributes:
        name: The model's name for it.
        parts: Tensors of the checkpoint that make it up, concatenated along the first
            dimension.
        tied_to: Name of an earlier entry that stands in if the checkpoint has none.
        is_vocabulary: Whether its rows are the tokens of the vocabulary.
    """

    name: str
    parts: tuple[WeightPart, ...]
    tied_to: str | None = None
    is_vocabulary: bool = False


class Model(Protocol):
    """A decoder-only language model."""

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

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Compute the last hidden states, ``[num_tokens, hidden_size]``."""
        ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32 from ``[num_rows, hidden_size]``."""
        ...
