"""Bring weights from the layouts of files into that of the matmul kernels, without loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_kernels.interleave import REGROUPED_KINDS, interleave, regroup
from octavo_kernels.packed_weight import (
    DENSE_KINDS,
    ROWS_OF_GROUP,
    ROWS_OF_PANEL,
    WEIGHT_KINDS,
    PackedWeight,
    check_shape,
)
from octavo_kernels.weight_fields import WeightFields, read_gguf_fields

GGUF_KINDS = ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")

# Rows that are repacked at a time: the working copies stay in the tens of megabytes.
_ROWS_AT_ONCE = 4096


def pack_weight(raw: Tensor, kind: str, shape: Sequence[int]) -> PackedWeight:
    """Pack a tensor of a GGUF file.

    Args:
        raw: ``[num_bytes]`` uint8, as it lies in the file.
        kind: GGUF type in small or capital letters: Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K.
        shape: ``[out_features, in_features]``.

    Returns:
        The weight, on the device of `raw`; its data takes the bytes of `raw`, rows filled
        up to a multiple of 8.

    Raises:
        ValueError: The kind is another, or the bytes don't fill the shape.
    """
    kind = kind.lower()
    if kind not in GGUF_KINDS:
        raise ValueError(f"GGUF type {kind!r} can't be packed; these can: {', '.join(GGUF_KINDS)}")
    rows, inputs = check_shape(kind, shape)
    row_bytes = inputs // WEIGHT_KINDS[kind].block * WEIGHT_KINDS[kind].block_bytes
    if raw.dtype != torch.uint8 or raw.numel() != rows * row_bytes:
        raise ValueError(f"{raw.numel()} bytes of {kind} do not fill the shape {list(shape)}")
    # Zero bytes are zero scales, whatever the kind.
    lines = _fill_up(raw.reshape(rows, row_bytes), ROWS_OF_GROUP)
    data = raw.new_empty(len(lines) // ROWS_OF_GROUP, ROWS_OF_GROUP * row_bytes)
    pieces = torch.split(lines, _ROWS_AT_ONCE)
    targets = torch.split(data, _ROWS_AT_ONCE // ROWS_OF_GROUP)
    for piece, target in zip(pieces, targets, strict=True):
        if kind in REGROUPED_KINDS:
            regroup(piece, kind, target)
        else:
            target.copy_(interleave(read_gguf_fields(piece, kind, len(piece)), kind))
    return PackedWeight(kind, (rows, inputs), data)


def pack_dense_weight(weight: Tensor) -> PackedWeight:
    """Pack ``[out_features, in_features]`` of float32, bfloat16 or float16 as it is.

    Raises:
        ValueError: The type is another.
    """
    kinds = {dtype: kind for kind, dtype in DENSE_KINDS.items() if kind != "e4m3"}
    if weight.dtype not in kinds:
        raise ValueError(f"a dense weight is float32, bfloat16 or float16, not {weight.dtype}")
    shape = check_shape(kinds[weight.dtype], weight.shape)
    return PackedWeight(kinds[weight.dtype], shape, _panels(weight))


def pack_fp8_weight(weight: Tensor, scales: Tensor) -> PackedWeight:
    """Pack a float8 e4m3 weight with its scales.

    Args:
        weight: ``[out_features, in_features]`` float8_e4m3fn.
        scales: One for all, ``[]`` or ``[1]``; one for each row, ``[out_features]`` or
            ``[out_features, 1]``; or one for each block, ``[out_blocks, in_blocks]``, where
            blocks are squares of 128 as in DeepSeek's checkpoints.

    Raises:
        ValueError: The type, or the shape of the scales, is another.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"an fp8 weight is float8_e4m3fn, not {weight.dtype}")
    rows, inputs = check_shape("e4m3", weight.shape)
    scale_block = 0
    wide = scales.float()
    if wide.numel() == 1:
        wide = wide.reshape(1, 1).expand(rows, 1)
    elif wide.shape in ((rows,), (rows, 1)):
        wide = wide.view(rows, 1)
    elif wide.shape == (math.ceil(rows / 128), math.ceil(inputs / 128)):
        wide = wide.repeat_interleave(128, dim=0)[:rows]
        scale_block = 128
    else:
        raise ValueError(
            f"scales of an fp8 weight {[rows, inputs]} have the shape {list(scales.shape)}; one "
            "for all, one for each row or one for each 128 by 128 are supported"
        )
    wide = _fill_up(wide, ROWS_OF_PANEL).view(-1, ROWS_OF_PANEL, wide.shape[1])
    return PackedWeight(
        kind="e4m3",
        shape=(rows, inputs),
        data=_panels(weight.view(torch.uint8)),
        scales=wide.transpose(1, 2).contiguous(),  # [num_panels, blocks, 16]
        scale_block=scale_block,
    )


