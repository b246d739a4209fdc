"""One projection: quantize x if the weight asks for it, and multiply.

The product itself is another kernel's entry point, so this one is compiled once for all
kinds of weights.
"""

from __future__ import annotations

from octavo_kernels.cpu.activations import quantize_row, quantized_bytes
from octavo_kernels.cpu.jit import jit
from octavo_kernels.cpu.simd import store_i64
from octavo_kernels.cpu.team import barrier, call_entry, next_chunk, rank

PRIVATE_ROWS = 4  # up to here every thread quantizes x for itself, which saves a barrier
ARGUMENT_BYTES = 128


@jit
def quantize_rows(thread: int, x: int, x_row: int, m: int, k: int, scratch: int) -> int:
    """Quantize `m` rows for the team, and return where this thread finds them."""
    row = quantized_bytes(k)
    if m <= PRIVATE_ROWS:
        a = scratch + rank(thread) * m * row
        for i in range(m):
            quantize_row(x + i * x_row, k, a + i * row)
        return a
    i = next_chunk(thread)
    while i < m:
        quantize_row(x + i * x_row, k, scratch + i * row)
        i = next_chunk(thread)
    barrier(thread)
    return scratch


@jit
def linear(
    thread: int,
    multiply: int,
    is_quantized: int,
    x: int,
    x_row: int,
    m: int,
    n: int,
    k: int,
    weight: int,
    bias: int,
    scales: int,
    scale_block: int,
    out: int,
    arguments: int,
    scratch: int,
) -> None:
    """Compute ``out[m, n]`` float32 from ``x[m, k]``, rows `x_row` bytes apart.

    `arguments` has `ARGUMENT_BYTES` for each thread. For quantized weights, `scratch` takes
    ``m`` quantized rows, and as many for each thread if `m` is at most `PRIVATE_ROWS`.
    """
    a, row = x, x_row
    if is_quantized:
        a, row = quantize_rows(thread, x, x_row, m, k, scratch), quantized_bytes(k)
    at = arguments + rank(thread) * ARGUMENT_BYTES
    store_i64(at, a)
    store_i64(at + 8, row)
    store_i64(at + 16, m)
    store_i64(at + 24, n)
    store_i64(at + 32, k)
    store_i64(at + 40, weight)
    store_i64(at + 48, bias)
    store_i64(at + 56, scales)
    store_i64(at + 64, scale_block)
    store_i64(at + 72, out)
    store_i64(at + 80, 4 * n)
    store_i64(at + 88, 0)
    call_entry(multiply, thread, at)
