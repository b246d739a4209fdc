"""A GGUF file as a checkpoint."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.gguf import GGUFHeader, GGUFType, TensorInfo, read_gguf_header
from octavo_core.model_spec import spec_from_gguf
from octavo_kernels import (
    DEQUANTIZABLE_TYPES,
    PackedWeight,
    dequantize,
    pack_dense_weight,
    pack_weight,
    unpack_weight,
)
from octavo_worker.layers.piece import Piece, shape_of_piece, take_piece
from octavo_worker.loading.finite import check_finite
from octavo_worker.loading.gguf_names import checkpoint_name, expert_stack
from octavo_worker.loading.mxfp4 import BLOCK_BYTES, check_scales, pack_mxfp4, read_halves, widen

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
_SUPPORTED = (*_FLOATS, *_PACKABLE, "MXFP4")


class _Joined(NamedTuple):
    """A tensor of transformers' that GGUF keeps as two.

    Attributes:
        parts: The two.
        shape: Of the whole.
        join: Makes the whole of both; of matrices, also of the bytes of whole rows.
    """

    parts: tuple[TensorInfo, TensorInfo]
    shape: tuple[int, ...]
    join: Callable[[Tensor, Tensor], Tensor]


class GGUFCheckpoint:
    """The tensors of a GGUF file.

    Raises:
        ModelError: The file can't be read, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path, with_vocabulary=False)
        self._path = path
        self._spec = spec_from_gguf(header)
        # `spec_from_gguf` has seen to it that the name is there.
        self._architecture: str = header.metadata["general.architecture"]
        self._tensors = _present(header, self._architecture)
        self._joined = _take_joined(self._tensors)
        with path.open("rb") as file:
            # Private, so that torch gets memory that it may believe to be writable.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @property
    def outputs_first(self) -> bool:
        """GGUF turns the matrices around that transformers keeps the other way."""
        return True

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, in transformers' spelling."""
        return self._tensors.keys() | self._joined.keys()

    def place(self, name: str) -> str:
        """Return the file's path."""
        return str(self._path)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if name in self._joined:
            return self._joined[name].shape
        return self._tensors[name].shape

    def float_dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type; float32 for one that is quantized."""
        return _FLOATS.get(self._parts(name)[0].type.name, torch.float32)

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in the file; MXFP4 is kept in twice as many."""
        return sum(
            part.num_bytes * (2 if part.type.name == "MXFP4" else 1) for part in self._parts(name)
        )

    def read_into(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Unpack one tensor, or a piece of it, to `out`.

        Raises:
            ModelError: Its type is not supported; the message names it.
        """
        if name in self._joined:
            first, second = (self._wide(part) for part in self._parts(name))
            out.copy_(take_piece(self._joined[name].join(first, second), piece))
            return
        info = self._supported(name)
        num_heads = self._num_rotated_heads(name, piece)
        shape = shape_of_piece(info.shape, piece)
        if info.type.name == "MXFP4":
            out.copy_(widen(*self._mxfp4(self._stored_piece(info, piece))).view(shape))
        elif info.type.name not in DEQUANTIZABLE_TYPES:
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
        if name in self._joined:
            return self._pack_joined(name, dtype, piece)
        info = self._supported(name)
        rows = self._stored_piece(info, piece)  # [out_features, bytes of a row]
        num_heads = self._num_rotated_heads(name, piece)
        if num_heads is not None:
            rows = _to_halves(rows, num_heads)
        return self._pack(rows, info.type.name, shape_of_piece(info.shape, piece), dtype)

    def close(self) -> None:
        """Let go of the file."""
        # The map ends when the last tensor over it does; closing it under one would crash.
        del self._data

    def _pack(
        self, rows: Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> PackedWeight:
        """Pack the bytes of whole rows."""
        if kind in _FLOATS:
            rows = rows.contiguous()
            return pack_dense_weight(rows.view(_FLOATS[kind]).to(dtype or _FLOATS[kind]))
        if kind == "MXFP4":
            return pack_mxfp4(*self._mxfp4(rows))
        return pack_weight(rows.flatten(), kind, shape)

    def _pack_joined(
        self, name: str, dtype: torch.dtype | None, piece: Piece | None
    ) -> PackedWeight:
        """Pack two matrices as one, or rows of it; of one type, as they are stored."""
        assert piece is None or piece.dim == 0, "divided by outputs"
        joined = self._joined[name]
        parts = self._parts(name)
        if len({part.type.name for part in parts}) > 1:
            first, second = (self._wide(part) for part in parts)
            wide = take_piece(joined.join(first, second), piece)
            return pack_dense_weight(wide.to(dtype or torch.float32).contiguous())
        first, second = (self._stored_piece(part, None) for part in parts)
        rows = take_piece(joined.join(first, second), piece)
        shape = shape_of_piece(joined.shape, piece)
        return self._pack(rows, parts[0].type.name, shape, dtype)

    def _parts(self, name: str) -> Sequence[TensorInfo]:
        """Return what a tensor is made of: itself, or two."""
        return self._joined[name].parts if name in self._joined else (self._tensors[name],)

    def _wide(self, info: TensorInfo) -> Tensor:
        """Return a tensor's numbers in float32."""
        self._check_supported(info)
        kind = info.type.name
        stored = self._stored_piece(info, None)
        if kind == "MXFP4":
            return widen(*self._mxfp4(stored)).view(info.shape)
        if kind not in DEQUANTIZABLE_TYPES:
            matrix = (math.prod(info.shape[:-1]), info.shape[-1])
            return unpack_weight(pack_weight(stored.flatten(), kind, matrix)).view(info.shape)
        return dequantize(stored.flatten(), kind, info.shape)

    @staticmethod
    def _mxfp4(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Take ``[rows, bytes]`` apart: each number doubled, and scales; see `pack_mxfp4`."""
        blocks = rows.reshape(len(rows), -1, 1 + BLOCK_BYTES)
        return read_halves(blocks[..., 1:]), blocks[..., 0]

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
        self._check_supported(info)
        return info

    def _check_supported(self, info: TensorInfo) -> None:
        if info.type.name not in _SUPPORTED:
            raise ModelError(
                f"{self._path}: tensor {info.name} has type {info.type.name}, which is not "
                f"supported yet; supported: {', '.join(_SUPPORTED)}.",
                field=info.name,
            )

    def _stored_piece(self, info: TensorInfo, piece: Piece | None) -> Tensor:
        """Return the bytes of whole rows, or of whole blocks of each: ``[rows, bytes]``."""
        stored = self._cut(info, piece).contiguous()
        if info.type.name == "MXFP4":
            check_scales(stored.view(-1, info.type.block_bytes)[:, 0], info.name, str(self._path))
        else:
            check_finite(_scales(stored.flatten(), info.type), info.name, str(self._path))
        return stored

    def _cut(self, info: TensorInfo, piece: Piece | None) -> Tensor:
        # Tensors of three dimensions are read as a matrix of all their rows.
        stored = self._stored(info).view(math.prod(info.shape[:-1]), -1)
        if piece is None:
            return stored
        if piece.dim == 0 and len(info.shape) > 1:  # one dimension is one row
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


def _present(header: GGUFHeader, architecture: str) -> dict[str, TensorInfo]:
    """Name a file's tensors as transformers does, each expert's apart."""
    tensors: dict[str, TensorInfo] = {}
    for stored, info in header.tensors.items():
        stack = expert_stack(stored)
        if stack is None:
            name = checkpoint_name(stored, architecture)
            if name is not None:
                tensors[name] = info
            continue
        count = info.shape[0]
        size = info.num_bytes // count
        for expert in range(count):
            part = info._replace(
                shape=info.shape[1:] or (1,), offset=info.offset + expert * size, num_bytes=size
            )
            name = stack.name_of(expert, architecture)
            if stack.kind == "bias":  # gpt-oss's, which stay together
                tensors[name.replace(f".experts.{expert}.", ".experts.")] = info
            else:
                tensors[name] = part
    return tensors


def _take_joined(tensors: dict[str, TensorInfo]) -> dict[str, _Joined]:
    """Take what belongs together out of a file's tensors."""
    joined: dict[str, _Joined] = {}
    is_gpt_oss = any(name.endswith(".self_attn.sinks") for name in tensors)
    for name in list(tensors):
        if name.endswith(".self_attn.k_b_proj.weight"):
            value = tensors.pop(name.replace("k_b_proj", "v_b_proj"), None)
            if value is not None:
                key = tensors.pop(name)
                rows = key.shape[0] * (key.shape[2] + value.shape[1])
                shape = (rows, key.shape[1])
                joined[name.replace("k_b_proj", "kv_b_proj")] = _Joined(
                    (key, value), shape, _join_latents
                )
        if is_gpt_oss and ".experts." in name:
            module, _, kind = name.rpartition(".")
            if module.endswith("gate_proj"):
                up = tensors.pop(f"{module.removesuffix('gate_proj')}up_proj.{kind}", None)
                if up is not None:
                    gate = tensors.pop(name)
                    _join_gate_up(joined, module.removesuffix("gate_proj"), kind, gate, up)
            elif module.endswith("down_proj") and kind == "bias":
                tensors[f"{module}_bias"] = tensors.pop(name)
    return joined


def _join_gate_up(
    joined: dict[str, _Joined], prefix: str, kind: str, gate: TensorInfo, up: TensorInfo
) -> None:
    if kind == "bias":  # [num_experts, width] each
        shape = (gate.shape[0], 2 * gate.shape[1])
        joined[f"{prefix}gate_up_proj_bias"] = _Joined((gate, up), shape, _take_turns_in_rows)
    else:
        shape = (2 * gate.shape[0], gate.shape[1])
        joined[f"{prefix}gate_up_proj.weight"] = _Joined((gate, up), shape, _take_turns)


def _take_turns(first: Tensor, second: Tensor) -> Tensor:
    """Let the rows of two matrices take turns."""
    return torch.stack((first, second), dim=1).flatten(0, 1)


def _take_turns_in_rows(first: Tensor, second: Tensor) -> Tensor:
    """Let the columns of two matrices take turns."""
    return torch.stack((first, second), dim=2).flatten(1)


def _join_latents(key: Tensor, value: Tensor) -> Tensor:
    """Make one projection of those of keys and values.

    Args:
        key: ``[num_heads, kv_lora_rank, qk_nope_head_dim]``, turned around for latent attention.
        value: ``[num_heads, head_dim_v, kv_lora_rank]``.

    Returns:
        ``[num_heads * (qk_nope_head_dim + head_dim_v), kv_lora_rank]``.
    """
    return torch.cat((key.transpose(1, 2), value), dim=1).flatten(0, 1)


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
