"""The numbers that a quantized weight consists of, whatever the layout they come in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUPER_BLOCK = 256


@dataclass(frozen=True)
class WeightFields:
    """A quantized weight, field by field; rows may be the rows of a matrix or blocks of one.

    Attributes:
        values: ``[rows, inputs]``, uint8 or int8.
        scales: ``[rows, blocks]`` float16, or ``[rows, 1]`` float32 for ``w8a8``.
        minimums: ``[rows, blocks]`` float16: minimums (``q4_1``), zero points (``u4z``), or
            the factors of `sub_minimums`.
        sub_scales: ``[rows, sub-blocks]`` uint8 (of 32 inputs), or int8 (of 16, ``q6_k``).
        sub_minimums: ``[rows, sub-blocks]`` uint8.
    """

    values: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_minimums: Tensor | None = None

    def dequantize(self, kind: str) -> Tensor:
        """Compute ``[rows, inputs]`` float32, rounding as the GGUF reference does."""
        rows = len(self.values)
        scales = self.scales.float()
        if self.sub_scales is not None:
            scales = _spread(scales, self.sub_scales) * self.sub_scales.float()
        values = self.values.float()
        if kind == "q4_0":
            values -= 8
        elif kind == "u4z":
            assert self.minimums is not None
            values -= self._each(self.minimums.float())
        result = self._each(scales) * values
        if kind == "q4_1":
            assert self.minimums is not None
            result += self._each(self.minimums.float())
        elif self.sub_minimums is not None:
            assert self.minimums is not None
            minimums = _spread(self.minimums.float(), self.sub_minimums)
            result -= self._each(minimums * self.sub_minimums.float())
        return result.view(rows, -1)

    def _each(self, of_blocks: Tensor) -> Tensor:
        """Repeat ``[rows, blocks]`` for the inputs of each block."""
        return of_blocks.repeat_interleave(self.values.shape[1] // of_blocks.shape[1], dim=1)


def _spread(of_blocks: Tensor, like: Tensor) -> Tensor:
    return of_blocks.repeat_interleave(like.shape[1] // of_blocks.shape[1], dim=1)


def read_gguf_fields(raw: Tensor, kind: str, rows: int) -> WeightFields:
    """Take GGUF's bytes apart.

    Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

    Args:
        raw: uint8, `rows` rows of whole blocks.
        kind: ``q8_0``, ``q4_0``, ``q4_1``, ``q4_k``, ``q5_k`` or ``q6_k``.
        rows: Number of rows.
    """
    if kind == "q8_0":
        blocks = raw.view(rows, -1, 34)
        return WeightFields(_flat(blocks[..., 2:].view(torch.int8)), _half(blocks, 0))
    if kind in ("q4_0", "q4_1"):
        blocks = raw.view(rows, -1, 18 if kind == "q4_0" else 20)
        packed = blocks[..., -16:]
        values = _flat(torch.cat((packed & 15, packed >> 4), dim=-1))
        minimums = _half(blocks, 2) if kind == "q4_1" else None
        return WeightFields(values, _half(blocks, 0), minimums)
    if kind == "q6_k":
        return _read_q6_k(raw.view(rows, -1, 210))
    return _read_q4_k(raw.view(rows, -1, 144 if kind == "q4_k" else 176))


def _read_q4_k(blocks: Tensor) -> WeightFields:
    """Q4_K, and Q5_K, which has 32 bytes of fifth bits before the nibbles."""
    six_bits = split_last(blocks[..., 4:16], 3, 4)  # [rows, blocks, 3, 4]
    low, middle, high = six_bits.unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 0x30)), -1)
    minimums = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 0x30)), -1)
    packed = split_last(blocks[..., -128:], 4, 1, 32)
    values = torch.cat((packed & 15, packed >> 4), dim=-2)  # [rows, blocks, 4, 2, 32]
    if blocks.shape[-1] == 176:
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
        fifths = (blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1  # [rows, blocks, 8, 32]
        values = values.flatten(-3, -2) | (fifths << 4)
    return WeightFields(
        _flat(values), _half(blocks, 0), _half(blocks, 2), _flat(scales), _flat(minimums)
    )


def _read_q6_k(blocks: Tensor) -> WeightFields:
    packed = split_last(blocks[..., :128], 2, 1, 64)
    low = torch.cat((packed & 15, packed >> 4), dim=-2)  # [rows, blocks, 2, 2, 64]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    pairs = (split_last(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3  # [.., 2, 4, 32]
    values = low.flatten(-3) | (pairs.flatten(-3) << 4)
    values = values.view(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8)
    return WeightFields(_flat(values), _half(blocks, 208), sub_scales=_flat(scales))


def _half(blocks: Tensor, offset: int) -> Tensor:
    """Read the float16 at a byte offset of each block, as ``[rows, blocks]``."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)


def _flat(x: Tensor) -> Tensor:
    """Make ``[rows, all the rest]``."""
    return x.reshape(len(x), -1)


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """Split the last dimension into several."""
    return x.view(*x.shape[:-1], *sizes)
