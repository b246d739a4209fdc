"""What a model definition says about each of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_worker.layers.piece import Piece, shape_of_piece

Transform = Callable[[Tensor], Tensor]


class WeightPart(NamedTuple):
    """One tensor of a checkpoint, under the name that transformers saves it with.

    Attributes:
        name: Its name.
        shape: Its shape in the checkpoint.
        transform: What makes the model's tensor of it; None for the tensor as it is.
        piece: What is read of it; None for all.
        sections: Outputs of the projections that it is made of, each of which is divided
            among workers by itself; empty for one.
    """

    name: str
    shape: tuple[int, ...]
    transform: Transform | None = None
    piece: Piece | None = None
    sections: tuple[int, ...] = ()

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of what is read."""
        return shape_of_piece(self.shape, self.piece)

    @property
    def input_dim(self) -> int:
        """Dimension of a matrix that its inputs are along."""
        return 0 if self.transform is transpose else 1

    def outputs_first(self) -> WeightPart:
        """Describe a matrix where all are stored as ``[out_features, in_features]``."""
        if self.transform is not transpose:
            return self
        piece = self.piece
        if piece is not None:
            piece = piece._replace(dim=1 - piece.dim)
        return self._replace(shape=self.shape[::-1], transform=None, piece=piece)


class WeightEntry(NamedTuple):
    """One tensor of a model.

    Attributes:
        name: The model's name for it.
        parts: Tensors of the checkpoint that make it up, concatenated along the first
            dimension.
        tied_to: Name of an earlier entry that stands in if the checkpoint has none.
        is_vocabulary: Whether its rows are the tokens of the vocabulary.
        is_plain: Whether the model needs its numbers, so that it is never packed.
        dtype: Type to keep it in; None for that of the model.
        stack: Name that it shares with tensors of its shape, if all of them are to lie one
            after the other in one memory; packed ones don't.
    """

    name: str
    parts: tuple[WeightPart, ...]
    tied_to: str | None = None
    is_vocabulary: bool = False
    is_plain: bool = False
    dtype: torch.dtype | None = None
    stack: str | None = None


def whole_entry(name: str, *shape: int) -> WeightEntry:
    """Describe a tensor that the checkpoint has under the same name, never to be packed."""
    return WeightEntry(name, (WeightPart(name, shape),), is_plain=True)


def linear_entries(
    prefix: str,
    name: str,
    parts: Mapping[str, int],
    in_features: int,
    bias: bool = False,
    *,
    transposed: bool = False,
    sections: Sequence[int] = (),
) -> list[WeightEntry]:
    """List a projection's weight, and its bias if it has one.

    Args:
        prefix: What the projection belongs to.
        name: The model's name for it.
        parts: The checkpoint's projections that are fused in it, with their out_features.
        in_features: Width of the input.
        bias: Whether there is one.
        transposed: Whether the checkpoint has weights as ``[in_features, out_features]``.
        sections: Outputs of the projections that the only part is made of; see `WeightPart`.
    """
    assert not sections or list(parts.values()) == [sum(sections)]
    weights, biases, inside = [], [], tuple(sections)
    for part, rows in parts.items():
        full_name = f"{prefix}.{part}.weight"
        if transposed:
            shape = (in_features, rows)
            weights.append(WeightPart(full_name, shape, transpose, sections=inside))
        else:
            weights.append(WeightPart(full_name, (rows, in_features), sections=inside))
        biases.append(WeightPart(f"{prefix}.{part}.bias", (rows,), sections=inside))
    entries = [WeightEntry(f"{prefix}.{name}.weight", tuple(weights))]
    if bias:
        entries.append(WeightEntry(f"{prefix}.{name}.bias", tuple(biases)))
    return entries


def embedding_entries(
    embedding: str, vocab_size: int, width: int, *, is_tied: bool, head: str = "lm_head.weight"
) -> tuple[WeightEntry, WeightEntry]:
    """Describe the embedding of tokens, and the language-model head.

    Args:
        embedding: Name of the embedding.
        vocab_size: Rows of both.
        width: Numbers of a row.
        is_tied: Whether the embedding stands in for a head that the checkpoint hasn't.
        head: Name of the head.
    """
    shape = (vocab_size, width)
    return (
        WeightEntry(embedding, (WeightPart(embedding, shape),), is_vocabulary=True),
        WeightEntry(
            head,
            (WeightPart(head, shape),),
            tied_to=embedding if is_tied else None,
            is_vocabulary=True,
        ),
    )


def transpose(weight: Tensor) -> Tensor:
    """Make ``[out_features, in_features]`` of ``[in_features, out_features]``."""
    return weight.t()
