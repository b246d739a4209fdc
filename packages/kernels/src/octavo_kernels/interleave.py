"""Between the fields of a quantized weight and the interleaved bytes of a `PackedWeight`."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.weight_fields import WeightFields, split_last

ROWS = 8

REGROUPED_KINDS = ("q8_0", "q4_0", "q4_1")
"""Kinds whose blocks GGUF has in the order of `PackedWeight`, but each row's by itself."""


def interleave(fields: WeightFields, kind: str) -> Tensor:
    """Lay a weight's fields out as `PackedWeight.data`, ``[num_groups, bytes]`` uint8."""
    parts: list[Tensor]  # [num_groups, num_blocks, bytes] each
    if kind in ("q4_0", "q4_1", "u4z"):
        parts = [_of_rows(fields.scales), _nibbles(fields.values)]
        if fields.minimums is not None:
            parts.insert(1, _of_rows(fields.minimums))
    elif kind == "q8_0":
        parts = [_of_rows(fields.scales), _bytes(fields.values)]
    elif kind == "w8a8":
        parts = [_bytes(fields.values)]
    elif kind == "q6_k":
        parts = _q6_k_parts(fields)
    else:
        parts = _q4_k_parts(fields, kind)
    return torch.cat(parts, dim=-1).flatten(1)


def regroup(lines: Tensor, kind: str, out: Tensor) -> None:
    """Lay the bytes of GGUF's rows out as `PackedWeight.data`; a fifth of the time of `interleave`.

    Args:
        lines: ``[rows, bytes]`` uint8, whole groups of rows.
        kind: One of `REGROUPED_KINDS`.
        out: ``[num_groups, bytes of a group]`` uint8, for the result.
    """
    num_scales = 2 if kind == "q4_1" else 1  # float16 each
    block = 17 if kind == "q8_0" else 8 + num_scales  # in words of 16 bits
    rows = lines.view(torch.int16).view(len(out), ROWS, -1, block)
    blocks = out.view(torch.int16).view(len(out), -1, ROWS * block)
    scales = split_last(blocks[..., : ROWS * num_scales], num_scales, ROWS)
    scales.copy_(rows[..., :num_scales].permute(0, 2, 3, 1))
    # The numbers go by fours of bytes, which are seldom aligned before they are copied.
    numbers = rows[..., num_scales:].contiguous().view(torch.int32)  # [groups, ROWS, blocks, fours]
    fours = split_last(blocks[..., ROWS * num_scales :].view(torch.int32), -1, ROWS)
    fours.copy_(numbers.permute(0, 2, 3, 1))