def pack_gptq_weight(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_index: Tensor | None = None,
    zero_offset: int = 1,
) -> PackedWeight:
    """Pack a 4-bit weight in GPTQ's layout (Frantar et al. 2022, arXiv 2210.17323).

    Args:
        qweight: ``[in_features / 8, out_features]`` int32; input ``8 i + j`` in nibble j.
        qzeros: ``[num_groups, out_features / 8]`` int32; output ``8 i + j`` in nibble j.
        scales: ``[num_groups, out_features]`` float16.
        group_index: ``[in_features]``, the group of each input; None for equal runs. With
            act-order, inputs are sorted by group and the order is kept.
        zero_offset: What is added to a stored zero point: 1, or 0 in ``gptq_v2`` files.

    Raises:
        ValueError: The group size isn't a multiple of 32.
    """
    values = _nibbles_of_rows(qweight)
    zeros = _int32_nibbles(qzeros).flatten(1) + zero_offset  # [num_groups, out_features]
    order = None
    if group_index is not None:
        index = group_index.long()
        if not torch.equal(index, index.sort().values):
            order = index.argsort(stable=True)
            values = values[order]
    return _pack_u4z(values, zeros, scales, order)


def pack_awq_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> PackedWeight:
    """Pack a 4-bit weight in AWQ's layout (Lin et al. 2023, arXiv 2306.00978).

    Args:
        qweight: ``[in_features, out_features / 8]`` int32; the nibbles of a word belong to
            the outputs 0, 2, 4, 6, 1, 3, 5 and 7, lowest first.
        qzeros: ``[num_groups, out_features / 8]`` int32, likewise.
        scales: ``[num_groups, out_features]`` float16.

    Raises:
        ValueError: The group size isn't a multiple of 32.
    """
    # Where outputs 0 to 7 are among the nibbles.
    place = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=qweight.device)
    values = _int32_nibbles(qweight)[..., place].flatten(1)  # [in_features, out_features]
    zeros = _int32_nibbles(qzeros)[..., place].flatten(1)
    return _pack_u4z(values, zeros, scales, None)


def _pack_u4z(values: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None) -> PackedWeight:
    """Pack ``[in_features, out_features]`` nibbles with zeros and scales by group."""
    inputs, rows = check_shape("u4z", values.shape[::-1])[::-1]
    size, rest = divmod(inputs, len(scales))
    if rest or size % 32:
        raise ValueError(
            f"{len(scales)} groups of {inputs} inputs; the group size must be a multiple of 32"
        )
    repeats = size // 32
    fields = WeightFields(
        _fill_up(values.t().contiguous(), ROWS_OF_GROUP),
        _fill_up(scales.half().t().repeat_interleave(repeats, dim=1), ROWS_OF_GROUP),
        # Zero points are whole numbers up to 16: exact as float16.
        _fill_up(zeros.half().t().repeat_interleave(repeats, dim=1), ROWS_OF_GROUP),
    )
    return PackedWeight("u4z", (rows, inputs), interleave(fields, "u4z"), input_order=order)


def _int32_nibbles(words: Tensor) -> Tensor:
    """Unpack ``[.., n]`` int32 to ``[.., n, 8]`` uint8, lowest nibble first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)


def _nibbles_of_rows(words: Tensor) -> Tensor:
    """Unpack ``[n, columns]`` int32 to ``[8 n, columns]`` uint8."""
    return _int32_nibbles(words).transpose(1, 2).flatten(0, 1)


def _fill_up(lines: Tensor, multiple: int) -> Tensor:
    """Add rows of zeros up to a multiple."""
    missing = -len(lines) % multiple
    if not missing:
        return lines
    return torch.cat((lines, lines.new_zeros(missing, *lines.shape[1:])))


def _panels(weight: Tensor) -> Tensor:
    """Interleave 16 rows: ``[num_panels, in_features * 16 * itemsize]`` uint8."""
    full = _fill_up(weight, ROWS_OF_PANEL)
    panels = full.view(-1, ROWS_OF_PANEL, weight.shape[1]).transpose(1, 2).contiguous()
    return panels.view(torch.uint8).view(len(panels), -1)
