"""Kernels that measure the machine: memory bandwidth, float32 peak, cost of a barrier."""

from __future__ import annotations

from octavo_kernels.cpu.jit import jit
from octavo_kernels.cpu.simd import (
    add,
    fma,
    hsum,
    load_f32x8,
    splat_f32,
    store_f32,
    store_f32x8,
    store_i64,
    zero_f32x8,
)
from octavo_kernels.cpu.team import atomic_add, barrier, next_chunk, rank

CHUNK_BYTES = 1 << 16


@jit
def read_bytes(thread: int, source: int, size: int, out: int) -> None:
    """Read `size` bytes, a multiple of 64 KiB; a sum per thread goes to `out`."""
    total = zero_f32x8()
    chunk = next_chunk(thread)
    while chunk * CHUNK_BYTES < size:
        start = source + chunk * CHUNK_BYTES
        a = zero_f32x8()
        b = zero_f32x8()
        for offset in range(0, CHUNK_BYTES, 64):
            a = add(a, load_f32x8(start + offset))
            b = add(b, load_f32x8(start + offset + 32))
        total = add(total, add(a, b))
        chunk = next_chunk(thread)
    store_f32(out + 64 * rank(thread), hsum(total))


@jit
def copy_bytes(thread: int, source: int, target: int, size: int) -> None:
    """Copy `size` bytes, a multiple of 64 KiB."""
    chunk = next_chunk(thread)
    while chunk * CHUNK_BYTES < size:
        start = chunk * CHUNK_BYTES
        for offset in range(start, start + CHUNK_BYTES, 32):
            store_f32x8(target + offset, load_f32x8(source + offset))
        chunk = next_chunk(thread)


@jit
def multiply_add(thread: int, chunks: int, rounds: int, out: int) -> None:
    """Do ``chunks * rounds * 80`` float32 multiplications and as many additions."""
    factor = splat_f32(0.5)
    chunk = next_chunk(thread)
    while chunk < chunks:
        # Unlike starts, or the compiler would do one sum in place of ten.
        a = splat_f32(1.0)
        b = splat_f32(2.0)
        c = splat_f32(3.0)
        d = splat_f32(4.0)
        e = splat_f32(5.0)
        f = splat_f32(6.0)
        g = splat_f32(7.0)
        h = splat_f32(8.0)
        i = splat_f32(9.0)
        j = splat_f32(10.0)
        for _ in range(rounds):
            a = fma(a, factor, factor)
            b = fma(b, factor, factor)
            c = fma(c, factor, factor)
            d = fma(d, factor, factor)
            e = fma(e, factor, factor)
            f = fma(f, factor, factor)
            g = fma(g, factor, factor)
            h = fma(h, factor, factor)
            i = fma(i, factor, factor)
            j = fma(j, factor, factor)
        total = add(add(add(a, b), add(c, d)), add(add(add(e, f), add(g, h)), add(i, j)))
        store_f32(out + 64 * rank(thread), hsum(total))
        chunk = next_chunk(thread)


@jit
def count_chunks(thread: int, rounds: int, chunks: int, counts: int, ranks: int) -> None:
    """Take `chunks` chunks in each of `rounds` rounds with a barrier after each.

    ``counts[i]`` int64 is how often chunk ``i`` was taken; ``ranks[8 * rank]`` becomes 1.
    """
    store_i64(ranks + 64 * rank(thread), 1)
    for _ in range(rounds):
        chunk = next_chunk(thread)
        while chunk < chunks:
            atomic_add(counts + 8 * chunk, 1)
            chunk = next_chunk(thread)
        barrier(thread)