def separate(data: Tensor, kind: str, scales: Tensor | None, in_features: int) -> WeightFields:
    """Undo `interleave`; rows that fill the last group are still there."""
    groups = len(data)
    sizes = {"q4_0": 144, "q4_1": 160, "u4z": 160, "q8_0": 272, "w8a8": 256}
    if kind in sizes:
        blocks = data.view(groups, in_features // 32, sizes[kind])
        if kind == "w8a8":
            assert scales is not None
            return WeightFields(_separate_bytes(blocks), scales.view(-1, 1))
        of_rows = _separate_rows(blocks, torch.float16, 0)
        if kind == "q8_0":
            return WeightFields(_separate_bytes(blocks[..., 16:]), of_rows)
        minimums = None if kind == "q4_0" else _separate_rows(blocks, torch.float16, 16)
        return WeightFields(_separate_nibbles(blocks[..., -128:]), of_rows, minimums)
    blocks = data.view(groups, in_features // 256, -1)
    if kind == "q6_k":
        return _separate_q6_k(blocks)
    return _separate_q4_k(blocks)


def _of_rows(x: Tensor) -> Tensor:
    """``[rows, blocks]`` as bytes, ``[groups, blocks, 8 * itemsize]``."""
    grouped = x.view(-1, ROWS, x.shape[1]).transpose(1, 2).contiguous()
    return grouped.view(torch.uint8).view(len(grouped), x.shape[1], -1)


def _separate_rows(blocks: Tensor, dtype: torch.dtype, offset: int) -> Tensor:
    """Undo `_of_rows` for one field."""
    size = ROWS * dtype.itemsize
    field = blocks[..., offset : offset + size].contiguous().view(dtype)  # [groups, blocks, 8]
    return field.transpose(1, 2).reshape(-1, blocks.shape[1])


def _nibbles(values: Tensor) -> Tensor:
    """``[rows, inputs]`` below 16, as ``[groups, inputs / 32, 128]``."""
    halves = values.view(-1, ROWS, values.shape[1] // 32, 2, 4, 4)
    packed = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)  # [groups, 8, blocks, 4, 4]
    return packed.permute(0, 2, 3, 1, 4).reshape(len(packed), -1, 128)


def _separate_nibbles(packed: Tensor) -> Tensor:
    """Undo `_nibbles`."""
    rows = split_last(packed, 4, ROWS, 4).permute(0, 3, 1, 2, 4)  # [groups, 8, blocks, 4, 4]
    halves = torch.stack((rows & 15, rows >> 4), dim=3)
    return halves.reshape(len(packed) * ROWS, -1)


def _bytes(values: Tensor) -> Tensor:
    """``[rows, inputs]`` of a byte, as ``[groups, inputs / 32, 256]`` uint8."""
    grouped = values.view(torch.uint8).view(-1, ROWS, values.shape[1] // 32, 8, 4)
    return grouped.permute(0, 2, 3, 1, 4).reshape(len(grouped), -1, 256)


def _separate_bytes(packed: Tensor) -> Tensor:
    """Undo `_bytes`, as int8."""
    rows = split_last(packed, 8, ROWS, 4).permute(0, 3, 1, 2, 4)
    return rows.reshape(len(packed) * ROWS, -1).view(torch.int8)


def _upper_bits(bits: Tensor, width: int) -> Tensor:
    """The bits above the nibbles, ``[groups, inputs / 32, 32 * width]``.

    Args:
        bits: ``[rows, inputs]`` uint8 below ``2 ** width``.
        width: 1 or 2. A byte has those of ``8 / width`` vectors of four inputs.
    """
    vectors = 8 // width
    shape = (-1, ROWS, bits.shape[1] // 32, width, vectors, 4)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=bits.device).view(-1, 1)
    # The bits don't overlap, so their sum is their union.
    packed = (bits.view(shape) << shifts).sum(dim=4, dtype=torch.uint8)  # [groups, 8, b, width, 4]
    return packed.permute(0, 2, 3, 1, 4).reshape(len(packed), bits.shape[1] // 32, -1)


def _separate_upper_bits(packed: Tensor, width: int) -> Tensor:
    """Undo `_upper_bits`."""
    rows = split_last(packed, width, ROWS, 4).permute(0, 3, 1, 2, 4)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).view(-1, 1)
    # [groups, 8, blocks, width, vectors, 4]
    bits: Tensor = (rows.unsqueeze(4) >> shifts) & (2**width - 1)
    return bits.reshape(len(packed) * ROWS, -1)


def _q4_k_parts(fields: WeightFields, kind: str) -> list[Tensor]:
    assert fields.minimums is not None
    assert fields.sub_scales is not None
    assert fields.sub_minimums is not None
    scales, minimums = fields.sub_scales, fields.sub_minimums  # [rows, inputs / 32]
    low = (scales & 15) | ((minimums & 15) << 4)
    high = ((scales >> 4) | ((minimums >> 4) << 2)).view(len(scales), -1, 2)
    high = high[..., 0] | (high[..., 1] << 4)  # [rows, inputs / 64]
    quants = _nibbles(fields.values & 15)
    if kind == "q5_k":
        quants = torch.cat((quants, _upper_bits(fields.values >> 4, 1)), dim=-1)
    return [
        _of_rows(fields.scales),
        _of_rows(fields.minimums),
        _of_super_blocks(_of_rows(low), 8),
        _of_super_blocks(_of_rows(high), 4),
        _of_super_blocks(quants, 8),
    ]


def _separate_q4_k(blocks: Tensor) -> WeightFields:
    low = _separate_rows(_of_sub_blocks(blocks[..., 32:96], 8), torch.uint8, 0)
    high = _separate_rows(_of_sub_blocks(blocks[..., 96:128], 4), torch.uint8, 0)
    high = torch.stack((high & 15, high >> 4), dim=-1).view(len(high), -1)
    quants = _of_sub_blocks(blocks[..., 128:], 8)
    values = _separate_nibbles(quants[..., :128])
    if quants.shape[-1] == 160:
        values |= _separate_upper_bits(quants[..., 128:], 1) << 4
    return WeightFields(
        values,
        _separate_rows(blocks, torch.float16, 0),
        _separate_rows(blocks, torch.float16, 16),
        (low & 15) | ((high & 3) << 4),
        (low >> 4) | ((high >> 2) << 4),
    )


def _q6_k_parts(fields: WeightFields) -> list[Tensor]:
    assert fields.sub_scales is not None
    unsigned = (fields.values + 32).view(torch.uint8)
    quants = torch.cat((_nibbles(unsigned & 15), _upper_bits(unsigned >> 4, 2)), dim=-1)
    return [
        _of_rows(fields.scales),
        _of_super_blocks(_of_rows(fields.sub_scales), 16),
        _of_super_blocks(quants, 8),
    ]


def _separate_q6_k(blocks: Tensor) -> WeightFields:
    sub_scales = _separate_rows(_of_sub_blocks(blocks[..., 16:144], 16), torch.int8, 0)
    quants = _of_sub_blocks(blocks[..., 144:], 8)
    low = _separate_nibbles(quants[..., :128])
    values = low | (_separate_upper_bits(quants[..., 128:], 2) << 4)
    scales = _separate_rows(blocks, torch.float16, 0)
    return WeightFields(values.view(torch.int8) - 32, scales, sub_scales=sub_scales)


def _of_super_blocks(parts: Tensor, count: int) -> Tensor:
    """Join the bytes of `count` sub-blocks: ``[groups, super-blocks, count * bytes]``."""
    return parts.reshape(len(parts), parts.shape[1] // count, -1)


def _of_sub_blocks(parts: Tensor, count: int) -> Tensor:
    """Undo `_of_super_blocks`."""
    return parts.reshape(len(parts), parts.shape[1] * count, -1)
