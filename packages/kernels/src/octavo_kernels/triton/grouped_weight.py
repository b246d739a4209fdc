"""Weights of few bits with a scale for each group of neighbours, as the Triton kernels take them.

GGUF's Q4_0, Q4_1 and Q8_0, GPTQ, AWQ and float8 all say the same: a weight is
``(code - zero) * scale + minimum``. One layout for all of them makes one kernel for all of
them. Codes, scales and minima lie in arrays of their own, each row of the output in one run, so
that loads are aligned; nothing is rounded in the conversion, and it takes the bytes of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# AWQ's order of the 8 columns in an int32, lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix of ``[out_features, in_features]``.

    Attributes:
        codes: ``[out_features, in_features / 2]`` uint8, weight ``2 j`` in the low half of byte
            ``j``; or ``[out_features, in_features]`` int8 or float8_e4m3fn.
        scales: ``[out_features, in_features / group_size]`` floating point.
        zeros: Like `scales`, uint8, subtracted from the codes; none for `zero`.
        minima: Like `scales`, added to the scaled codes; none for 0.
        group_size: Weights that share a scale.
        zero: Subtracted from all codes where there are no `zeros`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    minima: Tensor | None
    group_size: int
    zero: int = 0

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the matrix."""
        return self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)

    def dequantize(self) -> Tensor:
        """Return ``[out_features, in_features]`` float32."""
        codes = self.codes
        if codes.dtype == torch.uint8:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        groups = codes.float().unflatten(1, (-1, self.group_size))
        groups = groups - (self.zero if self.zeros is None else self.zeros.float().unsqueeze(-1))
        groups = groups * self.scales.float().unsqueeze(-1)
        if self.minima is not None:
            groups = groups + self.minima.float().unsqueeze(-1)
        return groups.flatten(1)


def group_gguf(raw: Tensor, kind: str, shape: tuple[int, int]) -> GroupedWeight:
    """Lay out a tensor of a GGUF file.

    Args:
        raw: ``[num_bytes]`` uint8, as it lies in the file.
        kind: Q8_0, Q4_0 or Q4_1.
        shape: ``(out_features, in_features)``.

    Raises:
        ValueError: The kind is another, or the bytes don't fill the shape.
    """
    block_bytes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}.get(kind)
    if block_bytes is None:
        raise ValueError(f"tensor type {kind} has no grouped layout; Q8_0, Q4_0 and Q4_1 have")
    out_features, in_features = shape
    if in_features % 32 or raw.numel() != out_features * in_features // 32 * block_bytes:
        raise ValueError(f"{raw.numel()} bytes of {kind} do not fill the shape {list(shape)}")
    blocks = raw.view(out_features, in_features // 32, block_bytes)

    def halves(offset: int) -> Tensor:
        two_bytes = blocks[..., offset : offset + 2].contiguous()
        return two_bytes.view(torch.float16).squeeze(-1)

    if kind == "Q8_0":
        codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
        return GroupedWeight(codes, halves(0), None, None, 32)
    packed = blocks[..., -16:]
    codes = torch.cat([packed & 15, packed >> 4], -1).flatten(1)
    minima = halves(2) if kind == "Q4_1" else None
    zero = 8 if kind == "Q4_0" else 0
    return GroupedWeight(_pack(codes), halves(0), None, minima, 32, zero)


def group_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedWeight:
    """Lay out 4-bit weights of GPTQ (Frantar et al. 2022, arXiv 2210.17323).

    Args:
        qweight: ``[in_features / 8, out_features]`` int32, the first of 8 in the lowest bits.
        qzeros: ``[num_groups, out_features / 8]`` int32, one less than the zero.
        scales: ``[num_groups, out_features]``. Groups follow each other (no act-order).
    """
    codes = _nibbles(qweight.T.contiguous(), range(8))
    zeros = (_nibbles(qzeros, range(8)) + 1).T.contiguous()
    group_size = qweight.shape[0] * 8 // scales.shape[0]
    return GroupedWeight(_pack(codes), scales.T.contiguous(), zeros, None, group_size)


def group_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedWeight:
    """Lay out 4-bit weights of AWQ (Lin et al. 2023, arXiv 2306.00978).

    Args:
        qweight: ``[in_features, out_features / 8]`` int32, columns in AWQ's order.
        qzeros: ``[num_groups, out_features / 8]`` int32, likewise.
        scales: ``[num_groups, out_features]``.
    """
    places = sorted(range(8), key=_AWQ_ORDER.__getitem__)
    codes = _nibbles(qweight, places).T.contiguous()
    zeros = _nibbles(qzeros, places).T.contiguous()
    group_size = qweight.shape[0] // scales.shape[0]
    return GroupedWeight(_pack(codes), scales.T.contiguous(), zeros, None, group_size)


def group_fp8(weight: Tensor, scales: Tensor) -> GroupedWeight:
    """Lay out float8 weights with a scale for each row.

    Args:
        weight: ``[out_features, in_features]`` float8_e4m3fn.
        scales: ``[out_features, 1]``, or ``[1]`` for the whole matrix.
    """
    scales = scales.reshape(-1, 1).expand(weight.shape[0], 1).contiguous()
    return GroupedWeight(weight.contiguous(), scales, None, None, weight.shape[1])


def _nibbles(words: Tensor, places: object) -> Tensor:
    """Unpack ``[rows, columns]`` int32 to ``[rows, 8 * columns]`` uint8, from the given places."""
    shifts = torch.tensor([4 * place for place in places], device=words.device)  # type: ignore[attr-defined]
    return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(1)


def _pack(codes: Tensor) -> Tensor:
    """Pack ``[rows, columns]`` of 4 bits into ``[rows, columns / 2]`` bytes."""
    pairs = codes.unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4
