"""A folder of safetensors files whose experts are in MXFP4, as gpt-oss is published."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_kernels import PackedWeight, pack_dense_weight
from octavo_worker.layers.piece import Piece, take_piece
from octavo_worker.loading.mxfp4 import (
    BLOCK,
    BLOCK_BYTES,
    check_scales,
    pack_mxfp4,
    read_neighbours,
    widen,
)
from octavo_worker.loading.safetensors import SafetensorsCheckpoint, names_of_experts

_BLOCKS, _SCALES = "_blocks", "_scales"
_PACKED_BYTES = 34  # of a block of Q8_0


class Mxfp4Checkpoint(SafetensorsCheckpoint):
    """Presents each expert's matrix as one tensor.

    Args:
        folder: With safetensors files: of each stack of experts ``<name>_blocks``, ``[num_experts,
            out_features, num_blocks, 16]``, and ``<name>_scales``, without the last dimension.

    Raises:
        ModelError: A file is missing or damaged, or there are no such tensors.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        stored = set(super().names)
        self._experts: dict[str, tuple[str, int]] = {}
        self._num_blocks: dict[str, tuple[int, int]] = {}  # rows, and blocks of each
        stacks = [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]
        if not stacks:
            raise ModelError(
                f"{folder}: config.json says that experts are in mxfp4, but there is no tensor "
                f"that ends in {_BLOCKS}.",
                field="quantization_config",
            )
        for stack in stacks:
            num_experts, rows, num_blocks = self._check(stack)
            self._num_blocks[stack] = rows, num_blocks
            self._experts |= names_of_experts(stack, num_experts)
        parts = {f"{stack}{ending}" for stack in stacks for ending in (_BLOCKS, _SCALES)}
        self._names = {*(stored - parts), *self._experts}

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, each expert's matrices apart."""
        return self._names

    def place(self, name: str) -> str:
        """Return the path of the file that holds a tensor, or of the folder."""
        if name in self._experts:
            return super().place(self._experts[name][0] + _BLOCKS)
        return super().place(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if name not in self._experts:
            return super().shape(name)
        rows, num_blocks = self._num_blocks[self._experts[name][0]]
        return rows, num_blocks * BLOCK

    def float_dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type; bfloat16, which loses nothing, for one in MXFP4."""
        return torch.bfloat16 if name in self._experts else super().float_dtype(name)

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor; of one in MXFP4, as it is kept."""
        if name not in self._experts:
            return super().num_bytes(name)
        return math.prod(self.shape(name)) // BLOCK * _PACKED_BYTES

    def read_into(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Copy one tensor to `out`, with its numbers written out."""
        if name not in self._experts:
            super().read_into(name, out, piece)
            return
        out.copy_(take_piece(widen(*self._parts(name)), piece))

    def read_packed(
        self, name: str, dtype: torch.dtype | None, piece: Piece | None = None
    ) -> PackedWeight:
        """Pack one matrix, or a piece of it, as it is, or in another type.

        Raises:
            ModelError: A piece does not end where blocks do that share a scale.
        """
        if name not in self._experts:
            return super().read_packed(name, dtype, piece)
        doubled, scales = self._parts(name)
        if dtype is not None:
            wide = take_piece(widen(doubled, scales), piece)
            return pack_dense_weight(wide.to(dtype).contiguous())
        if piece is not None and piece.dim == 1:
            if piece.start % BLOCK or piece.stop % BLOCK:
                raise ModelError(
                    f"{self.place(name)}: tensor {name} is stored in blocks of {BLOCK} inputs, and "
                    f"tensor parallelism would give a worker inputs {piece.start} to {piece.stop}; "
                    f"use a tensor_parallel_size that leaves blocks whole.",
                    field=name,
                )
            piece = Piece(1, piece.start // BLOCK, piece.stop // BLOCK)
        doubled, scales = take_piece(doubled, piece), take_piece(scales, piece)
        return pack_mxfp4(doubled.contiguous(), scales.contiguous())

    def _parts(self, name: str) -> tuple[Tensor, Tensor]:
        """Return ``[rows, num_blocks, 32]`` numbers, doubled, and ``[rows, num_blocks]`` scales."""
        stack, index = self._experts[name]
        blocks, scales = (self._slice(f"{stack}{ending}")[index] for ending in (_BLOCKS, _SCALES))
        check_scales(scales, f"{stack}{_SCALES}", self.place(name))
        return read_neighbours(blocks), scales

    def _check(self, stack: str) -> list[int]:
        """Return how many experts, rows and blocks a stack has."""
        name = f"{stack}{_SCALES}"
        if name not in self._shards:
            raise ModelError(f"{self.place(name)}: tensor {name} is missing.", field=name)
        shape = list(self._slice(f"{stack}{_BLOCKS}").get_shape())
        scales = list(self._slice(name).get_shape())
        kinds = {self._slice(f"{stack}{ending}").get_dtype() for ending in (_BLOCKS, _SCALES)}
        if len(shape) != 4 or shape[3] != BLOCK_BYTES or scales != shape[:3] or kinds != {"U8"}:
            raise ModelError(
                f"{super().place(name)}: tensor {stack}{_BLOCKS} has shape {shape}, and {name} "
                f"{scales}, of {' and '.join(sorted(kinds))}; MXFP4 is [experts, rows, blocks, "
                f"{BLOCK_BYTES}] and the same without the last, of U8.",
                field=name,
            )
        return scales
