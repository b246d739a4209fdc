"""``x @ weight.T`` in float32 over dense weights, kept in panels of 16 rows.

Inputs are taken in runs of 256 (or of a scale's block): each run is summed by itself, one
fma after the other, and its sum goes to the total. The order is the same in every tile, so
a row of the result does not depend on how many rows there are; and a run of a panel (16 KB
of float32) stays in the L1 for all rows of x.
"""

from __future__ import annotations

from typing import Any

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import (
    add,
    broadcast_f32,
    fma,
    load_bf16x8,
    load_e4m3x8,
    load_f16x8,
    load_f32x8,
    load_first,
    mul,
    store_f32x8,
    store_first,
    zero_f32x8,
)
from octavo_kernels.cpu.team import next_chunk, num_threads

RUN = 256
ROWS_OF_CHUNK = 64
CHUNK_BYTES = 1 << 17


@inline
def put(out: int, is_added: int, scale: int, c: Any, d: Any, count: int) -> None:
    """Add a run's sums of 16 outputs to the total at `out`, or begin it."""
    if scale:
        c = mul(c, load_f32x8(scale))
        d = mul(d, load_f32x8(scale + 32))
    if count == 16:
        if is_added:
            c = add(load_f32x8(out), c)
            d = add(load_f32x8(out + 32), d)
        store_f32x8(out, c)
        store_f32x8(out + 32, d)
        return
    low = min(count, 8)
    if is_added:
        c = add(load_first(out, low), c)
    store_first(out, c, low)
    if count > 8:
        if is_added:
            d = add(load_first(out + 32, count - 8), d)
        store_first(out + 32, d, count - 8)


@inline
def put_bias(out: int, bias: int, count: int) -> None:
    low = min(count, 8)
    store_first(out, add(load_first(out, low), load_f32x8(bias)), low)
    if count > 8:
        high = add(load_first(out + 32, count - 8), load_f32x8(bias + 32))
        store_first(out + 32, high, count - 8)


def make_multiply(load: Any, itemsize: int) -> Any:
    """Make the product over weights of one type."""

    @jit
    def tile_4(w: int, x: int, row: int, length: int) -> Any:
        a0 = b0 = a1 = b1 = a2 = b2 = a3 = b3 = zero_f32x8()
        for i in range(length):
            p = w + 16 * itemsize * i
            u = load(p)
            v = load(p + 8 * itemsize)
            q = x + 4 * i
            y = broadcast_f32(q)
            a0 = fma(u, y, a0)
            b0 = fma(v, y, b0)
            y = broadcast_f32(q + row)
            a1 = fma(u, y, a1)
            b1 = fma(v, y, b1)
            y = broadcast_f32(q + 2 * row)
            a2 = fma(u, y, a2)
            b2 = fma(v, y, b2)
            y = broadcast_f32(q + 3 * row)
            a3 = fma(u, y, a3)
            b3 = fma(v, y, b3)
        return a0, b0, a1, b1, a2, b2, a3, b3

    @jit
    def tile_1(w: int, x: int, length: int) -> Any:
        a = b = zero_f32x8()
        for i in range(length):
            p = w + 16 * itemsize * i
            y = broadcast_f32(x + 4 * i)
            a = fma(load(p), y, a)
            b = fma(load(p + 8 * itemsize), y, b)
        return a, b

    @jit
    def multiply(
        thread: int,
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
        out_row: int,
        accumulate: int,
    ) -> None:
        """Multiply `m` float32 rows of x; ends without a barrier.

        `x_row` and `out_row` are the distances of rows of x and of the result in bytes. With
        `accumulate`, the result is added to what is in `out`.
        """
        panel_bytes = 16 * itemsize * k
        panels = (n + 15) // 16
        share = panels // (8 * num_threads(thread))
        step = max(1, min(share, CHUNK_BYTES // panel_bytes))
        row_chunks = (m + ROWS_OF_CHUNK - 1) // ROWS_OF_CHUNK
        chunks = (panels + step - 1) // step * row_chunks
        run_length = scale_block if scale_block else RUN
        runs = (k + run_length - 1) // run_length
        # One scale for a whole row is applied to each of its runs.
        scale_runs = runs if scale_block else 1
        chunk = next_chunk(thread)
        while chunk < chunks:
            first = chunk // row_chunks * step
            start = chunk % row_chunks * ROWS_OF_CHUNK
            end = min(m, start + ROWS_OF_CHUNK)
            for panel in range(first, min(panels, first + step)):
                at = 16 * panel
                count = min(16, n - at)
                for run in range(runs):
                    done = run * run_length
                    length = min(run_length, k - done)
                    w = weight + panel * panel_bytes + 16 * itemsize * done
                    s = 0
                    if scales:
                        s = scales + 64 * (panel * scale_runs + run % scale_runs)
                    i = start
                    while i + 4 <= end:
                        q = x + i * x_row + 4 * done
                        o = out + i * out_row + 4 * at
                        a0, b0, a1, b1, a2, b2, a3, b3 = tile_4(w, q, x_row, length)
                        put(o, run + accumulate, s, a0, b0, count)
                        put(o + out_row, run + accumulate, s, a1, b1, count)
                        put(o + 2 * out_row, run + accumulate, s, a2, b2, count)
                        put(o + 3 * out_row, run + accumulate, s, a3, b3, count)
                        i += 4
                    while i < end:
                        a0, b0 = tile_1(w, x + i * x_row + 4 * done, length)
                        put(out + i * out_row + 4 * at, run + accumulate, s, a0, b0, count)
                        i += 1
                if bias:
                    for i in range(start, end):
                        put_bias(out + i * out_row + 4 * at, bias + 4 * at, count)
            chunk = next_chunk(thread)

    return multiply


multiply_f32 = make_multiply(load_f32x8, 4)
multiply_bf16 = make_multiply(load_bf16x8, 2)
multiply_f16 = make_multiply(load_f16x8, 2)
multiply_e4m3 = make_multiply(load_e4m3x8, 1)
