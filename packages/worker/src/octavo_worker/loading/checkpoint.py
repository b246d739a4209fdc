"""What the loader asks of a file format."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from octavo_kernels import PackedWeight
from octavo_worker.layers.piece import Piece


class Checkpoint(Protocol):
    """A model's tensors, under the names and in the layout that transformers saves them with."""

    @property
    def outputs_first(self) -> bool:
        """Whether all matrices are ``[out_features, in_features]``, whatever transformers does."""
        ...

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        ...

    def place(self, name: str) -> str:
        """Say in which file a tensor is, or would be, for an error message."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data."""
        ...

    def float_dtype(self, name: str) -> torch.dtype:
        """Return the type of numbers that keeps a tensor as it is stored, or nearly so."""
        ...

    def num_bytes(self, name: str) -> int:
        """Return the bytes that a matrix takes if it is kept as it is stored, or nearly so."""
        ...

    def read_into(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Copy a tensor to `out`, converted to its type.

        Args:
            name: One of ``names``.
            out: Contiguous, of the shape of what is read, on any device.
            piece: What to read of it; None for all.

        Raises:
            ModelError: The stored type is not supported, or the file is damaged.
        """
        ...

    def read_packed(
        self, name: str, dtype: torch.dtype | None, piece: Piece | None = None
    ) -> PackedWeight:
        """Pack a matrix for the CPU kernels, in the type that it is stored in.

        Args:
            name: One of ``names``, of two dimensions.
            dtype: Type to convert it to if it is not quantized; None keeps its own.
            piece: What to read of it; None for all.

        Raises:
            ModelError: The stored type is not supported, the file is damaged, or a piece does
                not end where blocks do that share a scale.
        """
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...
