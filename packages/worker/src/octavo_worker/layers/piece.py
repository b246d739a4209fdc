"""What one of several workers reads of a tensor."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """A range of a tensor along one dimension."""

    dim: int
    start: int
    stop: int


def shape_of_piece(shape: tuple[int, ...], piece: Piece | None) -> tuple[int, ...]:
    """Return the shape of a piece of a tensor; None stands for all of it."""
    if piece is None:
        return shape
    return (*shape[: piece.dim], piece.stop - piece.start, *shape[piece.dim + 1 :])


def take_piece(tensor: Tensor, piece: Piece | None) -> Tensor:
    """Return a piece of a tensor, over the same memory; None stands for all of it."""
    if piece is None:
        return tensor
    return tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)
