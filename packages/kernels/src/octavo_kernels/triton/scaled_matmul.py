"""Triton kernels of 8-bit products: int8 or float8 activations and weights, scaled at the end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton import tiles
from octavo_kernels.triton.launch import next_power_of_2, on_device_of, with_dense_rows
from octavo_kernels.triton.write_kv_cache import round_to_int8

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize each row with a scale of its own.

    Args:
        x: ``[num_tokens, size]`` floating point.
        dtype: int8 or float8_e4m3fn; the latter where `tiles.has_fp8_e4m3`.

    Returns:
        ``[num_tokens, size]`` of `dtype`, and ``[num_tokens]`` float32 scales to multiply with.
    """
    x = with_dense_rows(x)
    num_tokens, size = x.shape
    codes = torch.empty((num_tokens, size), dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens > 0:
        block, num_warps = tiles.element_block(size)
        with on_device_of(x):
            _quantize[(num_tokens,)](
                *(x, codes, scales, x.stride(0)),
                SIZE=size,
                LARGEST_NUMBER=_LARGEST[dtype],
                BLOCK=block,
                num_warps=num_warps,
            )
    return codes, scales


def scaled_matmul(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T`` with both in 8 bits (W8A8): `x` is quantized row by row.

    The sum along ``in_features`` is exact for int8 and in float32 for float8, so its bits don't
    depend on the number of rows for int8.

    Args:
        x: ``[num_tokens, in_features]`` floating point.
        weight: ``[out_features, in_features]`` int8, or float8_e4m3fn where the device
            multiplies it (`tiles.has_fp8_e4m3`).
        scales: ``[out_features]`` float32, to multiply the rows of `weight` with.
        bias: ``[out_features]``, or none.

    Returns:
        ``[num_tokens, out_features]``, of the type of `x`.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    output = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return output
    codes, token_scales = quantize_rows(x, weight.dtype)
    # Twice the numbers in the bytes of a tile of bfloat16.
    tile = tiles.matmul(tiles.architecture(), num_tokens, 2)
    grid = (-(-num_tokens // tile.rows), -(-out_features // tile.columns))
    with on_device_of(x):
        _matmul[grid](
            *(codes, weight, token_scales, scales, bias, output),
            *(num_tokens, out_features, in_features, weight.stride(0)),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth if in_features > 64 else max(32, next_power_of_2(in_features)),
            **tile.options,
        )
    return output


@triton.jit
def _quantize(
    x,
    codes,
    scales,
    x_stride,
    SIZE: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program quantizes one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    numbers = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), 0)
    factor = tl.where(largest > 0.0, tl.div_rn(LARGEST_NUMBER, largest), 0.0)
    scaled = tl.minimum(tl.maximum(numbers * factor, -LARGEST_NUMBER), LARGEST_NUMBER)
    tl.store(scales + row, tl.div_rn(largest, LARGEST_NUMBER))
    if codes.dtype.element_ty == tl.int8:
        tl.store(codes + row * SIZE + at, round_to_int8(scaled), mask=inside)
    else:
        tl.store(codes + row * SIZE + at, scaled.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _matmul(
    x,
    weight,
    token_scales,
    scales,
    bias,
    output,
    num_tokens,
    out_features,
    in_features,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program computes one tile of the output."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = token < num_tokens
    is_row = row < out_features
    at = tl.arange(0, BLOCK_K)
    of_token = x + token.to(tl.int64)[:, None] * in_features
    of_row = weight + row.to(tl.int64)[None, :] * weight_stride
    if x.dtype.element_ty == tl.int8:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        inside = start + at < in_features
        a = tl.load(of_token + (start + at)[None, :], mask=is_token[:, None] & inside[None, :])
        b = tl.load(of_row + (start + at)[:, None], mask=inside[:, None] & is_row[None, :])
        if x.dtype.element_ty == tl.int8:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        else:
            # Hopper adds float8 products with 14 bits; into float32 after each tile.
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
    result = acc.to(tl.float32) * tl.load(token_scales + token, mask=is_token)[:, None]
    result = result * tl.load(scales + row, mask=is_row)[None, :]
    if bias is not None:
        result = result + tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + token.to(tl.int64)[:, None] * out_features + row[None, :],
        result.to(output.dtype.element_ty),
        mask=is_token[:, None] & is_row[None, :],
    )
