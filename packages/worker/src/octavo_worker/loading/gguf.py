"""A GGUF file as a checkpoint."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.gguf import GGUFType, TensorInfo, read_gguf_header
from octavo_core.model_spec import spec_from_gguf
from octavo_kernels import (
    DEQUANTIZABLE_TYPES,
    PackedWeight,
    dequantize,
    pack_dense_weight,
    pack_weight,
    unpack_weight,
)
from octavo_worker.layers.piece import Piece, shape_of_piece
from octavo_worker.loading.finite import check_finite
from octavo_worker.loading.gguf_names import checkpoint_name

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PACKABLE = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
# Where a block has its scales (and minimums), as float16.
_SCALE_BYTES = {
    "Q8_0": slice(0, 2),
    "Q4_0": slice(0, 2),
    "Q4_1": slice(0, 4),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
}
_SUPPORTED = (*_FLOATS, *_PACKABLE)


class GGUFCheckpoint:
    """The tensors of a GGUF file.

    Raises:
        ModelError: The file can't be read, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self._path = path
        self._spec = spec_from_gguf(header)
        # `spec_from_gguf` has seen to it that the name is there.
        self._architecture: str = header.metadata["general.architecture"]
        names = {name: checkpoint_name(name, self._architecture) for name in header.tensors}
        self._tensors = {
            name: header.tensors[stored] for stored, name in names.items() if name is not None
        }
        with path.open("rb") as file:
            # Private, so that torch gets memory that it may believe to be writable.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, in transformers' spelling."""
        return self._tensors.keys()

    def place(self, name: str) -> str:
        """Return the file's path."""
        return str(self._path)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._tensors[name].shape

    def float_dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type; float32 for one that is quantized."""
        return _FLOATS.get(self._tensors[name].type.name, torch.float32)

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in the file."""
        return self._tensors[name].num_bytes

    def read_into(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Unpack one tensor, or a piece of it, to `out`.

        Raises:
            ModelError: Its type is not supported; the message names it.
        """
        info = self._supported(name)
        num_heads = self._num_rotated_heads(name, piece)
        shape = shape_of_piece(info.shape, piece)
        if info.type.name not in DEQUANTIZABLE_TYPES:
            out.copy_(unpack_weight(self.read_packed(name, None, piece)))
        elif num_heads is not None:
            stored = self._stored_piece(info, piece).flatten()
            out.copy_(_to_halves(dequantize(stored, info.type.name, shape), num_heads))
        elif self._is_shifted_norm(name):
            stored = self._stored_piece(info, piece).flatten()
            out.copy_(dequantize(stored, info.type.name, shape) - 1)
        elif out.device.type == "cpu":
            dequantize(self._stored_piece(info, piece).flatten(), info.type.name, shape, out)
        else:
            stored = self._stored_piece(info, piece).flatten()
            out.copy_(dequantize(stored, info.type.name, shape))

    def read_packed(
        self, name: str, dtype: torch.dtype | None, piece: Piece | None = None
    ) -> PackedWeight:
        """Repack one matrix, or a piece of it, as it is; one of floats may be converted.

        Raises:
            ModelError: Its type is not supported, or a piece does not end where blocks do that
                share a scale; the message names it.
        """
        info = self._supported(name)
        kind = info.type.name
        rows = self._stored_piece(info, piece)  # [out_features, bytes of a row]
        num_heads = self._num_rotated_heads(name, piece)
        if num_heads is not None:
            rows = _to_halves(rows, num_heads)
        if kind in _FLOATS:
            rows = rows.contiguous()
            return pack_dense_weight(rows.view(_FLOATS[kind]).to(dtype or _FLOATS[kind]))
        return pack_weight(rows.flatten(), kind, shape_of_piece(info.shape, piece))

    def close(self) -> None:
        """Let go of the file."""
        # The map ends when the last tensor over it does; closing it under one would crash.
        del self._data

    def _num_rotated_heads(self, name: str, piece: Piece | None) -> int | None:
        """Return the heads of a query or key projection, whose rows need reordering."""
        if self._architecture != "llama":
            return None
        if ".self_attn.q_proj." in name:
            num_heads = self._spec.num_attention_heads
        elif ".self_attn.k_proj." in name:
            num_heads = self._spec.num_key_value_heads
        else:
            return None
        if piece is None:
            return num_heads
        return num_heads * (piece.stop - piece.start) // self._tensors[name].shape[0]

    def _is_shifted_norm(self, name: str) -> bool:
        """Whether a weight of Gemma's norms, which transformers saves less one and GGUF whole."""
        return self._architecture.startswith("gemma") and "norm" in name

    def _supported(self, name: str) -> TensorInfo:
        info = self._tensors[name]
        if info.type.name not in _SUPPORTED:
            raise ModelError(
                f"{self._path}: tensor {info.name} has type {info.type.name}, which is not "
                f"supported yet; supported: {', '.join(_SUPPORTED)}.",
                field=info.name,
            )
        return info

    def _stored_piece(self, info: TensorInfo, piece: Piece | None) -> Tensor:
        """Return the bytes of whole rows, or of whole blocks of each: ``[rows, bytes]``."""
        stored = self._cut(info, piece).contiguous()
        check_finite(_scales(stored.flatten(), info.type), info.name, str(self._path))
        return stored

    def _cut(self, info: TensorInfo, piece: Piece | None) -> Tensor:
        stored = self._stored(info).view(info.shape[0], -1)
        if piece is None:
            return stored
        if piece.dim == 0:
            return stored[piece.start : piece.stop]
        block = info.type.block_weights
        if piece.start % block or piece.stop % block:
            raise ModelError(
                f"{self._path}: tensor {info.name} is stored in blocks of {block} inputs, and "
                f"tensor parallelism would give a worker inputs {piece.start} to {piece.stop}; "
                f"use a tensor_parallel_size that leaves blocks whole.",
                field=info.name,
            )
        per_block = info.type.block_bytes
        first, last = piece.start // block * per_block, piece.stop // block * per_block
        return stored[:, first:last]

    def _stored(self, info: TensorInfo) -> Tensor:
        """Return ``[num_bytes]`` uint8 over the file."""
        return torch.frombuffer(
            self._data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset
        )


def _scales(stored: Tensor, kind: GGUFType) -> Tensor:
    """Return what of a tensor may not be a number: all of it, or the scales of its blocks."""
    if kind.name in _FLOATS:
        return stored.view(_FLOATS[kind.name])
    blocks = stored.view(-1, kind.block_bytes)
    return blocks[:, _SCALE_BYTES[kind.name]].contiguous().view(torch.float16)


def _to_halves(weights: Tensor, num_heads: int) -> Tensor:
    """Bring the rows of a query or key projection from rope pairs to rope halves.

    GGUF keeps the two components of a rotated pair side by side in llama models;
    transformers, and our kernel, keep them half a head apart.

    Args:
        weights: ``[num_heads * head_dim, ...]``, numbers or the bytes of whole rows.
        num_heads: Of the projection.
    """
    pairs = weights.view(num_heads, -1, 2, *weights.shape[1:])
    return pairs.transpose(1, 2).reshape(weights.shape)
