"""A folder of safetensors files as a checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.model_spec import read_json
from octavo_kernels import PackedWeight, pack_dense_weight
from octavo_worker.layers.piece import Piece
from octavo_worker.loading.finite import check_finite

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PACKED_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_STACK = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """The tensors of ``model.safetensors``, or of the shards that its index lists.

    Experts that are stored as one tensor (gpt-oss's) are presented one by one, as other
    projections are.

    Raises:
        ModelError: A file is missing, damaged or cut short; the message names it, and the
            tensor where the damage shows.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        if (folder / INDEX_FILE).exists():
            self._shards = self._read_index()
        elif (folder / SINGLE_FILE).exists():
            self._shards = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise ModelError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}. Weights in other formats "
                f"(.bin, .pt) are not read; save the model as safetensors.",
                field=SINGLE_FILE,
            )

        self._stacks: dict[str, tuple[str, int]] = {}
        for name in [name for name in self._shards if _STACK.search(name)]:
            dimensions = self._slice(name).get_shape()
            if len(dimensions) == 3:
                self._stacks |= names_of_experts(name, dimensions[0])

    @property
    def outputs_first(self) -> bool:
        """Some matrices are stored as ``[in_features, out_features]``."""
        return False

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        if not self._stacks:
            return self._shards.keys()
        stacks = {name for name, _ in self._stacks.values()}
        return {*(self._shards.keys() - stacks), *self._stacks}

    def place(self, name: str) -> str:
        """Return the path of the file that holds a tensor, or of the folder."""
        return str(self._folder / self._shards.get(self._stored_name(name), ""))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        shape: tuple[int, ...] = tuple(self._slice(self._stored_name(name)).get_shape())
        return shape[:0:-1] if name in self._stacks else shape

    def float_dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type; float32 for float64."""
        kind = self._slice(self._stored_name(name)).get_dtype()
        return _PACKED_DTYPES.get(kind, torch.float32)

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in its own type."""
        return math.prod(self.shape(name)) * self.float_dtype(name).itemsize

    def read_into(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Copy one tensor, or a piece of it, to `out`, converted to its type.

        Raises:
            ModelError: It is not of a floating-point type.
        """
        out.copy_(self._read(name, piece))

    def read_packed(
        self, name: str, dtype: torch.dtype | None, piece: Piece | None = None
    ) -> PackedWeight:
        """Pack a matrix, or a piece of it, in its own type, or in another.

        Raises:
            ModelError: It is not of a floating-point type.
        """
        tensor = self._read(name, piece)
        if dtype is None:
            dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
        return pack_dense_weight(tensor.to(dtype).contiguous())

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()

    def _read(self, name: str, piece: Piece | None) -> Tensor:
        kind = self._slice(self._stored_name(name)).get_dtype()
        if kind not in _FLOATS:
            raise ModelError(
                f"{self.place(name)}: tensor {name} has type {kind}, which is not supported yet; "
                f"supported: {', '.join(_FLOATS)}.",
                field=name,
            )
        tensor: Tensor
        if name in self._stacks:
            stack, expert = self._stacks[name]
            tensor = self._slice(stack)[expert].t()  # stored as [in_features, out_features]
            if piece is not None:
                tensor = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)
        elif piece is None:
            tensor = self._open(self._shards[name]).get_tensor(name)
        else:  # of the file only this is read
            index = (slice(None),) * piece.dim + (slice(piece.start, piece.stop),)
            tensor = self._slice(name)[index]
        check_finite(tensor, name, self.place(name))
        return tensor

    def _stored_name(self, name: str) -> str:
        return self._stacks[name][0] if name in self._stacks else name

    def _slice(self, name: str) -> Any:
        shard = self._shards[name]
        try:
            return self._open(shard).get_slice(name)
        except SafetensorError as error:
            raise ModelError(
                f"{self._folder / shard}: tensor {name} is missing, though {INDEX_FILE} says that "
                f"it is there.",
                field=name,
            ) from error

    def _read_index(self) -> dict[str, str]:
        weight_map = read_json(self._folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{self._folder / INDEX_FILE} has no weight_map.", field=INDEX_FILE)
        for name, shard in weight_map.items():
            # A downloaded index must not lead out of its folder.
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ModelError(
                    f"{self._folder / INDEX_FILE}: tensor {name} is said to be in {shard!r}, "
                    f"which is no file name.",
                    field=INDEX_FILE,
                )
            if not (self._folder / shard).is_file():
                raise ModelError(
                    f"{self._folder / shard} is missing; {INDEX_FILE} lists it for tensor {name}.",
                    field=shard,
                )
        return weight_map

    def _open(self, filename: str) -> Any:
        if filename not in self._files:
            path = self._folder / filename
            try:
                # The library publishes no type of what this returns.
                self._files[filename] = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                reason = _find_damage(path) or str(error)
                raise ModelError(f"{path} is damaged: {reason}.", field=filename) from error
            except OSError as error:
                raise ModelError(f"{path} can't be read: {error}.", field=filename) from error
        return self._files[filename]


def names_of_experts(stack: str, num_experts: int) -> dict[str, tuple[str, int]]:
    """Name each expert's part of a stack, such as ``experts.3.down_proj.weight``.

    Returns:
        The stack and the expert's index, by that name.
    """
    base, _, projection = stack.rpartition(".")
    return {f"{base}.{index}.{projection}.weight": (stack, index) for index in range(num_experts)}


def _find_damage(path: Path) -> str | None:
    """Say at which tensor a file that the library refuses is damaged, if that can be told."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if 8 + header_bytes > size:
            return f"its header would have {header_bytes} bytes, but the file has {size}"
        try:
            header = json.loads(file.read(header_bytes))
            ends = {name: entry["data_offsets"][1] for name, entry in _tensors(header)}
            past = {name: end for name, end in ends.items() if 8 + header_bytes + end > size}
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    if not past:
        return None
    name = min(past, key=lambda tensor: past[tensor])
    return (
        f"tensor {name} would end at byte {8 + header_bytes + past[name]}, but the file has "
        f"{size} bytes; it is cut short"
    )


def _tensors(header: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]
