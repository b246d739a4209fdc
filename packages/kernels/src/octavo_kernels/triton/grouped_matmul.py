"""Triton kernel of ``x @ weight.T`` with a grouped weight that stays packed in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton import tiles
from octavo_kernels.triton.fp8 import decode_e4m3
from octavo_kernels.triton.grouped_weight import GroupedWeight
from octavo_kernels.triton.launch import on_device_of, with_dense_rows

# What the codes are, as the kernel is told.
NIBBLES = tl.constexpr(0)  # two in a byte
BYTES = tl.constexpr(1)  # int8, or a float8 that the device converts
E4M3_BITS = tl.constexpr(2)  # float8_e4m3fn, as uint8


def grouped_matmul(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    """Multiply activations with a grouped weight.

    Weights are unpacked in registers, in float32, and rounded to the type of `x`; products are
    added up in float32.

    Args:
        x: ``[num_tokens, in_features]``, or with more dimensions before the last.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or none.
        batch_invariant: Whether a row's bits may not depend on the number of rows.

    Returns:
        ``[num_tokens, out_features]``, of the type of `x`.
    """
    rows = with_dense_rows(x.reshape(-1, x.shape[-1]))
    if weight.input_order is not None:
        rows = rows[:, weight.input_order]
    num_tokens, out_features = len(rows), weight.out_features
    output = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return output
    tile = tiles.matmul(tiles.architecture(), num_tokens, x.itemsize, batch_invariant)
    kind, codes = BYTES.value, weight.codes
    if codes.dtype == torch.uint8:
        kind = NIBBLES.value
    elif codes.dtype == torch.float8_e4m3fn and not tiles.has_fp8_e4m3():
        kind, codes = E4M3_BITS.value, codes.view(torch.uint8)
    depth = _depth(tile.depth, weight.group_size)
    grid = (-(-num_tokens // tile.rows), -(-out_features // tile.columns))
    with on_device_of(x):
        _matmul[grid](
            *(rows, codes, weight.scales, weight.zeros, weight.minima, bias, output),
            *(num_tokens, out_features, weight.in_features, rows.stride(0)),
            *(codes.stride(0), weight.scales.stride(0)),
            KIND=kind,
            ZERO=weight.zero,
            GROUP=weight.group_size,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=depth,
            **tile.options,
        )
    return output


def _depth(depth: int, group_size: int) -> int:
    """Return the depth of a tile that holds whole groups, or lies within one."""
    if group_size >= depth:
        while group_size % depth:
            depth //= 2
    return max(depth, 16)


@triton.jit
def _matmul(
    x,
    codes,
    scales,
    zeros,
    minima,
    bias,
    output,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    codes_stride,
    scales_stride,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program computes one tile of the output, along all of `in_features` in order."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = token < num_tokens
    is_row = row < out_features
    at = tl.arange(0, BLOCK_K)
    of_token = x + token.to(tl.int64)[:, None] * x_stride
    of_row = codes + row.to(tl.int64)[:, None] * codes_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        inside = start + at < in_features
        a = tl.load(
            of_token + (start + at)[None, :], mask=is_token[:, None] & inside[None, :], other=0.0
        )
        if KIND == NIBBLES:
            byte_at = start // 2 + tl.arange(0, BLOCK_K // 2)
            in_row = is_row[:, None] & (byte_at < in_features // 2)[None, :]
            packed = tl.load(of_row + byte_at[None, :], mask=in_row, other=0)
            both = tl.join(packed & 15, packed >> 4)  # [BLOCK_N, BLOCK_K / 2, 2]
            w = tl.reshape(both, [BLOCK_N, BLOCK_K]).to(tl.float32)
        else:
            in_row = is_row[:, None] & inside[None, :]
            if KIND == E4M3_BITS:
                w = decode_e4m3(tl.load(of_row + (start + at)[None, :], mask=in_row, other=0))
            else:
                w = tl.load(of_row + (start + at)[None, :], mask=in_row).to(tl.float32)
        group_at = row.to(tl.int64) * scales_stride
        if zeros is not None:
            w = w - _by_group(zeros, group_at, start, is_row, in_features, GROUP, BLOCK_N, BLOCK_K)
        else:
            w = w - ZERO
        w = w * _by_group(scales, group_at, start, is_row, in_features, GROUP, BLOCK_N, BLOCK_K)
        if minima is not None:
            w = w + _by_group(minima, group_at, start, is_row, in_features, GROUP, BLOCK_N, BLOCK_K)
        acc = tl.dot(a, tl.trans(w.to(a.dtype)), acc, input_precision="ieee")
    if bias is not None:
        acc = acc + tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + token.to(tl.int64)[:, None] * out_features + row[None, :],
        acc.to(output.dtype.element_ty),
        mask=is_token[:, None] & is_row[None, :],
    )


@triton.jit
def _by_group(
    values,
    group_at,
    start,
    is_row,
    in_features,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load one number for each row and group, and repeat it for the weights of the group.

    Returns:
        ``[BLOCK_N, BLOCK_K]`` float32, or ``[BLOCK_N, 1]`` if the tile lies in one group.
    """
    if GROUP >= BLOCK_K:
        of_group = tl.load(values + group_at + start // GROUP, mask=is_row, other=0)
        result = of_group.to(tl.float32)[:, None]
    else:
        NUM_GROUPS: tl.constexpr = BLOCK_K // GROUP
        group = start // GROUP + tl.arange(0, NUM_GROUPS)
        inside = is_row[:, None] & (group < in_features // GROUP)[None, :]
        of_groups = tl.load(values + group_at[:, None] + group[None, :], mask=inside, other=0)
        repeated = tl.broadcast_to(
            of_groups.to(tl.float32)[:, :, None], [BLOCK_N, NUM_GROUPS, GROUP]
        )
        result = tl.reshape(repeated, [BLOCK_N, BLOCK_K])
    return result
