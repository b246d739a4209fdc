"""Triton kernel of the gated activations of a feed-forward block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.launch import next_power_of_2, on_device_of, with_dense_rows

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)  # with the error function
GELU_TANH = tl.constexpr(2)

# Columns of a program: 8 numbers for each of 128 threads.
COLUMNS = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``; see `octavo_kernels.silu_and_mul`.

    Args:
        x: ``[num_tokens, 2 * intermediate_size]``; the gate comes first.
    """
    return _launch(x, SILU.value)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``gelu(gate) * up``; see `octavo_kernels.gelu_and_mul`.

    Args:
        x: ``[num_tokens, 2 * intermediate_size]``; the gate comes first.
        approximate: ``none`` for the error function, or ``tanh``.
    """
    return _launch(x, GELU_TANH.value if approximate == "tanh" else GELU.value)


def _launch(x: Tensor, kind: int) -> Tensor:
    size = x.shape[-1] // 2
    rows = with_dense_rows(x.reshape(-1, 2 * size))
    output = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if output.numel() > 0:
        block = min(COLUMNS, next_power_of_2(size))
        with on_device_of(x):
            _activate[(len(rows), -(-size // block))](
                *(rows, output, rows.stride(0), size),
                KIND=kind,
                BLOCK=block,
                num_warps=max(1, block // 256),
            )
    return output


@triton.jit
def _activate(x, output, x_stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == SILU:
        activated = silu(gate)
    elif KIND == GELU:
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # (1 + tanh(y)) / 2 is the sigmoid of 2 y, which has no overflow to worry about.
        activated = gate * tl.sigmoid(2.0 * inner)
    tl.store(output + row * size + at, (activated * up).to(output.dtype.element_ty), mask=inside)


@triton.jit
def silu(x):
    """Return ``x * sigmoid(x)`` of float32."""
    return x * tl.sigmoid(x)
