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
    load_bf16x16,
    load_e4m3x16,
    load_f16x16,
    load_f32x16,
    load_first_of_16,
    mul,
    stay_apart,
    store_f32x16,
    store_first,
)
from octavo_kernels.cpu.team import next_chunk, num_threads
from octavo_kernels.cpu.tiles import add_products, cover_with, distances_to, zeros_of

RUN = 256
ROWS_OF_CHUNK = 64
CHUNK_BYTES = 1 << 17


@inline
def put(out: int, is_added: int, scale: int, c: Any, count: int) -> None:
    """Add a run's sums of 16 outputs to the total at `out`, or begin it."""
    if scale:
        c = mul(c, load_f32x16(scale))
    if count == 16:
        if is_added:
            c = add(load_f32x16(out), c)
        store_f32x16(out, c)
        return
    if is_added:
        c = add(load_first_of_16(out, count), c)
    store_first(out, c, count)


def make_multiply(load: Any, itemsize: int) -> Any:
    """Make the product over weights of one type."""

    def make_step(rows: int) -> Any:
        zeros, distances = zeros_of(rows), distances_to(rows)

        @jit
        def tile(w: int, x: int, row: int, length: int) -> Any:
            stay_apart()
            c, x_rows = zeros(), distances(row)
            for i in range(length):
                c = add_products(c, load(w + 16 * itemsize * i), x + 4 * i, x_rows)
            return c

        @inline
        def step(x: int, row: int, out: int, out_row: int, others: Any) -> None:
            w, length, is_added, scale, count = others
            c = tile(w, x, row, length)
            for i in range(rows):
                put(out + i * out_row, is_added, scale, c[i], count)

        return step

    cover = cover_with(make_step)

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
                    others = (w, length, run + accumulate, s, count)
                    cover(start, end, x + 4 * done, x_row, out + 4 * at, out_row, others)
                if bias:
                    for i in range(start, end):
                        o = out + i * out_row + 4 * at
                        sums = add(load_first_of_16(o, count), load_f32x16(bias + 4 * at))
                        store_first(o, sums, count)
            chunk = next_chunk(thread)

    return multiply


multiply_f32 = make_multiply(load_f32x16, 4)
multiply_bf16 = make_multiply(load_bf16x16, 2)
multiply_f16 = make_multiply(load_f16x16, 2)
multiply_e4m3 = make_multiply(load_e4m3x16, 1)
