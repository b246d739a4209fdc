"""Random weights, to measure a model without its files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from octavo_kernels import PackedWeight, pack_dense_weight
from octavo_worker.layers.piece import Piece, shape_of_piece
from octavo_worker.layers.weight_entry import WeightEntry

_SPREAD = 0.02


class DummyCheckpoint:
    """A checkpoint with every tensor that a model asks for, of small random numbers.

    A tensor's numbers follow from its name, so that two runs have the same model.

    Args:
        layout: The model's tensors.
    """

    def __init__(self, layout: Sequence[WeightEntry]) -> None:
        self._shapes = {
            part.name: part.shape
            for entry in layout
            for part in entry.parts
            if entry.tied_to is None
        }

    @property
    def outputs_first(self) -> bool:
        """Matrices have the shape that is asked for."""
        return False

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors; a tied head is not among them."""
        return self._shapes.keys()

    def place(self, name: str) -> str:
        """Say that there is no file."""
        return "random weights"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._shapes[name]

    def float_dtype(self, name: str) -> torch.dtype:
        """Return the type that most models are published in."""
        return torch.bfloat16

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in that type."""
        return math.prod(self._shapes[name]) * self.float_dtype(name).itemsize

    def read_into(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Fill a tensor, or a piece of it."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        numbers = torch.empty(self._shapes[name]).normal_(0.0, _SPREAD, generator=generator)
        if piece is not None:
            numbers = numbers.narrow(piece.dim, piece.start, piece.stop - piece.start)
        # Norms are about one; a model whose norms are about zero computes denormals.
        out.copy_(numbers + 1 if "norm" in name and name.endswith("weight") else numbers)

    def read_packed(
        self, name: str, dtype: torch.dtype | None, piece: Piece | None = None
    ) -> PackedWeight:
        """Fill a matrix, or a piece of it, and pack it."""
        numbers = torch.empty(shape_of_piece(self._shapes[name], piece))
        self.read_into(name, numbers, piece)
        return pack_dense_weight(numbers.to(dtype or self.float_dtype(name)))

    def close(self) -> None:
        """Do nothing."""
