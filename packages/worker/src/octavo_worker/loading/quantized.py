"""A folder of safetensors files whose matrices are quantized: GPTQ, AWQ and float8."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.model_spec import read_json
from octavo_kernels import (
    PackedWeight,
    pack_awq_weight,
    pack_fp8_weight,
    pack_gptq_weight,
    unpack_weight,
)
from octavo_worker.layers.piece import Piece, take_piece
from octavo_worker.loading.safetensors import SafetensorsCheckpoint

_PACKED_BYTES = 20  # of 32 weights of 4 bits, with their scale and zero point
_WORD = 8  # weights of 4 bits in an int32
_FLOAT8 = "F8_E4M3"
# Beside a matrix, by method; what is not read belongs to activations, which keep their numbers.
_COMPANIONS = (".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".input_scale")


class QuantizedCheckpoint(SafetensorsCheckpoint):
    """Presents each quantized matrix as the one ``weight`` that it stands for.

    Args:
        folder: With safetensors files, and a config.json with a ``quantization_config``.

    Raises:
        ModelError: A file is missing or damaged, or the matrices are of a kind that isn't
            supported.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = read_json(folder / "config.json", {})
        given = config.get("quantization_config") or config.get("compression_config") or {}
        self._config: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        stored = set(super().names)
        # From the name of a matrix to that of its module.
        self._words = {
            f"{name.removesuffix('.qweight')}.weight": name.removesuffix(".qweight")
            for name in stored
            if name.endswith(".qweight")
        }
        self._float8 = {
            name: name.removesuffix(".weight")
            for name in stored
            if name.endswith(".weight") and self._slice(name).get_dtype() == _FLOAT8
        }
        if self._words:
            self._check_words()
        elif not self._float8:
            method = self._config.get("quant_method")
            raise ModelError(
                f"{folder}: its weights are quantized by {method!r}, which is not supported; "
                f"supported are gptq, awq and float8 (e4m3).",
                field="quantization_config",
            )
        plain = {name for name in stored if not name.endswith((".qweight", *_COMPANIONS))}
        self._names = {*plain, *self._words}

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, a quantized matrix as one."""
        return self._names

    def place(self, name: str) -> str:
        """Return the path of the file that holds a tensor, or of the folder."""
        return super().place(f"{self._words[name]}.qweight" if name in self._words else name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; that of a matrix as it is multiplied with."""
        if name not in self._words:
            return super().shape(name)
        rows, columns = super().shape(f"{self._words[name]}.qweight")
        if self._is_awq:
            return columns * _WORD, rows
        return columns, rows * _WORD

    def float_dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type; float32 for one that is quantized."""
        if self._is_quantized(name):
            return torch.float32
        return super().float_dtype(name)

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor; of a matrix in 4 bits, with its scales and zero points."""
        if not self._is_quantized(name):
            return super().num_bytes(name)
        count = math.prod(self.shape(name))
        return count if name in self._float8 else count * _PACKED_BYTES // 32

    def read_into(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Copy one tensor, or a piece of it, to `out`, with its numbers written out."""
        if not self._is_quantized(name):
            super().read_into(name, out, piece)
            return
        out.copy_(take_piece(unpack_weight(self.read_packed(name, None)), piece))

    def read_packed(
        self, name: str, dtype: torch.dtype | None, piece: Piece | None = None
    ) -> PackedWeight:
        """Repack one matrix as it is; one that isn't quantized may be converted.

        Raises:
            ModelError: A part of it is missing or of a wrong shape, or a piece of a quantized
                one is wanted.
        """
        if not self._is_quantized(name):
            return super().read_packed(name, dtype, piece)
        if piece is not None:
            raise ModelError(
                f"{self.place(name)}: tensor {name} is quantized in a way that is not divided "
                f"among workers; use --quantization none, or --pipeline-parallel-size in place of "
                f"--tensor-parallel-size.",
                field=name,
            )
        try:
            return self._pack(name)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ModelError(
                f"{self.place(name)}: tensor {name} can't be unpacked: {error}.", field=name
            ) from error

    def _pack(self, name: str) -> PackedWeight:
        if name in self._float8:
            return pack_fp8_weight(self._raw(name), self._float8_scale(name))
        module = self._words[name]
        words, zeros = self._raw(f"{module}.qweight"), self._raw(f"{module}.qzeros")
        self._check_there(f"{module}.scales")
        scales = self._read(f"{module}.scales", None)
        if self._is_awq:
            return pack_awq_weight(words, zeros, scales)
        index = f"{module}.g_idx"
        offset = 0 if self._config.get("checkpoint_format") == "gptq_v2" else 1
        order = self._raw(index) if index in self._shards else None
        return pack_gptq_weight(words, zeros, scales, order, offset)

    def _float8_scale(self, name: str) -> Tensor:
        for companion in ("weight_scale", "weight_scale_inv"):
            scale = f"{self._float8[name]}.{companion}"
            if scale in self._shards:
                return self._read(scale, None)
        raise ModelError(
            f"{self.place(name)}: tensor {self._float8[name]}.weight_scale is missing.", field=name
        )

    def _is_quantized(self, name: str) -> bool:
        return name in self._words or name in self._float8

    @property
    def _is_awq(self) -> bool:
        return self._config.get("quant_method") == "awq"

    def _raw(self, name: str) -> Tensor:
        """Read a tensor of any type."""
        self._check_there(name)
        self._slice(name)  # names a tensor that its index is wrong about
        tensor: Tensor = self._open(self._shards[name]).get_tensor(name)
        return tensor

    def _check_there(self, name: str) -> None:
        if name not in self._shards:
            raise ModelError(f"{self.place(name)}: tensor {name} is missing.", field=name)

    def _check_words(self) -> None:
        """Refuse words of another layout than GPTQ's and AWQ's common ones."""
        method = self._config.get("quant_method")
        bits = self._config.get("bits", self._config.get("w_bit", 4))
        layout = str(self._config.get("version", "gemm")).lower()
        if method not in ("gptq", "awq") or bits != 4 or (method == "awq" and layout != "gemm"):
            raise ModelError(
                f"{self._folder}: quantization_config says quant_method={method!r}, bits={bits}"
                f"{f', version={layout!r}' if method == 'awq' else ''}; supported are gptq and awq "
                f"(version gemm) with 4 bits.",
                field="quantization_config",
            )
