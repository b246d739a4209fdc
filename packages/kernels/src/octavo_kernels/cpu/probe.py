"""Kernels that measure the machine: memory bandwidth, float32 peak, cost of a barrier."""

from __future__ import annotations

from octavo_kernels.cpu.jit import jit
from octavo_kernels.cpu.simd import (
    add,
    hsum,
    load_f32x8,
    load_f32x16,
    load_i64,
    store_f32,
    store_f32x8,
    store_f32x16,
    store_i64,
    zero_f32x8,
)
from octavo_kernels.cpu.team import (
    atomic_add,
    atomic_load,
    barrier,
    next_chunk,
    num_threads,
    pause,
    rank,
)
from octavo_kernels.cpu.tiles import IS_WIDE, add_products, distances_to, zeros_of

CHUNK_BYTES = 1 << 16
PEAK_ROWS = 10 if IS_WIDE else 5
"""Sums of 16 lanes that a core works on at once: as many as the registers hold, and enough that
none waits for its last addition."""

zeros_of_peak, distances_of_peak = zeros_of(PEAK_ROWS), distances_to(PEAK_ROWS)


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
    """Do ``chunks * rounds * 160`` float32 multiplications and as many additions.

    `out` has 16 float32 for each thread.
    """
    numbers = out + 64 * rank(thread)
    weight, distances = load_f32x16(numbers), distances_of_peak(4)
    chunk = next_chunk(thread)
    while chunk < chunks:
        sums = zeros_of_peak()
        for _ in range(rounds * 10 // PEAK_ROWS):
            sums = add_products(sums, weight, numbers, distances)
        total = sums[0]
        for i in range(1, PEAK_ROWS):
            total = add(total, sums[i])
        store_f32x16(numbers, total)
        chunk = next_chunk(thread)


@jit
def count_chunks(thread: int, rounds: int, chunks: int, counts: int, ranks: int) -> None:
    """Take `chunks` chunks in each of `rounds` rounds with a barrier after each.

    ``counts[i]`` int64 is how often chunk ``i`` was taken, and ``counts[chunks]`` how often one
    was when the round before it was not over; ``ranks[8 * rank]`` becomes 1.
    """
    store_i64(ranks + 64 * rank(thread), 1)
    for i in range(rounds):
        chunk = next_chunk(thread)
        while chunk < chunks:
            if load_i64(counts + 8 * ((chunk + 1) % chunks)) < i:
                atomic_add(counts + 8 * chunks, 1)
            atomic_add(counts + 8 * chunk, 1)
            chunk = next_chunk(thread)
        barrier(thread)


@jit
def count_chunks_beside_idlers(
    thread: int, rounds: int, chunks: int, counts: int, ranks: int, words: int
) -> None:
    """Do the same on the first thread, while the others do nothing until that has ended.

    ``words[0]`` counts the threads that are here, and ``words[1]`` the first one's ends.
    """
    atomic_add(words, 1)
    if rank(thread) == 0:
        while atomic_load(words) < num_threads(thread):
            pause()
        count_chunks(thread, rounds, chunks, counts, ranks)
        atomic_add(words + 8, 1)
        return
    while atomic_load(words + 8) == 0:
        pause()
    count_chunks(thread, rounds, chunks, counts, ranks)
